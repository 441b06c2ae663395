"""KeptOutcomes: how tasks ended whose messages may come back to this worker.

A task may end after its claim has: RabbitMQ takes back what was claimed on a connection that was cut,
every broker the messages of a worker whose lease ended. Its outcome cannot be settled with that claim. If the
message is redelivered to this very worker, the outcome is settled with the new claim, and the task is
not run again.

RabbitMQ does not confirm an ack, so one that was sent into a dead connection looks settled. What was
applied with it stays applied, and a message that comes back is acknowledged once more.

At most KEPT_MAX outcomes of KEPT_MAX_BYTES wait for their messages, for KEPT_S, and SETTLED_MAX settled
messages are remembered; the oldest go first. A task whose outcome went, or whose message went to
another worker, runs again, as at-least-once allows.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping

import msgspec

from umbel.brokers.interface import Ack, Delivery, Tag

KEPT_MAX = 1000
KEPT_MAX_BYTES = 16 * 1024 * 1024
KEPT_S = 600.0
SETTLED_MAX = 10_000


class _Kept(msgspec.Struct, frozen=True):
    verdict: Ack
    delivery: Delivery
    size_bytes: int
    until: float


class KeptOutcomes:
    """`confirmed`: whether what the broker calls settled is settled for certain.

    Messages of outcomes that wait to be settled are the settler's; `came_back` names, by their claims that
    have ended, those that are here again.
    """

    def __init__(self, clock: Callable[[], float], *, confirmed: bool = True) -> None:
        self._clock = clock
        self.confirmed = confirmed
        self.came_back: dict[Tag, Delivery] = {}
        self._settled: OrderedDict[str, int] = OrderedDict()  # by task id, which message was acknowledged
        self._kept: dict[str, _Kept] = {}  # by task id, oldest first
        self._size_bytes = 0

    def settled(
        self, outcomes: Iterable[tuple[Ack, Delivery]], conflicts: Collection[Tag]
    ) -> dict[Tag, tuple[Ack, Delivery]]:
        """By the old claim, what is to be settled with the claim that its message came back with."""
        again: dict[Tag, tuple[Ack, Delivery]] = {}
        if not conflicts and not self.came_back:  # as nearly always
            self._remember(delivery for _, delivery in outcomes)
            return again
        for ack, delivery in outcomes:
            back = self.came_back.pop(ack.tag, None)
            if back is not None:
                kept = ack if ack.tag in conflicts else Ack(ack.tag)  # the rest was applied
                again[ack.tag] = (msgspec.structs.replace(kept, tag=back.tag), back)
            elif ack.tag in conflicts:
                self._keep(ack, delivery)
            else:
                self._remember([delivery])
        return again

    def take(self, delivery: Delivery) -> Ack | None:
        """The outcome of this message, to be settled with its new claim, if it is kept."""
        self._drop_old()
        task_id = delivery.message.correlation_id
        kept = self._kept.get(task_id)
        if kept is not None and is_same_message(kept.delivery, delivery):
            self._drop(task_id)
            return msgspec.structs.replace(kept.verdict, tag=delivery.tag)
        return Ack(delivery.tag) if self._settled.get(task_id) == _digest(delivery) else None

    def _keep(self, verdict: Ack, delivery: Delivery) -> None:
        task_id = delivery.message.correlation_id
        self._drop(task_id)
        kept = _Kept(verdict, delivery, _size_of(verdict, delivery), self._clock() + KEPT_S)
        self._kept[task_id] = kept
        self._size_bytes += kept.size_bytes
        self._drop_old()

    def _remember(self, deliveries: Iterable[Delivery]) -> None:
        if self.confirmed:
            return
        self._settled |= {one.message.correlation_id: _digest(one) for one in deliveries}
        while len(self._settled) > SETTLED_MAX:
            self._settled.popitem(last=False)

    def _drop_old(self) -> None:
        now = self._clock()
        for task_id, kept in list(self._kept.items()):
            if len(self._kept) <= KEPT_MAX and self._size_bytes <= KEPT_MAX_BYTES and now < kept.until:
                return
            self._drop(task_id)

    def _drop(self, task_id: str) -> None:
        dropped = self._kept.pop(task_id, None)
        self._size_bytes -= 0 if dropped is None else dropped.size_bytes


def claim_of(delivery: Delivery, waiting: Mapping[Tag, Delivery]) -> Tag | None:
    """The earlier claim of the same message, if it is among those that wait."""
    task_id = delivery.message.correlation_id
    same = (
        tag
        for tag, one in waiting.items()
        if one.message.correlation_id == task_id and is_same_message(one, delivery)
    )
    return next(same, None)


def is_same_message(one: Delivery, other: Delivery) -> bool:
    """Whether both bring one message: a retry of its task has other headers."""
    ours, theirs = one.message, other.message
    return one.queue == other.queue and (ours.headers, ours.body) == (theirs.headers, theirs.body)


def _digest(delivery: Delivery) -> int:
    return hash((delivery.queue, delivery.message.headers, delivery.message.body))


def _size_of(verdict: Ack, delivery: Delivery) -> int:
    sent = [one.message for one in verdict.follow_ups]
    return sum(len(one.payload) for one in verdict.results) + sum(
        len(one.headers) + len(one.body) for one in [delivery.message, *sent]
    )
