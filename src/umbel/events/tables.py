"""Events as columns, and the columns of the tables that are built from them.

The lists of columns are data: the recorder makes its Arrow schema from them, the pipeline its Spark schemas,
readers their queries, and the documentation its tables. Columns are only ever added, and a type never
changes, so old files stay readable next to new ones. A renamed column states its old name (`was`).
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from umbel.events.merge import eid
from umbel.events.types import VOCABULARY, Event, TaskEvent
from umbel.events.view import TIMED, TaskRecord

# ---- columns ---------------------------------------------------------------------------------------
#
# A row holds the record of `types.py`, normalized by the reader, so every engine that reads the lake starts
# with the same values. `digest` identifies the event (`merge.py`). Do not confuse it with a worker's `eid`,
# which is an election's id. A list or a map on the wire becomes JSON text, and so does a value that may have
# several types.

LAKE_VERSION = 1

Kind = Literal["text", "int", "float", "bool", "instant", "json"]


class Column(msgspec.Struct, frozen=True):
    """One column of the lake; `since` is the version of the lake that added it."""

    name: str
    kind: Kind
    doc: str
    since: int = 1


# Every row has these columns in addition to the fields of its type.
_ENVELOPE = (
    Column("digest", "int", "64 bits that identify the event; a duplicate of an event has the same"),
    Column("type", "text", "task-received, worker-heartbeat, …"),
    Column("slot", "text", "of a task event: the register it belongs to; `custom` for custom types"),
    Column("timestamp", "instant", "when it happened, by its sender's clock; 1970 if the time was invalid"),
    Column("extra", "json", "fields without a column, as one JSON object with sorted keys"),
    Column("recorded_at", "instant", "when the broker's log recorded it, by the broker's clock"),
    Column("source", "text", "which log or fan-out the recorder read it from"),
)
_DOCS: Mapping[str, str] = {
    "hostname": "the node that sent the event; for task-sent the client",
    "pid": "its process",
    "clock": "Lamport time on the wire; 0 where it is missing, and for task-sent",
    "utcoffset": "the sender's offset from UTC in hours, with Celery's sign",
    "inc": "the sender's incarnation: microseconds at its start; Umbel only",
    "seq": "the sender's event number, without gaps within one incarnation; Umbel only",
    "uuid": "the task's id",
    "retries": "the attempt, from 0; null where the sender did not report it",
    "name": "the task's name",
    "args": "its positional arguments as text, cut",
    "kwargs": "its named arguments as text, cut",
    "root_id": "the first task of its workflow",
    "parent_id": "the task that sent it",
    "eta": "not to run before this, ISO 8601",
    "expires": "not to run after this, ISO 8601",
    "queue": "where it was sent to",
    "exchange": "the exchange it was sent to",
    "routing_key": "the routing key it was sent with",
    "result": "what it returned, as text, cut",
    "runtime": "seconds it ran",
    "exception": "what it raised, as text",
    "traceback": "where it raised it",
    "terminated": "whether it was running when it was revoked",
    "signum": "the signal that ended it, a number or a name",
    "expired": "whether it was revoked because it came too late",
    "requeue": "whether it went back into its queue",
    "freq": "seconds between this worker's heartbeats",
    "active": "tasks it was running",
    "processed": "tasks it had finished since its start",
    "loadavg": "load of its host over 1, 5 and 15 minutes",
    "sw_ident": "its software",
    "sw_ver": "the version of its software",
    "sw_sys": "its operating system",
    "id": "of a classic election: its id",
    "topic": "what the election is about",
    "action": "the action of the leader",
    "cver": "version of the election protocol",
    "eid": "of an election by the store: its id",
    "phase": "the phase of that election",
    "winner": "the leader",
    "term": "the fencing token of the winner",
    "attempt": "the number of the attempt",
    "policy": "what happens when a winner dies",
    "outcome": "how the election ended",
}
_KINDS: Mapping[str, Kind] = {
    "int": "int",
    "float": "float",
    "bool": "bool",
    "str": "text",
    "list": "json",
    "dict": "json",
}
# On the wire this is a number or a name, so no single column type fits.
_SEVERAL: Mapping[str, Kind] = {"signum": "json"}


def _fields() -> Mapping[str, Any]:
    """Return every field of every known type, in the order of the vocabulary."""
    return {name: hint for fields in VOCABULARY.values() for name, hint in fields.items()}


def _kind(name: str, hint: Any) -> Kind:
    if name in _SEVERAL:
        return _SEVERAL[name]
    described = msgspec.inspect.type_info(hint)
    options = described.types if isinstance(described, msgspec.inspect.UnionType) else (described,)
    names = {type(option).__name__.removesuffix("Type").lower() for option in options} - {"none"}
    assert len(names) == 1, f"{name} must have one type on the wire"
    return _KINDS[names.pop()]


COLUMNS: tuple[Column, ...] = (
    *_ENVELOPE,
    *(
        Column(name, _kind(name, hint), _DOCS[name])
        for name, hint in _fields().items()
        if name not in {column.name for column in _ENVELOPE}
    ),
)
"""Every column of the lake, in the order of the event types. Files are read by the names of columns."""

REQUIRED = ("digest", "type", "timestamp")
"""Columns that every file of events has; older files may lack the others."""

to_json: Callable[[Any], bytes] = msgspec.json.Encoder(order="deterministic", enc_hook=str).encode


def row(event: Event, *, recorded_us: int, source: str) -> dict[str, Any]:
    """Return an event as one row, with instants in microseconds since 1970 and without null columns."""
    found: dict[str, Any] = {
        "digest": eid(event),
        "type": event.type_name,
        "timestamp": event.at_us,
        "recorded_at": recorded_us,
        "source": source,
    }
    if isinstance(event, TaskEvent):
        found["slot"] = event.slot
    for name in event.__struct_fields__:
        value = getattr(event, name)
        if value is not None and name not in _NOT_AS_IT_IS:
            found[name] = to_json(value).decode() if name in _AS_JSON else value
    return found


_NOT_AS_IT_IS = frozenset({"timestamp", "subject", "told_type"})
_AS_JSON = frozenset(column.name for column in COLUMNS if column.kind == "json")


# ---- tables ----------------------------------------------------------------------------------------
#
# The lake uses the names of the wire: what tables call `task_id` is `uuid` there.
#
# A task's row is the view of its registers (`view.py`) with times as instants, and two durations. An
# attempt's row is the same view of the attempt's events. All other tables are computed from those two, or
# from the events of workers, so an event that is in the lake twice changes nothing.

TABLES_VERSION = 2  # version 1 called the task's id `uuid`


class TableColumn(msgspec.Struct, frozen=True):
    """One column of a table; `was` is its name in earlier versions."""

    name: str
    kind: Kind
    doc: str
    nullable: bool = True
    was: str = ""


class Table(msgspec.Struct, frozen=True):
    """One table that the pipeline builds."""

    name: str
    doc: str
    key: tuple[str, ...]
    """The columns that identify a row."""
    columns: tuple[TableColumn, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the columns."""
        return tuple(column.name for column in self.columns)


def _sure(name: str, kind: Kind, doc: str) -> TableColumn:
    """Return a column that is never null."""
    return TableColumn(name, kind, doc, nullable=False)


_TASK_ID = TableColumn("task_id", "text", "the task's id", nullable=False, was="uuid")
_OF_TASK = TableColumn("task_id", "text", "the task's id", was="uuid")

_TASK_DOCS: Mapping[str, tuple[Kind, str]] = {
    "state": (
        "text",
        "SUCCESS, FAILURE, REVOKED, STARTED, RECEIVED, REJECTED, RETRY, PENDING, or a user's own",
    ),
    "state_at": ("instant", "when it entered that state"),
    "clock": ("int", "Lamport time of that state"),
    "worker": ("text", "the worker that reported the state; null while no worker is known to have the task"),
    "name": ("text", "the task's name"),
    "args": ("text", "its positional arguments as text, cut"),
    "kwargs": ("text", "its named arguments as text, cut"),
    "root_id": ("text", "the first task of its workflow"),
    "parent_id": ("text", "the task that sent it"),
    "eta": ("text", "not to run before this, ISO 8601"),
    "expires": ("text", "not to run after this, ISO 8601"),
    "retries": ("int", "the highest attempt that was reported, from 0"),
    "client": ("text", "who sent it"),
    "queue": ("text", "where it was sent to"),
    "exchange": ("text", "the exchange it was sent to"),
    "routing_key": ("text", "the routing key it was sent with"),
    "result": ("text", "what it returned, as text, cut"),
    "runtime": ("float", "seconds it ran, as the worker measured it"),
    "exception": ("text", "what it raised; for a task that succeeded, the last error before that"),
    "traceback": ("text", "where it raised it"),
    "terminated": ("bool", "whether it was running when it was revoked"),
    "signum": ("json", "the signal that ended it, a number or a name"),
    "expired": ("bool", "whether it was revoked because it came too late"),
    "requeue": ("bool", "whether it went back into its queue when it was rejected"),
    "n_deliveries": ("int", "different deliveries to workers, at most 1024 are counted"),
    "n_terminal": ("int", "different endings; more than 1 means that it ended twice"),
    "extra": ("json", "fields without a column, from the event that set the state"),
}
_SURE = frozenset({"state", "clock", "retries", "n_deliveries", "n_terminal"})


def _task_column(name: str) -> TableColumn:
    if name == _TASK_ID.was:
        return _TASK_ID
    slot = name.removeprefix("first_").removesuffix("_at")
    if slot in TIMED and name.endswith("_at"):
        doc = f"when an attempt was first {slot}" if name.startswith("first_") else f"when it was last {slot}"
        return TableColumn(name, "instant", doc)
    kind, doc = _TASK_DOCS[name]
    return TableColumn(name, kind, doc, nullable=name not in _SURE)


_WAIT = TableColumn("wait_s", "float", "seconds from being sent (else received) to its start; at least 0")
_RUN = TableColumn("run_s", "float", "seconds it ran: `runtime`, else from its start to its end; at least 0")

TASKS = Table(
    "tasks",
    "One row per task: its state, and when it got there.",
    ("task_id",),
    (*(_task_column(name) for name in TaskRecord.__struct_fields__ if name != "partial"), _WAIT, _RUN),
)

ATTEMPTS = Table(
    "attempts",
    "One row for each attempt of each task.",
    ("task_id", "attempt"),
    (
        _TASK_ID,
        _sure(
            "attempt",
            "int",
            "the attempt, from 0; derived from the receipts where the sender did not report it",
        ),
        _sure("state", "text", "as for a task, from the events of this attempt"),
        TableColumn("state_at", "instant", "when it entered that state"),
        _sure("clock", "int", "Lamport time of that state"),
        TableColumn("worker", "text", "the worker that reported the state; null while none is known"),
        TableColumn("pid", "int", "the process of that worker"),
        TableColumn("name", "text", "the task's name"),
        TableColumn(
            "queue", "text", "where it was sent to; if not reported, where the task was last sent to"
        ),
        TableColumn("root_id", "text", "the first task of its workflow"),
        TableColumn("parent_id", "text", "the task that sent it"),
        TableColumn("client", "text", "who sent it"),
        TableColumn("sent_at", "instant", "when it was sent"),
        TableColumn("received_at", "instant", "when a worker last received it"),
        TableColumn("started_at", "instant", "when it last started"),
        TableColumn("ended_at", "instant", "when it ended, with any outcome; null before that"),
        TableColumn("outcome", "text", "SUCCESS, FAILURE, REVOKED, RETRY or REJECTED; null before it ends"),
        TableColumn("received_clock", "int", "Lamport time of its receipt"),
        TableColumn("started_clock", "int", "Lamport time of its start"),
        TableColumn("ended_clock", "int", "Lamport time of its end"),
        TableColumn("runtime", "float", "seconds it ran, as the worker measured it"),
        TableColumn("exception", "text", "what it raised"),
        _sure("n_deliveries", "int", "different deliveries of this attempt, at most 1024 are counted"),
        _sure("n_terminal", "int", "different endings of this attempt"),
        _sure(
            "out_of_order",
            "bool",
            "whether one process reported its receipt, start and end out of clock order",
        ),
        _WAIT,
        _RUN,
    ),
)

TIMELINE = Table(
    "timeline",
    "Every event once, in merge order: task events by attempt and clock, node events by clock.",
    ("subject", "rank"),
    (
        _sure("subject", "text", "the task's id; for an event without a task, the node's name"),
        _sure("rank", "int", "its place among the subject's events, from 1, in causal order"),
        _OF_TASK,
        TableColumn("attempt", "int", "the attempt, as the sender reported it"),
        _sure("type", "text", "task-received, worker-heartbeat, …"),
        TableColumn("timestamp", "instant", "when it happened, by its sender's clock"),
        _sure("clock", "int", "Lamport time; 0 where it was not reported"),
        TableColumn("hostname", "text", "the node that sent the event"),
        TableColumn("pid", "int", "its process"),
        TableColumn("inc", "int", "the sender's incarnation"),
        TableColumn("seq", "int", "the sender's event number"),
        _sure("digest", "int", "identifies the event"),
        TableColumn("detail", "text", "its main content: the name, result, exception, outcome or queue"),
        TableColumn("extra", "json", "fields without a column"),
        TableColumn("recorded_at", "instant", "when the broker's log first recorded it"),
    ),
)

WORKERS = Table(
    "workers",
    "One row per session of a node: from its first event to its last.",
    ("hostname", "pid", "inc", "session"),
    (
        _sure("hostname", "text", "the node"),
        _sure("pid", "int", "its process"),
        TableColumn("inc", "int", "its incarnation; Umbel only"),
        _sure("session", "int", "the number of the session of this process, from 1; silence ends a session"),
        TableColumn("online_at", "instant", "its first event"),
        TableColumn("last_at", "instant", "its last event"),
        TableColumn("ended_at", "instant", "when it went offline, or when two heartbeats were missing"),
        _sure(
            "ending",
            "text",
            "offline: it shut down; lost: it went silent; alive: it was online at the end of the data",
        ),
        TableColumn("up_s", "float", "seconds from its first to its last event"),
        _sure("clock_min", "int", "its lowest Lamport time"),
        _sure("clock_max", "int", "its highest Lamport time"),
        _sure("n_beats", "int", "its different events"),
        TableColumn("freq", "float", "seconds between heartbeats, as last reported"),
        TableColumn("active_max", "int", "the most tasks it reported running at once"),
        TableColumn("processed", "int", "tasks it had finished, as last reported"),
        TableColumn("sw_ident", "text", "its software"),
        TableColumn("sw_ver", "text", "the version of its software"),
        TableColumn("sw_sys", "text", "its operating system"),
    ),
)

ELECTIONS = Table(
    "elections",
    "One row per election: v1 decided by the candidates, v2 by the store.",
    ("election_id", "protocol"),
    (
        _sure("election_id", "text", "its id"),
        _sure("protocol", "text", "v1: by the candidates' clocks; v2: by the store"),
        TableColumn("topic", "text", "what it is about"),
        TableColumn("winner", "text", "the leader; for v2 the last winner that was reported"),
        TableColumn("term", "int", "the fencing token of the winner; v2 only"),
        TableColumn("outcome", "text", "elected, done, failed or expired; for v1 always elected"),
        TableColumn("policy", "text", "what happens when a winner dies; v2 only"),
        _sure("n_candidates", "int", "the number of candidates (v1) or winners (v2)"),
        _sure("candidates", "json", "the candidates or winners, in order: name, process and clock"),
        _sure("n_acks", "int", "the number of nodes that answered; v1 only"),
        _sure("attempts", "int", "the number of attempts"),
        TableColumn("first_at", "instant", "the time of its first event"),
        TableColumn("last_at", "instant", "the time of its last event"),
        TableColumn("duration_s", "float", "seconds between its first and last event"),
        _sure("violations", "json", "broken guarantees, as a list of texts; [] if none"),
    ),
)

_SHARES = (("p50", "half"), ("p95", "95 %"), ("p99", "99 %"))

METRICS = Table(
    "metrics",
    "Per minute, task name, queue and worker: how many attempts ended how, and how long they took.",
    ("minute", "name", "queue", "worker"),
    (
        TableColumn("minute", "instant", "the minute in which the attempts ended, or of their last event"),
        TableColumn("name", "text", "the task's name"),
        TableColumn("queue", "text", "the queue"),
        TableColumn("worker", "text", "the node; null before a worker received it"),
        _sure("n_attempts", "int", "attempts in this row"),
        _sure("n_succeeded", "int", "of them succeeded"),
        _sure("n_failed", "int", "failed"),
        _sure("n_retried", "int", "were retried"),
        _sure("n_revoked", "int", "were revoked"),
        _sure("n_rejected", "int", "were rejected"),
        _sure("n_open", "int", "had no end"),
        _sure("per_s", "float", "attempts that ended, per second of the minute"),
        TableColumn("failure_rate", "float", "failed of those that succeeded or failed; null if neither"),
        *(TableColumn(f"wait_{p}_s", "float", f"{share} waited at most this long") for p, share in _SHARES),
        *(TableColumn(f"run_{p}_s", "float", f"{share} ran at most this long") for p, share in _SHARES),
    ),
)

ANOMALY_KINDS: Mapping[str, str] = {
    "causality": "one process reported an attempt's receipt, start and end out of clock order",
    "run_twice": "one attempt ended more than once",
    "delivered_twice": "a task was delivered more often than it was sent",
    "lost": "a node that had the task is gone, and the task has had no event since",
    "stuck": "a task has not ended and has had no event for a long time",
    "received_without_sent": "a task has no task-sent event, though other tasks of its name have one",
    "seq_gap": "events of a node are missing from the lake",
    "clock_reset": "a node's Lamport clock went back",
    "clock_jump": "a node's Lamport clock leapt ahead",
    "time_skew": "a node's time differs from the broker's",
    "election": "an election broke a guarantee",
    "recorder_gap": "the recorder saw a gap in the events of a node",
    "recorder_lost": "events fell out of the broker's log before they were read",
    "recorder_deaf": "the recorder had no broker for a while; events of Celery's workers may be lost",
    "recorder_unreadable": "the recorder received messages that are not events",
}

ANOMALIES = Table(
    "anomalies",
    "One row for each anomaly.",
    ("kind", "subject", "at", "detail"),
    (
        _sure("kind", "text", "one of: " + ", ".join(ANOMALY_KINDS)),
        TableColumn("subject", "text", "a task's id, a node's name or an election's id"),
        TableColumn("at", "instant", "when"),
        _OF_TASK,
        TableColumn("attempt", "int", "the attempt"),
        TableColumn("name", "text", "the task's name"),
        TableColumn("worker", "text", "the node"),
        TableColumn("pid", "int", "its process"),
        TableColumn("inc", "int", "its incarnation"),
        TableColumn("clock", "int", "Lamport time"),
        _sure("n", "int", "how many: endings, missing events, deliveries; else 1"),
        TableColumn("detail", "text", "a description for people"),
    ),
)

TABLES: Mapping[str, Table] = {
    table.name: table for table in (TASKS, ATTEMPTS, TIMELINE, WORKERS, ELECTIONS, METRICS, ANOMALIES)
}
"""Every table that is built, in build order."""
