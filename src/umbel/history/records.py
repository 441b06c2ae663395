"""Records: events of known types of tasks whose JSON is at once the text their digest is taken over.

`events/digest.py` says what that text is: sorted names, nothing null, the time in microseconds. A
record has its fields in that order, so it is written as it is; the columns of the lake are made
from the same fields.
"""

from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from operator import attrgetter
from typing import Any, Literal, Union

import msgspec

from umbel.brokers.interface import LoggedEvent
from umbel.events.types import TASK_TYPES, Event, TaskEvent, TaskSent, fields_of, tag_of
from umbel.wire.event import EVENTS_MAX, routing_key
from umbel.wire.limits import DEFAULT_LIMITS

QUICK_TIME_MAX_S = 2_000_000_000.0
"""Up to here (the year 2033) a time in microseconds comes back the same through a float."""

_DIGEST_BYTES = 8
_to_lines = msgspec.json.Encoder().encode_lines
# An event without these goes the way of the reference, which knows what they are then.
_REQUIRED = frozenset(name for name in fields_of(TaskEvent) if name in {*fields_of(Event), "uuid"}) - {
    "utcoffset",
    "inc",
    "seq",
}


class Kind:
    """One type of task events: its names, and how its records are made."""

    def __init__(self, of: type[TaskEvent]) -> None:
        self.of = of
        self.names = sorted([*fields_of(of), "type"])
        hints = fields_of(of) | {"type": Literal[tag_of(of)]}
        required = _REQUIRED | {"type"}
        fields = [
            (name, hints[name]) if name in required else (name, hints[name], None) for name in self.names
        ]
        options: dict[str, Any] = {"omit_defaults": True, "gc": False}
        read = msgspec.defstruct(
            f"{of.__name__}Read", fields, kw_only=True, forbid_unknown_fields=True, **options
        )
        self.decode: Callable[[bytes], list[Any]] = msgspec.json.Decoder(list[read]).decode  # type: ignore[valid-type]
        self._made = msgspec.defstruct(
            f"{of.__name__}Made", [(name, Any, None) for name in self.names], **options
        )
        self._values = attrgetter(
            *("__struct_config__.tag" if name == "type" else name for name in self.names)
        )

    def record(self, event: TaskEvent) -> Any:
        """The record of an event that was read another way."""
        return self._made(*self._values(event))


KINDS: Mapping[type[TaskEvent], Kind] = {of: Kind(of) for of in TASK_TYPES}
_by_key = {routing_key(tag_of(of)): kind for of, kind in KINDS.items()}


def kind_of(key: str) -> Kind | None:
    """What entries with this routing key should hold, one event each or a list."""
    return _by_key.get(key)


def read_alike(kind: Kind, entries: Sequence[LoggedEvent]) -> list[Any] | None:
    """The records of entries that hold one event of this kind each, with nothing strange; else None.

    All are read at once, as a list. That is exact: a record has no map or list within, and a string
    cannot hold a line break, so each body that ends with a brace ends an event there, and has just
    one if there are as many as entries.
    """
    bodies = [entry.body for entry in entries]
    if {body[-1:] for body in bodies} != {b"}"} or sum(map(len, bodies)) > DEFAULT_LIMITS.size_max_bytes:
        return None
    try:
        records = kind.decode(b"[%b]" % b",\n".join(bodies))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return records if len(records) == len(bodies) and settle(kind, records) else None


def is_list(entry: LoggedEvent) -> bool:
    return entry.body[:1] == b"["


def read_list(kind: Kind, body: bytes) -> list[Any] | None:
    """The records of an entry that holds a list of events of this kind, with nothing strange; else None."""
    if len(body) > DEFAULT_LIMITS.size_max_bytes:
        return None
    try:
        records = kind.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return records if len(records) <= EVENTS_MAX and settle(kind, records) else None


def settle(kind: Kind, records: Sequence[Any]) -> bool:
    """Time in microseconds, no clock from clients; False where that is not exact."""
    for record in records:
        at_s = record.timestamp
        if at_s >= QUICK_TIME_MAX_S:
            return False
        record.timestamp = round(at_s * 1_000_000)
    if kind.of is TaskSent:
        for record in records:
            record.clock = 0
    return True


def digests(records: Sequence[Any]) -> list[bytes]:
    """Of each its digest, eight bytes that begin with the highest."""
    lines = _to_lines(records).split(b"\n")
    lines.pop()  # after the last line break
    return [blake2b(line, digest_size=_DIGEST_BYTES).digest() for line in lines]


def read_any(body: bytes) -> Sequence[Any] | None:
    """The events of an entry that are all of known types of tasks, with no field that is not known."""
    if len(body) > DEFAULT_LIMITS.size_max_bytes:
        return None
    try:
        if body[:1] != b"[":
            return (_decode_one(body),)
        several = _decode_list(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return several if len(several) <= EVENTS_MAX else None


_any_task: Any = Union[TASK_TYPES]  # noqa: UP007  # a union of as many types as there are
_decode_one = msgspec.json.Decoder(_any_task).decode
_decode_list = msgspec.json.Decoder(list[_any_task]).decode
