"""Rows: entries of the event log as columns of the lake, many at once.

`events/columns.py` says what a row holds; `row()` there is the reference, one event at a time. Here
the same values are made by the column: nearly all events are of eight known types, are decoded
straight into their records, and keep their values as one tuple each. What is not so (other types,
fields that no record has, absurd numbers) goes the way of the reference. A test holds both ways
to the same rows.

Rows lie in the file by type. Their order says nothing: readers order by clock and time.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from operator import attrgetter
from struct import unpack
from typing import Any, Union

import msgspec

from umbel.brokers.interface import LoggedEvent
from umbel.errors import WireError
from umbel.events.columns import COLUMNS, row, to_json
from umbel.events.reading import EventReader
from umbel.events.types import TASK_TYPES, Event, TaskEvent, TaskSent, fields_of, tag_of
from umbel.history.arrow import arrow, event_schema
from umbel.wire.event import EVENTS_MAX, decode_events
from umbel.wire.limits import DEFAULT_LIMITS

QUICK_TIME_MAX_S = 2_000_000_000.0
"""Up to here (the year 2033) a time in microseconds comes back the same through a float."""

_to_text = msgspec.json.Encoder().encode
_AS_JSON = frozenset(column.name for column in COLUMNS if column.kind == "json")


@dataclass(frozen=True, slots=True)
class Unreadable:
    """An entry of the log that is no event, and why."""

    entry: LoggedEvent
    why: str


@dataclass(slots=True)
class Heard:
    """What the caller must know of the events besides their rows."""

    stamped: list[tuple[str, int, int, int, int]] = field(default_factory=list)
    """Hostname, pid, inc, seq and time (in microseconds) of every event that is numbered."""

    strangers: set[str] = field(default_factory=set)
    """Workers that number nothing: Celery's."""

    arrived: set[str] = field(default_factory=set)
    """Of these, those that have just started."""

    unreadable: list[Unreadable] = field(default_factory=list)


@dataclass(slots=True)
class _Kept:
    values: list[tuple[Any, ...]] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    recorded_us: list[int] = field(default_factory=list)


class Rows:
    """Collects rows until `table()` takes them."""

    def __init__(self, source: str) -> None:
        self.count = 0
        self._source = source
        self._reader = EventReader()
        self._quick: dict[type[TaskEvent], _Kept] = {}
        self._others: list[dict[str, Any]] = []

    def add(self, entries: Iterable[LoggedEvent]) -> Heard:
        heard = Heard()
        for entry in entries:
            body = entry.body
            if not entry.routing_key:
                continue
            recorded_us = round(entry.recorded_at * 1_000_000)
            events = _quick_events(body)
            if events is None:
                self._add_slowly(entry, recorded_us, heard)
                continue
            for event in events:
                self._add_quickly(event, recorded_us, heard)
        return heard

    def add_fact(self, fields: dict[str, Any], *, recorded_us: int) -> None:
        """A row that the recorder itself has to tell."""
        event = self._reader.read(fields)
        assert event is not None, "our own facts can be read"
        self._others.append(row(event, recorded_us=recorded_us, source=self._source))
        self.count += 1

    def table(self) -> Any:
        """What was collected, as a table; the next rows begin a new one."""
        tables = [self._quick_table(kind, kept) for kind, kept in self._quick.items()]
        if self._others or not tables:
            tables.append(_table_of_rows(self._others))
        self._quick, self._others, self.count = {}, [], 0
        return arrow().concat_tables(tables)

    def _add_quickly(self, event: TaskEvent, recorded_us: int, heard: Heard) -> None:
        if event.extra is not None or event.timestamp >= QUICK_TIME_MAX_S:
            self._add_event(event, recorded_us, heard)
            return
        kind = type(event)
        if kind is TaskSent:
            event.clock = 0
        at_us = round(event.timestamp * 1_000_000)
        event.timestamp = at_us
        values = _values_of[kind](event)
        kept = self._quick.get(kind)
        if kept is None:
            kept = self._quick[kind] = _Kept()
        kept.values.append(values)
        kept.digests.append(blake2b(_to_text(_canonical[kind](*values)), digest_size=8).digest())
        kept.recorded_us.append(recorded_us)
        self.count += 1
        if event.seq is not None and event.inc is not None:
            heard.stamped.append((event.hostname, event.pid, event.inc, event.seq, at_us))

    def _add_slowly(self, entry: LoggedEvent, recorded_us: int, heard: Heard) -> None:
        try:
            found = decode_events(entry.body)
        except WireError as error:
            heard.unreadable.append(Unreadable(entry, str(error)))
            return
        for fields in found:
            event = self._reader.read(fields)
            if event is None:
                heard.unreadable.append(Unreadable(entry, "an event of a task that names no task"))
            else:
                self._add_settled(event, recorded_us, heard)

    def _add_event(self, event: TaskEvent, recorded_us: int, heard: Heard) -> None:
        settled = self._reader.read(_as_told(event))
        assert settled is not None, "what has its type once has it twice"
        self._add_settled(settled, recorded_us, heard)

    def _add_settled(self, event: Event, recorded_us: int, heard: Heard) -> None:
        self._others.append(row(event, recorded_us=recorded_us, source=self._source))
        self.count += 1
        if event.seq is not None and event.inc is not None:
            heard.stamped.append((event.hostname, event.pid, event.inc, event.seq, event.at_us))
        elif event.inc is None and event.type_name.startswith("worker-"):
            heard.strangers.add(event.hostname)
            if event.type_name == "worker-online":
                heard.arrived.add(event.hostname)

    def _quick_table(self, kind: type[TaskEvent], kept: _Kept) -> Any:
        library, count = arrow(), len(kept.values)
        found: dict[str, Any] = dict(zip(_names_of[kind], zip(*kept.values, strict=True), strict=True))
        for name in _AS_JSON & found.keys():
            found[name] = [None if value is None else to_json(value).decode() for value in found[name]]
        found["digest"] = unpack(f">{count}q", b"".join(kept.digests))
        found["recorded_at"] = kept.recorded_us
        constant = {"type": tag_of(kind), "slot": kind.slot, "source": self._source}
        arrays = [
            library.repeat(constant[one.name], count)
            if one.name in constant
            else library.array(found[one.name], one.type)
            if one.name in found
            else library.nulls(count, one.type)
            for one in event_schema()
        ]
        return library.Table.from_arrays(arrays, schema=event_schema())


def _quick_events(body: bytes) -> Sequence[Any] | None:
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


def _as_told(event: TaskEvent) -> dict[str, Any]:
    told: dict[str, Any] = msgspec.to_builtins(event)
    return told


def _table_of_rows(rows: Sequence[dict[str, Any]]) -> Any:
    library = arrow()
    arrays = [library.array([one.get(column.name) for one in rows], column.type) for column in event_schema()]
    return library.Table.from_arrays(arrays, schema=event_schema())


def _canonical_type(kind: type[TaskEvent], names: Sequence[str]) -> type[Any]:
    """A record whose JSON is the canonical text of `events/digest.py`: sorted names, nothing null."""
    fields = [(name, Any, None) for name in names]
    return msgspec.defstruct(f"Canonical{kind.__name__}", fields, omit_defaults=True, gc=False)


# The type stands among the fields, where its name has its place.
_names_of = {kind: sorted([*fields_of(kind), "type"]) for kind in TASK_TYPES}
_values_of = {
    kind: attrgetter(*("__struct_config__.tag" if name == "type" else name for name in names))
    for kind, names in _names_of.items()
}
_canonical = {kind: _canonical_type(kind, names) for kind, names in _names_of.items()}
_any_task: Any = Union[TASK_TYPES]  # noqa: UP007  # a union of as many types as there are
_decode_one = msgspec.json.Decoder(_any_task).decode
_decode_list = msgspec.json.Decoder(list[_any_task]).decode
