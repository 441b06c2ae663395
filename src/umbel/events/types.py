"""Types: every event that is known by name, with its fields, as one typed record each.

This is the vocabulary. The reader of the wire, the merge and the tables of the pipeline take
names and types of fields from here and nowhere else (`VOCABULARY`).

A record has the fields of the wire, with some things settled. The time is in whole microseconds.
The clock is 0 where it is missing or none that an honest sender has, and for `task-sent`, whose
sender takes no part in the cluster's clock. An attempt that is missing stays missing: Celery's
workers say it on sent and received only, and a zero would claim to know. What has no field of its
own, or not the type that its field has, is in `extra`; of the envelope, such a value counts as
missing.

Records are many, so they are small: not tracked by the garbage collector (they hold plain data
and cannot form a cycle). Nobody changes one after the reader has made it.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, get_type_hints

import msgspec

from umbel.protocol.clock import CLOCK_MAX

RETRIES_MAX = 65_534
"""The view ranks attempts up to here."""

TIME_MAX_S = 253_402_300_799.0  # the end of the year 9999
TASK_PREFIX = "task-"

Clock = Annotated[int, msgspec.Meta(ge=0, le=CLOCK_MAX)]
Attempt = Annotated[int, msgspec.Meta(ge=0, le=RETRIES_MAX)]
Int = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]  # what a column of the lake can hold
Seconds = Annotated[float, msgspec.Meta(ge=0, le=TIME_MAX_S)]
Id = Annotated[str, msgspec.Meta(min_length=1)]


class Event(msgspec.Struct, kw_only=True, gc=False, forbid_unknown_fields=True, tag_field="type"):
    """What all events have. `inc` (the incarnation) and `seq` (its events, counted) are Umbel's."""

    hostname: str = ""
    pid: Int = 0
    clock: Clock = 0
    timestamp: Seconds = 0.0
    utcoffset: float | None = None
    inc: Int | None = None
    seq: Int | None = None
    extra: dict[str, Any] | None = msgspec.field(default=None, name="*")  # on no wire

    @property
    def type_name(self) -> str:
        return tag_of(type(self))

    @property
    def at_us(self) -> int:
        """When it happened by its sender's clock, in microseconds since 1970, UTC."""
        return round(self.timestamp * 1_000_000)


class TaskEvent(Event, kw_only=True):
    """`retries` is the attempt, counted from 0; None where the sender did not say."""

    slot: ClassVar[str] = ""
    uuid: Id
    retries: Attempt | None = None


class TaskSent(TaskEvent, tag="task-sent"):
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
    slot: ClassVar[str] = "received"
    name: str | None = None
    args: str | None = None
    kwargs: str | None = None
    root_id: str | None = None
    parent_id: str | None = None
    eta: str | None = None
    expires: str | None = None


class TaskStarted(TaskEvent, tag="task-started"):
    slot: ClassVar[str] = "started"


class TaskSucceeded(TaskEvent, tag="task-succeeded"):
    slot: ClassVar[str] = "succeeded"
    result: str | None = None
    runtime: float | None = None


class TaskFailed(TaskEvent, tag="task-failed"):
    slot: ClassVar[str] = "failed"
    exception: str | None = None
    traceback: str | None = None


class TaskRetried(TaskEvent, tag="task-retried"):
    slot: ClassVar[str] = "retried"
    exception: str | None = None
    traceback: str | None = None


class TaskRevoked(TaskEvent, tag="task-revoked"):
    slot: ClassVar[str] = "revoked"
    terminated: bool | None = None
    signum: Int | str | None = None
    expired: bool | None = None


class TaskRejected(TaskEvent, tag="task-rejected"):
    slot: ClassVar[str] = "rejected"
    requeue: bool | None = None


class TaskCustom(TaskEvent, kw_only=True):
    """An event of a type that a user made up: `task-progress` is the state PROGRESS."""

    slot: ClassVar[str] = "custom"
    subject: str

    @property
    def type_name(self) -> str:
        return f"{TASK_PREFIX}{self.subject}"


class WorkerBeat(Event):
    """What a worker says of itself when it comes, while it is there, and when it goes."""

    freq: float | None = None
    active: Int | None = None
    processed: Int | None = None
    loadavg: list[Any] | None = None
    sw_ident: str | None = None
    sw_ver: str | None = None
    sw_sys: str | None = None


class WorkerOnline(WorkerBeat, tag="worker-online"):
    pass


class WorkerHeartbeat(WorkerBeat, tag="worker-heartbeat"):
    pass


class WorkerOffline(WorkerBeat, tag="worker-offline"):
    pass


class WorkerElect(Event, tag="worker-elect"):
    """A candidate of the classic election (v1), or our answer to one."""

    id: str | None = None
    topic: str | None = None
    action: dict[str, Any] | None = None
    cver: Int | None = None


class WorkerElectAck(Event, tag="worker-elect-ack"):
    id: str | None = None


class WorkerElected(Event, tag="worker-elected"):
    """How far an election by the store (v2) has come; `eid` is the election's id."""

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
    """Of a group or type without fields known here; all of it is in `extra`."""

    told_type: str

    @property
    def type_name(self) -> str:
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
    return str(record.__struct_config__.tag)


KNOWN_TYPES: Mapping[str, type[Event]] = {tag_of(one): one for one in (*TASK_TYPES, *WORKER_TYPES)}

SLOTS = (*(one.slot for one in TASK_TYPES), TaskCustom.slot)
"""A task's registers, one for each type of task event and one for all that users made up."""

LOCAL_FIELDS = frozenset({"local_received", "delivery_tag", "archived_at"})
"""What a receiver writes into an event; no part of it, so two receivers agree on what they heard."""


def fields_of(record: type[Event]) -> dict[str, Any]:
    """The fields on the wire, beside `type`, and their types."""
    hints = get_type_hints(record, include_extras=True)
    names = [field.name for field in msgspec.structs.fields(record)]
    return {name: hints[name] for name in names if name not in _NOT_ON_THE_WIRE}


_NOT_ON_THE_WIRE = frozenset({"extra", "subject", "told_type"})

VOCABULARY: Mapping[str, Mapping[str, Any]] = {
    name: fields_of(record) for name, record in KNOWN_TYPES.items()
}
"""Of every known type its fields on the wire and their types."""
