"""Columns: an event as one row of the lake, and what each column holds.

The list is data: the recorder makes its Arrow schema from it, the pipeline its Spark schema, the
documentation its table. Columns are only ever added, with the version that brought them; a type
never changes, so old files stay readable beside new ones.

A row holds the record of `types.py`: settled as the reader settles it, so every engine that reads
the lake starts from the same values. `digest` is the event's own id (`digest.py`); a worker's
`eid` is the id of an election, and the two must not be confused. What is a list or a map on the
wire is JSON text here, and so is what may be of several types.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from umbel.events.digest import eid
from umbel.events.types import VOCABULARY, Event, TaskEvent

LAKE_VERSION = 1

Kind = Literal["text", "int", "float", "bool", "instant", "json"]


class Column(msgspec.Struct, frozen=True):
    name: str
    kind: Kind
    doc: str
    since: int = 1


# What every row has, beside the fields of its type.
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
# On the wire a number or a name: no one type holds both.
_SEVERAL: Mapping[str, Kind] = {"signum": "json"}


def _fields() -> Mapping[str, Any]:
    """Every field of every known type, in the order the vocabulary names them."""
    return {name: hint for fields in VOCABULARY.values() for name, hint in fields.items()}


def _kind(name: str, hint: Any) -> Kind:
    if name in _SEVERAL:
        return _SEVERAL[name]
    described = msgspec.inspect.type_info(hint)
    options = described.types if isinstance(described, msgspec.inspect.UnionType) else (described,)
    names = {type(one).__name__.removesuffix("Type").lower() for one in options} - {"none"}
    assert len(names) == 1, f"{name} has one type on the wire"
    return _KINDS[names.pop()]


COLUMNS: tuple[Column, ...] = (
    *_ENVELOPE,
    *(
        Column(name, _kind(name, hint), _DOCS[name])
        for name, hint in _fields().items()
        if name not in {one.name for one in _ENVELOPE}
    ),
)
"""Every column of the lake. The order is that of the files, and new ones are added at the end."""

REQUIRED = ("digest", "type", "timestamp")
"""Columns that no file of events is without; others may be added, and be missing in older files."""

to_json: Callable[[Any], bytes] = msgspec.json.Encoder(order="deterministic", enc_hook=str).encode


def row(event: Event, *, recorded_us: int, source: str) -> dict[str, Any]:
    """One row; instants in microseconds since 1970, columns that are null left out."""
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
