"""Every known event type, with its fields, as one typed record each.

This is the vocabulary (`VOCABULARY`). The wire reader, the merge and the tables of the pipeline take names
and types of fields from here and nowhere else.

A record has the fields of the wire, normalized. The time is in whole microseconds. The clock is 0 if it is
missing or invalid, and for `task-sent`, whose sender takes no part in the cluster's clock. A missing attempt
stays missing: Celery's workers state it on sent and received events only, so 0 would be a guess. A value that
has no field, or has another type than its field, is in `extra`. An envelope value of the wrong type counts as
missing.

There are many records in memory, so they are small. The garbage collector does not track them, which is safe
because they hold plain data and cannot form a cycle. They are not changed after the reader has built them.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, get_type_hints

import msgspec

from umbel.protocol.clock import CLOCK_MAX

RETRIES_MAX = 65_534
"""The highest attempt that the view can rank."""

EARLIER_STARTS = "earlier_starts"
"""A field of `task-received`: how often the task of a requeued dead letter had started before."""

TIME_MAX_S = 253_402_300_799.0  # the end of the year 9999
TASK_PREFIX = "task-"

Clock = Annotated[int, msgspec.Meta(ge=0, le=CLOCK_MAX)]
Attempt = Annotated[int, msgspec.Meta(ge=0, le=RETRIES_MAX)]
Int = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]  # the range of an integer column of the lake
Seconds = Annotated[float, msgspec.Meta(ge=0, le=TIME_MAX_S)]
Id = Annotated[str, msgspec.Meta(min_length=1)]


class Event(msgspec.Struct, kw_only=True, gc=False, forbid_unknown_fields=True, tag_field="type"):
    """The fields of all events. `inc` (the incarnation) and `seq` (the number within it) are Umbel's."""

    hostname: str = ""
    pid: Int = 0
    clock: Clock = 0
    timestamp: Seconds = 0.0
    utcoffset: float | None = None
    inc: Int | None = None
    seq: Int | None = None
    extra: dict[str, Any] | None = msgspec.field(default=None, name="*")  # never sent

    @property
    def type_name(self) -> str:
        """Return the event type on the wire."""
        return tag_of(type(self))

    @property
    def at_us(self) -> int:
        """Return when it happened by the sender's clock, in microseconds since 1970, UTC."""
        return round(self.timestamp * 1_000_000)


class TaskEvent(Event, kw_only=True):
    """An event of a task. `retries` is the attempt, from 0; None if the sender did not state it."""

    slot: ClassVar[str] = ""
    uuid: Id
    retries: Attempt | None = None


class TaskSent(TaskEvent, tag="task-sent"):
    """A client sent the task."""

    slot: ClassVar[str] = "sent"
    name: str | None = None
    args: str | None = None
    kwargs: str | None = None
    root_id: str | None = None
    parent_id: str | None = None
    eta: str | None = None
    expires: str | None = None
    queue: str | None = None
    exchange: str | None = None
    routing_key: str | None = None


class TaskReceived(TaskEvent, tag="task-received"):
    """A worker received the task's message."""

    slot: ClassVar[str] = "received"
    name: str | None = None
    args: str | None = None
    kwargs: str | None = None
    root_id: str | None = None
    parent_id: str | None = None
    eta: str | None = None
    expires: str | None = None


class TaskStarted(TaskEvent, tag="task-started"):
    """A worker started the task."""

    slot: ClassVar[str] = "started"


class TaskSucceeded(TaskEvent, tag="task-succeeded"):
    """The task returned."""

    slot: ClassVar[str] = "succeeded"
    result: str | None = None
    runtime: float | None = None


class TaskFailed(TaskEvent, tag="task-failed"):
    """The task failed and will not be retried."""

    slot: ClassVar[str] = "failed"
    exception: str | None = None
    traceback: str | None = None


class TaskRetried(TaskEvent, tag="task-retried"):
    """The task failed and will be retried."""

    slot: ClassVar[str] = "retried"
    exception: str | None = None
    traceback: str | None = None


class TaskRevoked(TaskEvent, tag="task-revoked"):
    """The task was revoked."""

    slot: ClassVar[str] = "revoked"
    terminated: bool | None = None
    signum: Int | str | None = None
    expired: bool | None = None


class TaskRejected(TaskEvent, tag="task-rejected"):
    """The task was rejected."""

    slot: ClassVar[str] = "rejected"
    requeue: bool | None = None


class TaskCustom(TaskEvent, kw_only=True):
    """An event of a custom type: `task-progress` is the state PROGRESS."""

    slot: ClassVar[str] = "custom"
    subject: str

    @property
    def type_name(self) -> str:
        """Return the event type on the wire."""
        return f"{TASK_PREFIX}{self.subject}"


class WorkerBeat(Event):
    """What a worker reports about itself when it goes online, periodically, and when it goes offline."""

    freq: float | None = None
    active: Int | None = None
    processed: Int | None = None
    loadavg: list[Any] | None = None
    sw_ident: str | None = None
    sw_ver: str | None = None
    sw_sys: str | None = None


class WorkerOnline(WorkerBeat, tag="worker-online"):
    """A worker goes online."""


class WorkerHeartbeat(WorkerBeat, tag="worker-heartbeat"):
    """A worker's periodic heartbeat."""


class WorkerOffline(WorkerBeat, tag="worker-offline"):
    """A worker goes offline."""


class WorkerElect(Event, tag="worker-elect"):
    """A candidate of the classic election (v1), or our reply to one."""

    id: str | None = None
    topic: str | None = None
    action: dict[str, Any] | None = None
    cver: Int | None = None


class WorkerElectAck(Event, tag="worker-elect-ack"):
    """A worker acknowledges a candidate of the classic election (v1)."""

    id: str | None = None


class WorkerElected(Event, tag="worker-elected"):
    """The progress of an election by the store (v2); `eid` is the election's id."""

    eid: str | None = None
    topic: str | None = None
    phase: str | None = None
    winner: str | None = None
    term: Int | None = None
    attempt: Int | None = None
    policy: str | None = None
    outcome: str | None = None
    cver: Int | None = None


class OtherEvent(Event, kw_only=True):
    """An event of an unknown group or type; all its fields are in `extra`."""

    told_type: str

    @property
    def type_name(self) -> str:
        """Return the event type on the wire."""
        return self.told_type


TASK_TYPES: tuple[type[TaskEvent], ...] = (
    TaskSent,
    TaskReceived,
    TaskStarted,
    TaskSucceeded,
    TaskFailed,
    TaskRetried,
    TaskRevoked,
    TaskRejected,
)
WORKER_TYPES: tuple[type[Event], ...] = (
    WorkerOnline,
    WorkerHeartbeat,
    WorkerOffline,
    WorkerElect,
    WorkerElectAck,
    WorkerElected,
)


def tag_of(record: type[Event]) -> str:
    """Return the event type on the wire for a record's class."""
    return str(record.__struct_config__.tag)


KNOWN_TYPES: Mapping[str, type[Event]] = {tag_of(record): record for record in (*TASK_TYPES, *WORKER_TYPES)}

SLOTS = (*(record.slot for record in TASK_TYPES), TaskCustom.slot)
"""The registers of a task: one for each type of task event, and one for all custom types."""

LOCAL_FIELDS = frozenset({"local_received", "delivery_tag", "archived_at"})
"""Fields that receivers add. They are ignored, so that all receivers have the same event."""


def fields_of(record: type[Event]) -> dict[str, Any]:
    """Return the fields on the wire and their types, without `type`."""
    hints = get_type_hints(record, include_extras=True)
    names = [field.name for field in msgspec.structs.fields(record)]
    return {name: hints[name] for name in names if name not in _NOT_ON_THE_WIRE}


_NOT_ON_THE_WIRE = frozenset({"extra", "subject", "told_type"})

VOCABULARY: Mapping[str, Mapping[str, Any]] = {
    name: fields_of(record) for name, record in KNOWN_TYPES.items()
}
"""For every known type, its fields on the wire and their types."""
