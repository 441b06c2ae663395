"""Confirms: which published messages the server has answered for.

Pure; the asynchronous and the blocking link use it. The server numbers what is published on a channel and
confirms by number: one message, or all up to it. Batches that are in flight together are ranges of numbers
(`Unconfirmed`), so a confirmation for many messages costs one step for each batch. A message whose sender
stopped waiting for its confirmation is remembered (`Unanswered`), so that sending it again does not write it
twice.
"""

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from math import inf
from operator import attrgetter
from time import monotonic
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from umbel.brokers.amqp.frames import Incoming
from umbel.brokers.amqp.handshake import ChannelClosed, Undecided
from umbel.brokers.interface import SENT_REMEMBERED_S
from umbel.errors import BrokerError

if TYPE_CHECKING:
    from umbel.brokers.amqp.publishing import Post

Sent = tuple[str, str, bytes, bytes]
"""Exchange, routing key, properties and body of one message."""

AllSent = Callable[[], Iterable[Sent]]
"""The messages of a batch; called only when a message is returned."""


_first = attrgetter("first")


class Outcome(Enum):
    """The outcome of one published message."""

    UNDER_WAY = "under way"
    ACCEPTED = "accepted"
    REFUSED = "refused"
    RETURNED = "returned"  # no queue accepted it
    LOST = "lost"  # its channel ended without an answer: the server may have it


class Batch:
    """Messages that were published together: how many wait for an answer, and which were refused or returned.

    `sender` tells the batches of one sender from those of others. `waiters` are called when the server has
    answered for all messages, or never will.
    """

    __slots__ = (
        "_apart",
        "_low",
        "_out",
        "_sent",
        "error",
        "first",
        "missing",
        "refused",
        "returned",
        "sender",
        "waiters",
    )

    def __init__(self, first: int, count: int, sent: AllSent, sender: object) -> None:
        self.first = first  # the number of its first message on the channel
        self.missing = count
        self.error: BrokerError | None = None  # why the server will not answer for the rest
        self.refused: set[int] = set()  # places in the batch
        self.returned: set[int] = set()  # places of mandatory messages that no queue accepted
        self.sender = sender
        self.waiters: list[Callable[[], None]] = []
        self._low = first  # all numbers below it have an answer
        self._apart: set[int] = set()  # and so have these numbers above it
        self._sent = sent
        self._out: dict[Sent, list[int]] | None = None  # places that have not come back

    @property
    def last(self) -> int:
        """The number of its last message on the channel."""
        return self._low + self.missing + len(self._apart) - 1

    @property
    def is_under_way(self) -> bool:
        """Whether answers are still to come."""
        return self.missing > 0 and self.error is None

    def outcome(self, place: int) -> Outcome:
        """Return the outcome of the message at this place in the batch."""
        number = self.first + place
        if number >= self._low and number not in self._apart:
            return Outcome.UNDER_WAY if self.error is None else Outcome.LOST
        if place in self.returned:
            return Outcome.RETURNED
        return Outcome.REFUSED if place in self.refused else Outcome.ACCEPTED

    def answer_one(self, number: int, *, accepted: bool) -> None:
        """Note the server's answer for the message with this number; a second answer changes nothing."""
        if number < self._low or number in self._apart:
            return
        self.missing -= 1
        if not accepted:
            self.refused.add(number - self.first)
        if number != self._low:
            self._apart.add(number)
            return
        self._low += 1
        while self._low in self._apart:
            self._apart.discard(self._low)
            self._low += 1

    def answer_up_to(self, number: int, *, accepted: bool) -> None:
        """Note the server's answer for all messages up to this number."""
        end = min(number, self.last) + 1
        before = {answered for answered in self._apart if answered < end} if self._apart else set()
        if not accepted:
            self.refused.update(at - self.first for at in range(self._low, end) if at not in before)
        self.missing -= max(0, end - self._low) - len(before)
        self._apart -= before
        self._low = max(self._low, end)

    def takes_back(self, incoming: Incoming, *, by_route: bool) -> bool:
        """Note a returned message if it is one of this batch that has not come back yet; return whether it
        is.
        """
        if self._out is None:
            self._out = {}
            for place, sent in enumerate(self._sent()):
                self._out.setdefault(sent, []).append(place)
        came = _sent_of(incoming)
        found = next((sent for sent in self._out if sent[:2] == came[:2]), None) if by_route else came
        if found is None or found not in self._out:
            return False
        self.returned.add(self._out[found].pop())
        if not self._out[found]:
            del self._out[found]
        return True

    def end(self, error: BrokerError | None = None) -> None:
        """Release the messages and wake the waiters: no more answers come."""
        self.error = error
        self._sent, self._out = tuple, None
        for wake in self.waiters:
            wake()


class Unconfirmed:
    """The batches in flight on one channel, in the order of their numbers."""

    def __init__(self) -> None:
        self._batches: list[Batch] = []
        self._published = 0

    def __len__(self) -> int:
        return len(self._batches)

    def add(self, count: int, sent: AllSent, sender: object) -> Batch:
        """Add a batch of messages that are published next on the channel."""
        batch = Batch(self._published + 1, count, sent, sender)
        self._published += count
        self._batches.append(batch)
        return batch

    def answer(self, number: int, *, multiple: bool, accepted: bool) -> None:
        """Note the server's answer for one message, or for all up to it."""
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
                batch.end()

    def take_back(self, incoming: Incoming) -> None:
        """Note a message that the server returned because no queue took it; one of no batch in flight is
        ignored.

        A returned message has no number, and comes before its confirmation. It belongs to the first batch
        that has sent the same message and not yet got it back or, where the server wrote it in other bytes,
        to one with the same exchange and routing key.
        """
        for by_route in (False, True):
            if any(batch.takes_back(incoming, by_route=by_route) for batch in self._batches):
                return

    def fail(self, error: BrokerError) -> None:
        """End all batches, because the channel has ended. With batches of several senders in flight, it is
        undecided which one closed it.
        """
        ended, self._batches, self._published = self._batches, [], 0
        if isinstance(error, ChannelClosed) and len({id(batch.sender) for batch in ended}) > 1:
            error = Undecided(error)
        for batch in ended:
            batch.end(error)


def _sent_of(returned: Incoming) -> Sent:
    _, _, exchange, routing_key = returned.fields
    return exchange, routing_key, returned.properties, returned.body


# ---- unanswered ------------------------------------------------------------------------------------

REMEMBERED_MAX = 100_000
WayT = TypeVar("WayT")


class SendPlan(NamedTuple):
    """Which of some messages must still be sent, by their places, and which the server has refused."""

    to_send: "dict[int, Post]"
    refused: list[int]


class _GivenUp(Generic[WayT]):
    """A batch whose sender does not wait for the answer any more."""

    __slots__ = ("_clock", "batch", "ended_at", "way")

    def __init__(self, batch: Batch, way: WayT | None, clock: Callable[[], float]) -> None:
        self.batch = batch
        self.way = way
        self.ended_at = inf
        self._clock = clock
        batch.waiters.append(self._note_end)
        if not batch.is_under_way:
            self._note_end()

    def _note_end(self) -> None:
        self.ended_at, self.way = self._clock(), None


class Unanswered(Generic[WayT]):
    """Messages whose senders gave up waiting, so that sending them again does not write them twice.
    Thread-safe.

    A sender stops waiting when the answer is overdue, when it is cancelled, or when the connection ends. The
    server may have the message all the same, or read it later: a server with a resource alarm reads what was
    written when the alarm is over. So a message that is sent again is looked up here first:

    * If its first publish is in flight, its sender waits for that answer.
    * If the server accepted or refused it meanwhile, that is the answer.
    * If the server returned it because no queue took it, it is sent.
    * If its channel ended without an answer, it is sent as redelivered, because it may have run.

    A message is the same if it goes to the same queue with the same id, headers and body, or if it ends the
    same claim in the same way.

    The limits of this: another process knows nothing of it. Beyond REMEMBERED_MAX messages the oldest are
    forgotten, and so is a message that was not sent again within SENT_REMEMBERED_S after its answer. Entries
    of streams and results are not looked up, because two copies of them mean the same as one. `WayT` is the
    channel or connection on which a batch is answered.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._lock = threading.RLock()  # a signal handler may send while its thread does
        # By message, the oldest first. It is nearly always empty, which senders check first.
        self.given_up: dict[int, tuple[_GivenUp[WayT], int]] = {}

    def add(self, posts: "Sequence[Post]", batch: Batch, way: WayT | None) -> None:
        """Remember messages that were published as this batch, because their sender stops waiting for the
        answer.
        """
        given_up = _GivenUp(batch, way, self._clock)
        with self._lock:
            self._drop_old()
            for place, post in enumerate(posts):
                if (key := post.identity()) is not None:
                    self.given_up.pop(key, None)
                    self.given_up[key] = given_up, place
            while len(self.given_up) > REMEMBERED_MAX:
                del self.given_up[next(iter(self.given_up))]

    def add_accepted(self, posts: "Sequence[Post]") -> None:
        """Remember accepted messages whose sender will send them again, because it failed in a later step."""
        batch = Batch(1, len(posts), tuple, None)
        batch.answer_up_to(len(posts), accepted=True)
        self.add(posts, batch, None)

    def under_way(self, posts: "Sequence[Post]") -> list[tuple[Batch, WayT]]:
        """Return the batches whose answers the sender of these messages must wait for."""
        found = {id(given_up): given_up for _, given_up, _ in self._known(posts)}
        return [
            (given_up.batch, given_up.way)
            for given_up in found.values()
            if given_up.batch.is_under_way and given_up.way is not None
        ]

    def plan(self, posts: "Sequence[Post]") -> SendPlan:
        """Return which of these messages must still be sent; none of them may be in flight."""
        plan = SendPlan(dict(enumerate(posts)), [])
        for number, given_up, place in self._known(posts):
            outcome = given_up.batch.outcome(place)
            if outcome is Outcome.LOST:
                plan.to_send[number] = posts[number].as_redelivered()
            elif outcome in (Outcome.ACCEPTED, Outcome.REFUSED):
                del plan.to_send[number]
            if outcome is Outcome.REFUSED:
                plan.refused.append(number)
        return plan

    def may_have_arrived(self, posts: "Sequence[Post]") -> bool:
        """Whether the server may have any of these messages."""
        not_there = (Outcome.REFUSED, Outcome.RETURNED)
        return any(known.batch.outcome(place) not in not_there for _, known, place in self._known(posts))

    def forget(self, posts: "Sequence[Post]") -> None:
        """Forget these messages: their sender has learned the outcome."""
        with self._lock:
            for post in posts if self.given_up else ():
                if (key := post.identity()) is not None:
                    self.given_up.pop(key, None)

    def _known(self, posts: "Sequence[Post]") -> Iterator[tuple[int, _GivenUp[WayT], int]]:
        oldest = self._clock() - SENT_REMEMBERED_S
        for number, post in enumerate(posts if self.given_up else ()):
            key = post.identity()
            found = None if key is None else self.given_up.get(key)
            if found is not None and found[0].ended_at > oldest:
                yield number, *found

    def _drop_old(self) -> None:
        """Forget the oldest messages, up to the first that may still be needed."""
        oldest = self._clock() - SENT_REMEMBERED_S
        while self.given_up:
            key, (given_up, _) = next(iter(self.given_up.items()))
            if given_up.ended_at > oldest:
                return
            del self.given_up[key]
