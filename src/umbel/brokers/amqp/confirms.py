"""Confirms: which published messages the server has answered for. Pure; both kinds of link account with it.

The server numbers what is published on a channel and answers by number: one message, or all up to it. So
batches that are under way together are ranges of numbers, and an answer for many costs one step a batch.

A returned message has no number, and comes before its confirmation. It goes to the first batch under way
that has sent the same message and not yet got it back, or, where the server wrote it in other bytes, one
with the same exchange and routing key.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable
from operator import attrgetter

from umbel.brokers.amqp.frames import Incoming
from umbel.brokers.amqp.refusals import ChannelClosed, Undecided
from umbel.errors import BrokerError

Sent = tuple[str, str, bytes, bytes]
"""Exchange, routing key, properties and body of one message."""

AllSent = Callable[[], Iterable[Sent]]
"""The messages of a batch; asked for only when one comes back."""


_first = attrgetter("first")


class Batch:
    """Messages that were published together: how many wait for an answer, which were refused or came back."""

    __slots__ = (
        "_apart",
        "_low",
        "_out",
        "_sent",
        "error",
        "first",
        "missing",
        "on_done",
        "refused",
        "returned",
    )

    def __init__(self, first: int, count: int, sent: AllSent, on_done: Callable[[], None]) -> None:
        self.first = first  # the number of its first message on the channel
        self.missing = count
        self.error: BrokerError | None = None  # why the server will not answer for the rest
        self.refused: list[int] = []  # places in the batch
        self.returned: list[Incoming] = []  # mandatory messages that no queue took
        self.on_done = on_done
        self._low = first  # all before it are answered for
        self._apart: set[int] = set()  # and these beyond it
        self._sent = sent
        self._out: Counter[Sent] | None = None

    @property
    def last(self) -> int:
        return self._low + self.missing + len(self._apart) - 1

    def answer_one(self, number: int, *, accepted: bool) -> None:
        if number < self._low or number in self._apart:
            return
        self.missing -= 1
        if not accepted:
            self.refused.append(number - self.first)
        if number != self._low:
            self._apart.add(number)
            return
        self._low += 1
        while self._low in self._apart:
            self._apart.discard(self._low)
            self._low += 1

    def answer_up_to(self, number: int, *, accepted: bool) -> None:
        end = min(number, self.last) + 1
        before = {one for one in self._apart if one < end} if self._apart else set()
        if not accepted:
            self.refused += [one - self.first for one in range(self._low, end) if one not in before]
        self.missing -= max(0, end - self._low) - len(before)
        self._apart -= before
        self._low = max(self._low, end)

    def takes_back(self, incoming: Incoming, *, by_route: bool) -> bool:
        """Whether it is one of these, of which not all came back already."""
        if self._out is None:
            self._out = Counter(self._sent())
        came = sent_of(incoming)
        found = next((one for one in self._out if one[:2] == came[:2]), None) if by_route else came
        if found is None or not self._out[found]:
            return False
        self._out[found] -= 1
        if not self._out[found]:
            del self._out[found]
        self.returned.append(incoming)
        return True


class Unconfirmed:
    """The batches under way on one channel, in the order of their numbers; each sender has its `on_done`."""

    def __init__(self) -> None:
        self._batches: list[Batch] = []
        self._published = 0

    def __len__(self) -> int:
        return len(self._batches)

    def add(self, count: int, sent: AllSent, on_done: Callable[[], None]) -> Batch:
        batch = Batch(self._published + 1, count, sent, on_done)
        self._published += count
        self._batches.append(batch)
        return batch

    def answer(self, number: int, *, multiple: bool, accepted: bool) -> None:
        """The server has answered for one message, or for all up to it."""
        batches = self._batches
        end = bisect_right(batches, number, key=_first)
        start = 0 if multiple else max(0, end - 1)
        touched = batches[start:end]
        for batch in touched:
            if multiple:
                batch.answer_up_to(number, accepted=accepted)
            elif number <= batch.last:
                batch.answer_one(number, accepted=accepted)
        batches[start:end] = [batch for batch in touched if batch.missing]
        for batch in touched:
            if not batch.missing:
                batch.on_done()

    def take_back(self, incoming: Incoming) -> None:
        """A message that no queue took; that of nobody under way is dropped."""
        for by_route in (False, True):
            if any(batch.takes_back(incoming, by_route=by_route) for batch in self._batches):
                return

    def fail(self, error: BrokerError) -> None:
        """The channel has ended. What was under way beside others is undecided: one of them closed it."""
        ended, self._batches, self._published = self._batches, [], 0
        senders = {batch.on_done for batch in ended}
        if isinstance(error, ChannelClosed) and len(senders) > 1:
            error = Undecided(error)
        for batch in ended:
            batch.error = error
            batch.on_done()


def route_of(returned: Incoming) -> tuple[str, str]:
    _, _, exchange, routing_key = returned.fields
    return exchange, routing_key


def sent_of(returned: Incoming) -> Sent:
    return *route_of(returned), returned.properties, returned.body
