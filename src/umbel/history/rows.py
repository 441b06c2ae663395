"""Rows: entries of the event log as columns of the lake, many at once.

Events of known types are decoded many at once; their JSON is at the same time the text over which their
digest is computed.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b
from operator import attrgetter
from struct import unpack
from typing import Any, Literal, Union

import msgspec
from msgspec.structs import astuple

from umbel.brokers.interface import LoggedEvent
from umbel.errors import WireError
from umbel.events.tables import COLUMNS, row, to_json
from umbel.events.types import TASK_TYPES, Event, TaskEvent, TaskSent, fields_of, tag_of
from umbel.events.view import EventReader
from umbel.history.lake import arrow, compute, event_schema
from umbel.wire.event import EVENTS_MAX, decode_events, routing_key
from umbel.wire.message import DEFAULT_LIMITS

# ---- records ---------------------------------------------------------------------------------------
#
# Task events of known types whose JSON is also the text that their digest is computed over.
#
# `events/merge.py` defines that text: sorted names, nothing null, the time in microseconds. A record has
# its fields in that order, so it is encoded unchanged; the columns of the lake are made from the same
# fields.

QUICK_TIME_MAX_S = 2_000_000_000.0
"""Up to this time (the year 2033) microseconds survive a float exactly."""

_DIGEST_BYTES = 8
_to_lines = msgspec.json.Encoder().encode_lines
# An event without these is read by the reference, which knows their defaults.
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
        """The record of an event that the reference has read."""
        return self._made(*self._values(event))


KINDS: Mapping[type[TaskEvent], Kind] = {of: Kind(of) for of in TASK_TYPES}
_by_key = {routing_key(tag_of(of)): kind for of, kind in KINDS.items()}


def kind_of(key: str) -> Kind | None:
    """The kind of events that entries with this routing key should hold; None for other keys."""
    return _by_key.get(key)


def read_alike(kind: Kind, entries: Sequence[LoggedEvent]) -> list[Any] | None:
    """The records of entries that hold one event of this kind each, without unknown fields; else None.

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
    """Whether an entry holds a list of events."""
    return entry.body[:1] == b"["


def read_list(kind: Kind, body: bytes) -> list[Any] | None:
    """The records of an entry that holds a list of events of this kind, without unknown fields; else None."""
    if len(body) > DEFAULT_LIMITS.size_max_bytes:
        return None
    try:
        records = kind.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return records if len(records) <= EVENTS_MAX and settle(kind, records) else None


def settle(kind: Kind, records: Sequence[Any]) -> bool:
    """Convert times to microseconds and clear clocks of clients; False where a time is not exact."""
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
    """The digest of each record: eight bytes, big-endian."""
    lines = _to_lines(records).split(b"\n")
    lines.pop()  # after the last line break
    return [blake2b(line, digest_size=_DIGEST_BYTES).digest() for line in lines]


def read_any(body: bytes) -> Sequence[Any] | None:
    """The events of an entry, if all are task events of known types without unknown fields; else None."""
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


# ---- rows ------------------------------------------------------------------------------------------
#
# Entries of the event log as columns of the lake, many at once.
#
# `events/tables.py` says what a row holds; `row()` there is the reference, one event at a time. Here the
# same values are made by the column: nearly all events are of eight known types, and those with one routing
# key are decoded together, straight into their records. Other events (unknown types, unknown fields, absurd
# numbers) are read by the reference. A test compares both ways.
#
# Rows lie in the file by type. Their order says nothing: readers order by clock and time.

TOGETHER_MAX = 500  # events decoded at once; one unusual event makes all of them take the slower way

_Columns = dict[str, Any]  # a few rows of one kind: names, and the values as Arrow holds them
_AS_JSON = frozenset(column.name for column in COLUMNS if column.kind == "json")


@dataclass(frozen=True, slots=True)
class UnreadableEntry:
    """An entry of the log that is not an event, and why."""

    entry: LoggedEvent
    why: str


@dataclass(slots=True)
class BatchFindings:
    """What a batch of entries shows besides its rows: senders without numbers, and unreadable entries."""

    strangers: set[str] = field(default_factory=set)
    """Workers whose events have no numbers: Celery's."""

    arrived: set[str] = field(default_factory=set)
    """Those of these workers that have just started."""

    unreadable: list[UnreadableEntry] = field(default_factory=list)


class Rows:
    """Collects rows until `table()` takes them."""

    def __init__(self, source: str) -> None:
        self.count = 0
        self._source = source
        self._reader = EventReader()
        self._quick: defaultdict[Kind, list[_Columns]] = defaultdict(list)
        self._others: list[dict[str, Any]] = []

    def add(self, entries: Iterable[LoggedEvent]) -> BatchFindings:
        """Add entries of the event log; return what they show besides rows."""
        batch = BatchFindings()
        by_key: defaultdict[str, list[LoggedEvent]] = defaultdict(list)
        for entry in entries:
            by_key[entry.routing_key].append(entry)
        by_key.pop("", None)  # empty entries, which only advance a reader
        for key, alike in by_key.items():
            kind = kind_of(key)
            if kind is None:
                self._add_one_by_one(alike, batch)
            else:
                self._add_lists(kind, [entry for entry in alike if is_list(entry)], batch)
                self._add_alike(kind, [entry for entry in alike if not is_list(entry)], batch)
        return batch

    def add_fact(self, fields: dict[str, Any], *, recorded_us: int) -> None:
        """A row about the recorder itself."""
        event = self._reader.read(fields)
        assert event is not None, "facts of the recorder can be read"
        self._others.append(row(event, recorded_us=recorded_us, source=self._source))
        self.count += 1

    def table(self) -> Any:
        """What was collected, as a table; the next rows begin a new one."""
        tables = [self._quick_table(kind, parts) for kind, parts in self._quick.items()]
        if self._others or not tables:
            tables.append(_table_of_rows(self._others))
        self._quick.clear()
        self._others, self.count = [], 0
        return arrow().concat_tables(tables)

    def _add_lists(self, kind: Kind, entries: Sequence[LoggedEvent], batch: BatchFindings) -> None:
        """Add entries that hold lists: Umbel's nodes log events in lists of one kind."""
        gathered: list[Any] = []
        recorded_at: list[float] = []
        for entry in entries:
            records = read_list(kind, entry.body)
            if records is None:
                self._add_one_by_one([entry], batch)
                continue
            gathered += records
            recorded_at += [entry.recorded_at] * len(records)
            if len(gathered) >= TOGETHER_MAX:
                self._keep(kind, gathered, recorded_at)
                gathered, recorded_at = [], []
        if gathered:
            self._keep(kind, gathered, recorded_at)

    def _add_alike(self, kind: Kind, entries: Sequence[LoggedEvent], batch: BatchFindings) -> None:
        for place in range(0, len(entries), TOGETHER_MAX):
            some = entries[place : place + TOGETHER_MAX]
            records = read_alike(kind, some)
            if records is not None:
                self._keep(kind, records, [entry.recorded_at for entry in some])
            else:
                self._add_one_by_one(some, batch)

    def _keep(self, kind: Kind, records: list[Any], recorded_at: list[float]) -> None:
        """Convert records to columns at once, while they are in the processor's cache; then they are
        freed.
        """
        array, count = arrow().array, len(records)
        columns = {}
        for name, values in zip(kind.names, zip(*map(astuple, records), strict=True), strict=True):
            if name == "type":
                continue
            first = values[0]
            # Events of one sender share many values. Floats are excluded: 0.0 and -0.0 are equal but differ.
            if type(first) is not float and values.count(first) == count:
                columns[name] = _repeated(name, first, count)
            elif name in _AS_JSON:
                as_json = [None if value is None else to_json(value).decode() for value in values]
                columns[name] = array(as_json, _types()[name])
            else:
                columns[name] = array(values, _types()[name])
        columns["digest"] = array(unpack(f">{count}q", b"".join(digests(records))), _types()["digest"])
        recorded_us = compute().round(compute().multiply(array(recorded_at), 1_000_000.0))
        columns["recorded_at"] = recorded_us.cast(arrow().int64()).cast(_types()["recorded_at"])
        self._quick[kind].append(columns)
        self.count += count

    def _add_one_by_one(self, entries: Iterable[LoggedEvent], batch: BatchFindings) -> None:
        gathered: defaultdict[Kind, list[tuple[Any, float]]] = defaultdict(list)
        for entry in entries:
            events = read_any(entry.body)
            if events is None:
                self._add_slowly(entry, batch)
                continue
            for event in events:
                kind = KINDS[type(event)]
                record = kind.record(event)
                if event.extra is None and settle(kind, [record]):
                    gathered[kind].append((record, entry.recorded_at))
                else:
                    self._add_strange(event, entry.recorded_at, batch)
        for kind, found in gathered.items():
            self._keep(kind, [record for record, _ in found], [recorded_at for _, recorded_at in found])

    def _add_strange(self, event: TaskEvent, recorded_at: float, batch: BatchFindings) -> None:
        settled = self._reader.read(msgspec.to_builtins(event))
        assert settled is not None, "an event that was read once can be read again"
        self._add_settled(settled, recorded_at, batch)

    def _add_slowly(self, entry: LoggedEvent, batch: BatchFindings) -> None:
        try:
            found = decode_events(entry.body)
        except WireError as error:
            batch.unreadable.append(UnreadableEntry(entry, str(error)))
            return
        for fields in found:
            event = self._reader.read(fields)
            if event is None:
                batch.unreadable.append(UnreadableEntry(entry, "an event of a task that names no task"))
            else:
                self._add_settled(event, entry.recorded_at, batch)

    def _add_settled(self, event: Event, recorded_at: float, batch: BatchFindings) -> None:
        self._others.append(row(event, recorded_us=round(recorded_at * 1_000_000), source=self._source))
        self.count += 1
        if event.inc is None and event.type_name.startswith("worker-"):
            batch.strangers.add(event.hostname)
            if event.type_name == "worker-online":
                batch.arrived.add(event.hostname)

    def _quick_table(self, kind: Kind, parts: list[_Columns]) -> Any:
        library, count = arrow(), sum(len(part["digest"]) for part in parts)
        constant = {"type": tag_of(kind.of), "slot": kind.of.slot, "source": self._source}
        arrays = [
            library.repeat(constant[column.name], count)
            if column.name in constant
            else library.chunked_array([part[column.name] for part in parts])
            if column.name in parts[0]
            else _nulls(column.type, count)
            for column in event_schema()
        ]
        return library.Table.from_arrays(arrays, schema=event_schema())


def _repeated(name: str, value: Any, count: int) -> Any:
    library, of = arrow(), _types()[name]
    if value is None:
        return _nulls(of, count)
    return library.repeat(library.scalar(to_json(value).decode() if name in _AS_JSON else value, of), count)


_NULLS_MAX = 100_000


def _nulls(kind: Any, count: int) -> Any:
    """A column of nulls. Most columns are null, so short ones share one array."""
    return _all_nulls(kind)[:count] if count <= _NULLS_MAX else arrow().nulls(count, kind)


@cache
def _all_nulls(kind: Any) -> Any:
    return arrow().nulls(_NULLS_MAX, kind)


@cache
def _types() -> dict[str, Any]:
    return {column.name: column.type for column in event_schema()}


def _table_of_rows(rows: Sequence[dict[str, Any]]) -> Any:
    library = arrow()
    arrays = [
        library.array([fields.get(column.name) for fields in rows], column.type) for column in event_schema()
    ]
    return library.Table.from_arrays(arrays, schema=event_schema())
