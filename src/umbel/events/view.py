"""The readable record of a task, computed from its registers when needed.

Each field has one rule that looks at the registers only. So the view does not depend on the order in which
events arrived. Views are never merged, because they do not hold enough information for that.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from umbel.events.merge import Registers, count, first_us, winner
from umbel.events.precedence import ENDINGS, state_of
from umbel.events.types import (
    KNOWN_TYPES,
    LOCAL_FIELDS,
    TASK_PREFIX,
    TASK_TYPES,
    Event,
    OtherEvent,
    TaskCustom,
    TaskEvent,
    TaskReceived,
    TaskSent,
    fields_of,
    tag_of,
)
from umbel.protocol.delivery.states import PENDING

# ---- reading ---------------------------------------------------------------------------------------
#
# Reading an event from the wire never fails, whatever a peer sent: a field of the wrong type goes to `extra`,
# and an impossible clock or time counts as 0. A map that is not an event (without a type, or a task event
# without a task id) gives None, which the caller counts.
#
# A reader shares texts that senders repeat (names of nodes, tasks and queues), so that a million events hold
# one copy. It remembers a limited number of texts and then starts over; that only costs memory.

SHARED_MAX = 20_000
EventT = TypeVar("EventT", bound=Event)


class EventReader:
    """Reads events. `tasks` holds the known tasks; their ids are reused instead of copied."""

    def __init__(self, tasks: Mapping[str, Any] | None = None) -> None:
        self._tasks: Mapping[str, Any] = {} if tasks is None else tasks
        self._texts: dict[str, str] = {}

    def read(self, event: Mapping[str, Any]) -> Event | None:
        """Return the event as a record; None if it is not an event."""
        type_name = event.get("type")
        if type(type_name) is not str:
            return None
        task_type = _TASK_TYPES.get(type_name)
        if task_type is None:
            return self._read_other(event, type_name)
        try:
            record = msgspec.convert(event, task_type)
        except msgspec.ValidationError:
            loose = _read_loosely(event, task_type)
            if loose is None:
                return None
            record = loose
        self._settle_task(record)
        return record

    def _read_other(self, event: Mapping[str, Any], type_name: str) -> Event | None:
        """Read events of workers, which are rare, and events of unknown types."""
        if type_name.startswith(TASK_PREFIX):
            subject = type_name.removeprefix(TASK_PREFIX)
            custom = _read_loosely(event, TaskCustom, subject=subject) if subject else None
            if custom is not None:
                self._settle_task(custom)
            return custom
        record: Event | None
        known = KNOWN_TYPES.get(type_name)
        if known is None:
            record = _read_loosely(event, OtherEvent, told_type=type_name)
        else:
            record = _read_loosely(event, known)
        if record is not None:
            self._settle(record)
        return record

    def _settle(self, record: Event) -> None:
        """Normalize the record so that it can be compared, and share repeated texts."""
        record.timestamp = round(record.timestamp * 1_000_000) / 1_000_000
        hostname = record.hostname
        record.hostname = self._texts.get(hostname) or self._remember(hostname)

    def _settle_task(self, record: TaskEvent) -> None:
        self._settle(record)
        known = self._tasks.get(record.uuid)
        if known is not None:
            record.uuid = known.uuid
        if type(record) is TaskReceived or type(record) is TaskSent:
            self._settle_description(record)

    def _settle_description(self, record: TaskReceived | TaskSent) -> None:
        texts, name = self._texts, record.name
        if name is not None:
            record.name = texts.get(name) or self._remember(name)
        if record.root_id == record.uuid:
            record.root_id = record.uuid
        if type(record) is TaskSent:
            record.clock = 0
            queue, exchange, key = record.queue, record.exchange, record.routing_key
            record.queue = queue and (texts.get(queue) or self._remember(queue))
            record.exchange = exchange and (texts.get(exchange) or self._remember(exchange))
            record.routing_key = key and (texts.get(key) or self._remember(key))

    def _remember(self, text: str) -> str:
        if len(self._texts) >= SHARED_MAX:
            self._texts.clear()
        return self._texts.setdefault(text, text)


def _read_loosely(event: Mapping[str, Any], record_type: type[EventT], **given: str) -> EventT | None:
    """Read each field that has the right type; put the others in `extra`, except those that receivers add."""
    hints = _HINTS[record_type]
    taken = {name: value for name, value in event.items() if name in hints and value is not None}
    odd = {
        str(name): value
        for name, value in event.items()
        if name not in hints and value is not None and name not in _NO_EXTRA
    }
    try:
        record = msgspec.convert({"type": tag_of(record_type), **given, **taken}, record_type)
    except msgspec.ValidationError:
        right = {name: value for name, value in taken.items() if _is_right(value, hints[name])}
        if issubclass(record_type, TaskEvent) and "uuid" not in right:
            return None
        odd |= {name: taken[name] for name in taken.keys() - right.keys() - _ENVELOPE}
        record = msgspec.convert({"type": tag_of(record_type), **given, **right}, record_type)
    record.extra = odd or None
    return record


def _is_right(value: object, hint: Any) -> bool:
    try:
        msgspec.convert(value, hint)
    except msgspec.ValidationError:
        return False
    return True


_TASK_TYPES = {tag_of(record): record for record in TASK_TYPES}
_ALL_TYPES: tuple[type[Event], ...] = (*KNOWN_TYPES.values(), TaskCustom, OtherEvent)
_HINTS: Mapping[type[Event], dict[str, Any]] = {record: fields_of(record) for record in _ALL_TYPES}
_ENVELOPE = frozenset(_HINTS[TaskCustom])
_NO_EXTRA = LOCAL_FIELDS | {"type"}


# ---- view ------------------------------------------------------------------------------------------


class TaskRecord(msgspec.Struct, frozen=True, gc=False):
    """One task. Times are Unix seconds; `…_at` is the time of the newest attempt that reached that state.

    `worker` is null while no node is known to have the task. The error of a task that succeeded is the last
    one before its success. `partial`: the task was dropped from memory once, so earlier events are missing.
    """

    uuid: str
    state: str
    state_at: float | None
    clock: int
    worker: str | None
    name: str | None
    args: str | None
    kwargs: str | None
    root_id: str | None
    parent_id: str | None
    eta: str | None
    expires: str | None
    retries: int
    client: str | None
    queue: str | None
    exchange: str | None
    routing_key: str | None
    result: str | None
    runtime: float | None
    exception: str | None
    traceback: str | None
    terminated: bool | None
    signum: int | str | None
    expired: bool | None
    requeue: bool | None
    sent_at: float | None
    received_at: float | None
    started_at: float | None
    succeeded_at: float | None
    failed_at: float | None
    retried_at: float | None
    revoked_at: float | None
    rejected_at: float | None
    first_sent_at: float | None
    first_received_at: float | None
    first_started_at: float | None
    first_succeeded_at: float | None
    first_failed_at: float | None
    first_retried_at: float | None
    first_revoked_at: float | None
    first_rejected_at: float | None
    n_deliveries: int
    n_terminal: int
    extra: Mapping[str, Any] | None
    partial: bool = False


TIMED = ("sent", "received", "started", "succeeded", "failed", "retried", "revoked", "rejected")


def view(registers: Registers, *, remembered: str | None = None, partial: bool = False) -> TaskRecord:
    """Return the record. `remembered` is the outcome of a dropped task, which applies until another one
    arrives.
    """
    best = winner(registers)
    ended = remembered is not None and (best is None or best.slot not in ENDINGS)
    sent, revoked, rejected = registers.sent, registers.revoked, registers.rejected
    succeeded, error = registers.succeeded, registers.failed or registers.retried
    described = _described(registers)
    return TaskRecord(
        uuid=registers.uuid,
        state=remembered if ended and remembered else PENDING if best is None else state_of(best),
        state_at=None if best is None else seconds(best.at_us),
        clock=0 if best is None else best.clock,
        worker=worker_of(best),
        name=_first(described, "name"),
        args=_first(described, "args"),
        kwargs=_first(described, "kwargs"),
        root_id=_first(described, "root_id"),
        parent_id=_first(described, "parent_id"),
        eta=_first(described, "eta"),
        expires=_first(described, "expires"),
        retries=max((event.retries or 0 for event in registers.events()), default=0),
        client=_of(sent, "hostname"),
        queue=_of(sent, "queue"),
        exchange=_of(sent, "exchange"),
        routing_key=_of(sent, "routing_key"),
        result=_of(succeeded, "result"),
        runtime=_of(succeeded, "runtime"),
        exception=_of(error, "exception"),
        traceback=_of(error, "traceback"),
        terminated=_of(revoked, "terminated"),
        signum=_of(revoked, "signum"),
        expired=_of(revoked, "expired"),
        requeue=_of(rejected, "requeue"),
        n_deliveries=count(registers, "received"),
        n_terminal=sum(count(registers, slot) for slot in ENDINGS),
        extra=None if best is None else best.extra,
        partial=partial,
        **_times(registers),
    )


def worker_of(best: TaskEvent | None) -> str | None:
    """Return the worker that sent the event; None for the event of a client."""
    return None if best is None or best.slot == "sent" else best.hostname


def name_of(registers: Registers) -> str | None:
    """Return the task's name; None if no event states it."""
    received, sent = registers.received, registers.sent
    if sent is None or received is None:
        only = received or sent
        return None if only is None else only.name
    name: str | None = _first(_described(registers), "name")
    return name


def seconds(at_us: int) -> float:
    """Return microseconds as seconds."""
    return at_us / 1_000_000


def _described(registers: Registers) -> list[TaskReceived | TaskSent]:
    """Return the events that describe the call, newest attempt first; for the same attempt, the receipt
    first.
    """
    found = [event for event in (registers.received, registers.sent) if event is not None]
    return sorted(found, key=lambda event: -(event.retries or 0))


def _of(event: TaskEvent | None, name: str) -> Any:
    return None if event is None else getattr(event, name)


def _first(described: list[TaskReceived | TaskSent], name: str) -> Any:
    return next((value for event in described if (value := getattr(event, name)) is not None), None)


def _times(registers: Registers) -> dict[str, float | None]:
    times: dict[str, float | None] = {}
    for slot in TIMED:
        held, first = registers.held(slot), first_us(registers, slot)
        times[f"{slot}_at"] = None if held is None else seconds(held.at_us)
        times[f"first_{slot}_at"] = None if first is None else seconds(first)
    return times
