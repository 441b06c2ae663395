"""Claimed messages, and the outcomes retained for messages that may be redelivered to this worker."""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from time import monotonic
from typing import Any, NamedTuple

import msgspec

from umbel.brokers.interface import Ack, Delivery, Tag
from umbel.errors import WireError
from umbel.protocol.delivery.delivery import Admit, Arrival
from umbel.protocol.delivery.sensitive import HIDDEN, MASK, Sensitive
from umbel.wire.call import TaskHeaders, decode_task
from umbel.wire.message import Message
from umbel.wire.show import show_args, show_kwargs

# ---- retained outcomes -----------------------------------------------------------------------------

RETAINED_MAX = 1000
RETAINED_MAX_BYTES = 16 * 1024 * 1024
RETAINED_S = 600.0
SETTLED_MAX = 10_000


class RetainedOutcome(NamedTuple):
    """An outcome that was not applied, and until when it is retained."""

    verdict: Ack
    delivery: Delivery
    size_bytes: int
    until: float


class RetainedOutcomes:
    """Outcomes, by task id, of tasks whose messages may be redelivered to this worker.

    A task may end after its claim has: RabbitMQ takes back what was claimed on a broken connection, and every
    broker what was claimed by a worker whose lease expired. Its outcome cannot be settled with that claim. If
    the message is redelivered to this worker, the outcome is settled with the new claim, and the task is not
    run again. `came_back` maps ended claims, whose outcomes still wait at the settler, to the redelivered
    messages.

    RabbitMQ does not confirm acks (`confirmed`), so an ack sent into a dead connection looks settled. What
    was applied with it stays applied, and a message that is redelivered is acknowledged once more.

    At most RETAINED_MAX outcomes of RETAINED_MAX_BYTES are retained, for RETAINED_S, and SETTLED_MAX settled
    messages are remembered; the oldest are dropped first. A task whose outcome was dropped, or whose message
    went to another worker, runs again, as at-least-once delivery allows.
    """

    def __init__(self, clock: Callable[[], float] = monotonic, *, confirmed: bool = True) -> None:
        self._clock = clock
        self.confirmed = confirmed
        self.came_back: dict[Tag, Delivery] = {}
        self._settled: OrderedDict[str, int] = OrderedDict()  # by task id, which message was acknowledged
        self._retained: dict[str, RetainedOutcome] = {}  # by task id, oldest first
        self._size_bytes = 0

    def settled(
        self, outcomes: Iterable[tuple[Ack, Delivery]], conflicts: Collection[Tag]
    ) -> dict[Tag, tuple[Ack, Delivery]]:
        """Note settled outcomes; return, by old claim, those to settle with a redelivery's claim."""
        again: dict[Tag, tuple[Ack, Delivery]] = {}
        for ack, delivery in outcomes:
            back = self.came_back.pop(ack.tag, None)
            if back is not None:
                verdict = ack if ack.tag in conflicts else Ack(ack.tag)  # its results were applied
                again[ack.tag] = (msgspec.structs.replace(verdict, tag=back.tag), back)
            elif ack.tag in conflicts:
                self._retain(ack, delivery)
            elif not self.confirmed:
                self._settled[delivery.message.correlation_id] = _digest(delivery)
        while len(self._settled) > SETTLED_MAX:
            self._settled.popitem(last=False)
        return again

    def take(self, delivery: Delivery) -> Ack | None:
        """Return the retained outcome of this message with its new claim, or None."""
        self._drop_old()
        task_id = delivery.message.correlation_id
        retained = self._retained.get(task_id)
        if retained is not None and is_same_message(retained.delivery, delivery):
            self._drop(task_id)
            return msgspec.structs.replace(retained.verdict, tag=delivery.tag)
        return Ack(delivery.tag) if self._settled.get(task_id) == _digest(delivery) else None

    def _retain(self, verdict: Ack, delivery: Delivery) -> None:
        task_id = delivery.message.correlation_id
        self._drop(task_id)
        retained = RetainedOutcome(verdict, delivery, _size_of(verdict, delivery), self._clock() + RETAINED_S)
        self._retained[task_id] = retained
        self._size_bytes += retained.size_bytes
        self._drop_old()

    def _drop_old(self) -> None:
        now = self._clock()
        for task_id, retained in list(self._retained.items()):
            is_over = len(self._retained) > RETAINED_MAX or self._size_bytes > RETAINED_MAX_BYTES
            if not is_over and now < retained.until:
                return
            self._drop(task_id)

    def _drop(self, task_id: str) -> None:
        dropped = self._retained.pop(task_id, None)
        self._size_bytes -= 0 if dropped is None else dropped.size_bytes


def is_same_message(first: Delivery, second: Delivery) -> bool:
    """Return whether both deliveries bring one message; a retry of its task has other headers."""
    ours, theirs = first.message, second.message
    return first.queue == second.queue and (ours.headers, ours.body) == (theirs.headers, theirs.body)


def _digest(delivery: Delivery) -> int:
    return hash((delivery.queue, delivery.message.headers, delivery.message.body))


def _size_of(verdict: Ack, delivery: Delivery) -> int:
    messages = [delivery.message, *(sent.message for sent in verdict.follow_ups)]
    return sum(len(result.payload) for result in verdict.results) + sum(
        len(message.headers) + len(message.body) for message in messages
    )


# ---- claimed message -------------------------------------------------------------------------------

DECODED_MAX_BYTES = 64 * 1024


class Claimed(msgspec.Struct):
    """A message that this worker has claimed and not settled: what was read of it, and how far its run is."""

    number: int
    delivery: Delivery
    message: Message  # in protocol version 2
    headers: TaskHeaders
    arrival: Arrival
    run: Admit | None = None  # once it is admitted
    hard_limit_s: float | None = None
    soft_limit_s: float | None = None
    start_by: float = 0.0  # on the monotonic clock: its limit permits no later start; 0: any time
    acked: bool = False  # its ack was sent, or is on its way, while its task has not ended
    sent_received: bool = False  # the event `task-received`
    sent_started: bool = False
    received_at: float = 0.0  # Unix time, where events or meters need it
    started_at: float | None = None  # Unix time, once it is known to run
    pid: int | None = None
    hides: Sensitive | None = None
    terminated_by: str = ""  # the signal, when a command asked to terminate it

    @property
    def shown(self) -> tuple[str, str]:
        """Return arguments and keywords as events may show them.

        Where arguments are sensitive, the texts in the headers are not used: Celery's clients do not mask
        them.
        """
        headers = self.headers
        if self.hides is None:
            return headers.argsrepr, headers.kwargsrepr
        found = self.arguments()
        return (MASK, MASK) if found is None else (show_args(found[0]), show_kwargs(found[1]))

    def arguments(self, mask: Any = HIDDEN) -> tuple[Sequence[Any], Mapping[str, Any]] | None:
        """Return the arguments with sensitive ones masked; None when the body is too large or not JSON.

        The main process decodes JSON only: it runs nothing that a message brings.
        """
        if not self.message.body or len(self.message.body) > DECODED_MAX_BYTES:
            return None
        try:
            call = decode_task(self.message)
        except WireError:
            return None
        return (
            (call.args, call.kwargs) if self.hides is None else self.hides.hide(call.args, call.kwargs, mask)
        )
