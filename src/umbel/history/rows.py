"""Rows: convert entries of the event log to columns of the lake, many at once.

Entries of known types are decoded in batches. The digest of an event is computed over its canonical JSON; a
record is encoded to exactly that text, so no second representation is needed.
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

QUICK_TIME_MAX_S = 2_000_000_000.0
"""A float holds microseconds exactly up to this time, in the year 2033."""

_DIGEST_BYTES = 8
_to_lines = msgspec.json.Encoder().encode_lines
# `EventReader` reads events without these fields, because it knows their defaults.
_REQUIRED = frozenset(name for name in fields_of(TaskEvent) if name in {*fields_of(Event), "uuid"}) - {
    "utcoffset",
    "inc",
    "seq",
}


class Kind:
    """One type of task event: its field names, its decoder and its record class.

    `events/merge.py` defines the text over which the digest of an event is computed: sorted names, no nulls,
    the time in microseconds. A record has its fields in that order, so encoding it gives that text. The
    columns of the lake are built from the same fields.
    """

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
        """Return the record of an event that `EventReader` has read."""
        return self._made(*self._values(event))


KINDS: Mapping[type[TaskEvent], Kind] = {of: Kind(of) for of in TASK_TYPES}
_by_key = {routing_key(tag_of(of)): kind for of, kind in KINDS.items()}


def kind_of(key: str) -> Kind | None:
    """Return the kind of event that entries with this routing key contain; None for other keys."""
    return _by_key.get(key)


def read_alike(kind: Kind, entries: Sequence[LoggedEvent]) -> list[Any] | None:
    """Return the records of entries that contain one event of this kind each; None if one of them differs.

    All entries are joined and decoded as one JSON list. This cannot mix up two entries: a record contains no
    map or list, and a JSON string contains no line break. So a body that ends with a brace ends with a
    complete event, and each body contains exactly one event if there are as many events as entries.
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
    """Return whether an entry contains a list of events."""
    return entry.body[:1] == b"["


def read_list(kind: Kind, body: bytes) -> list[Any] | None:
    """Return the records of an entry that contains a list of events of this kind; None if one of them
    differs.
    """
    if len(body) > DEFAULT_LIMITS.size_max_bytes:
        return None
    try:
        records = kind.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return records if len(records) <= EVENTS_MAX and settle(kind, records) else None


def settle(kind: Kind, records: Sequence[Any]) -> bool:
    """Convert times to microseconds and clear the clocks of clients; return False if a time would not be
    exact.
    """
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
    """Return the digest of each record: eight bytes, big-endian."""
    lines = _to_lines(records).split(b"\n")
    lines.pop()  # after the last line break
    return [blake2b(line, digest_size=_DIGEST_BYTES).digest() for line in lines]


def read_any(body: bytes) -> Sequence[Any] | None:
    """Return the events of an entry if all are task events of known types and fields; else None."""
    if len(body) > DEFAULT_LIMITS.size_max_bytes:
        return None
    try:
        if body[:1] != b"[":
            return (_decode_one(body),)
        several = _decode_list(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return several if len(several) <= EVENTS_MAX else None


_any_task: Any = Union[TASK_TYPES]  # noqa: UP007  # a union that is built at run time
_decode_one = msgspec.json.Decoder(_any_task).decode
_decode_list = msgspec.json.Decoder(list[_any_task]).decode


# ---- rows ------------------------------------------------------------------------------------------

TOGETHER_MAX = 500  # events that are decoded at once; one unusual event sends all of them to the slower path

_Columns = dict[str, Any]  # a few rows of one kind: column names and Arrow arrays
_AS_JSON = frozenset(column.name for column in COLUMNS if column.kind == "json")


@dataclass(frozen=True, slots=True)
class UnreadableEntry:
    """An entry of the log that is not a valid event, and the reason."""

    entry: LoggedEvent
    why: str


@dataclass(slots=True)
class BatchFindings:
    """What a batch of entries contains in addition to rows: workers without sequence numbers, and unreadable
    entries.
    """

    strangers: set[str] = field(default_factory=set)
    """Workers whose events have no sequence numbers: Celery workers."""

    arrived: set[str] = field(default_factory=set)
    """The workers among them that have just started."""

    unreadable: list[UnreadableEntry] = field(default_factory=list)


class Rows:
    """Collects rows until `table()` returns them as an Arrow table.

    `events/tables.py` defines a row; `row()` there is the reference implementation and converts one event.
    Here the same values are built by column: nearly all events have one of eight known types, and entries
    with the same routing key are decoded together into records. All other events (unknown types or fields,
    extreme numbers) use the reference implementation. A test compares both. Rows are grouped by type in the
    file; readers sort them by clock and time.
    """

    def __init__(self, source: str) -> None:
        self.count = 0
        self._source = source
        self._reader = EventReader()
        self._quick: defaultdict[Kind, list[_Columns]] = defaultdict(list)
        self._others: list[dict[str, Any]] = []

    def add(self, entries: Iterable[LoggedEvent]) -> BatchFindings:
        """Add entries of the event log, and return what they contain in addition to rows."""
        batch = BatchFindings()
        by_key: defaultdict[str, list[LoggedEvent]] = defaultdict(list)
        for entry in entries:
            by_key[entry.routing_key].append(entry)
        by_key.pop("", None)  # empty entries only advance the offset of a reader
        for key, alike in by_key.items():
            kind = kind_of(key)
            if kind is None:
                self._add_one_by_one(alike, batch)
            else:
                self._add_lists(kind, [entry for entry in alike if is_list(entry)], batch)
                self._add_alike(kind, [entry for entry in alike if not is_list(entry)], batch)
        return batch

    def add_fact(self, fields: dict[str, Any], *, recorded_us: int) -> None:
        """Add an event about the recorder itself."""
        event = self._reader.read(fields)
        assert event is not None, "events of the recorder are valid"
        self._others.append(row(event, recorded_us=recorded_us, source=self._source))
        self.count += 1

    def table(self) -> Any:
        """Return the collected rows as a table, and start a new one."""
        tables = [self._quick_table(kind, parts) for kind, parts in self._quick.items()]
        if self._others or not tables:
            tables.append(_table_of_rows(self._others))
        self._quick.clear()
        self._others, self.count = [], 0
        return arrow().concat_tables(tables)

    def _add_lists(self, kind: Kind, entries: Sequence[LoggedEvent], batch: BatchFindings) -> None:
        """Add entries that contain lists. Umbel nodes log events in lists of one kind."""
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
        """Add entries with one event each, in batches of TOGETHER_MAX."""
        for place in range(0, len(entries), TOGETHER_MAX):
            some = entries[place : place + TOGETHER_MAX]
            records = read_alike(kind, some)
            if records is not None:
                self._keep(kind, records, [entry.recorded_at for entry in some])
            else:
                self._add_one_by_one(some, batch)

    def _keep(self, kind: Kind, records: list[Any], recorded_at: list[float]) -> None:
        """Convert records to columns now, while they are in the CPU cache, so that they can be freed."""
        array, count = arrow().array, len(records)
        columns = {}
        for name, values in zip(kind.names, zip(*map(astuple, records), strict=True), strict=True):
            if name == "type":
                continue
            first = values[0]
            # Events of one sender share many values. Floats are excluded, because 0.0 == -0.0.
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
        """Add entries that could not be decoded as a batch."""
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
        """Add a task event with unknown fields or an extreme time."""
        settled = self._reader.read(msgspec.to_builtins(event))
        assert settled is not None, "a decoded event is valid"
        self._add_settled(settled, recorded_at, batch)

    def _add_slowly(self, entry: LoggedEvent, batch: BatchFindings) -> None:
        """Add an entry with the reference implementation. An invalid entry becomes an unreadable entry."""
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
        """Add an event as a row, and note whether it comes from a Celery worker."""
        self._others.append(row(event, recorded_us=round(recorded_at * 1_000_000), source=self._source))
        self.count += 1
        if event.inc is None and event.type_name.startswith("worker-"):
            batch.strangers.add(event.hostname)
            if event.type_name == "worker-online":
                batch.arrived.add(event.hostname)

    def _quick_table(self, kind: Kind, parts: list[_Columns]) -> Any:
        """Join the columns of one kind into a table with the lake's schema."""
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
    """Return a column that contains the same value in each row."""
    library, of = arrow(), _types()[name]
    if value is None:
        return _nulls(of, count)
    return library.repeat(library.scalar(to_json(value).decode() if name in _AS_JSON else value, of), count)


_NULLS_MAX = 100_000


def _nulls(kind: Any, count: int) -> Any:
    """Return a column of nulls. Most columns are null, so short ones share one array."""
    return _all_nulls(kind)[:count] if count <= _NULLS_MAX else arrow().nulls(count, kind)


@cache
def _all_nulls(kind: Any) -> Any:
    """Return a shared array of nulls."""
    return arrow().nulls(_NULLS_MAX, kind)


@cache
def _types() -> dict[str, Any]:
    """Return the Arrow type of each column."""
    return {column.name: column.type for column in event_schema()}


def _table_of_rows(rows: Sequence[dict[str, Any]]) -> Any:
    """Return a table of rows that the reference implementation has made."""
    library = arrow()
    arrays = [
        library.array([fields.get(column.name) for fields in rows], column.type) for column in event_schema()
    ]
    return library.Table.from_arrays(arrays, schema=event_schema())
