"""Rows: entries of the event log as columns of the lake, many at once.

`events/columns.py` says what a row holds; `row()` there is the reference, one event at a time. Here
the same values are made by the column: nearly all events are of eight known types, and those with
one routing key are decoded together, straight into their records. What is not so (other types,
fields that no record has, absurd numbers) goes the way of the reference. A test holds both ways
to the same rows.

Rows lie in the file by type. Their order says nothing: readers order by clock and time.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from struct import unpack
from typing import Any

import msgspec
from msgspec.structs import astuple

from umbel.brokers.interface import LoggedEvent
from umbel.errors import WireError
from umbel.events.columns import COLUMNS, row, to_json
from umbel.events.reading import EventReader
from umbel.events.types import Event, TaskEvent, tag_of
from umbel.history.arrow import arrow, compute, event_schema
from umbel.history.records import (
    KINDS,
    Kind,
    digests,
    is_list,
    kind_of,
    read_alike,
    read_any,
    read_list,
    settle,
)
from umbel.wire.event import decode_events

TOGETHER_MAX = 500  # events decoded at once; a strange one among them sends all the slower way

_Columns = dict[str, Any]  # a few rows of one kind: names, and the values as Arrow holds them
_AS_JSON = frozenset(column.name for column in COLUMNS if column.kind == "json")


@dataclass(frozen=True, slots=True)
class Unreadable:
    """An entry of the log that is no event, and why."""

    entry: LoggedEvent
    why: str


@dataclass(slots=True)
class Heard:
    """What the caller must know of the events besides their rows."""

    strangers: set[str] = field(default_factory=set)
    """Workers that number nothing: Celery's."""

    arrived: set[str] = field(default_factory=set)
    """Of these, those that have just started."""

    unreadable: list[Unreadable] = field(default_factory=list)


class Rows:
    """Collects rows until `table()` takes them."""

    def __init__(self, source: str) -> None:
        self.count = 0
        self._source = source
        self._reader = EventReader()
        self._quick: defaultdict[Kind, list[_Columns]] = defaultdict(list)
        self._others: list[dict[str, Any]] = []

    def add(self, entries: Iterable[LoggedEvent]) -> Heard:
        heard = Heard()
        by_key: defaultdict[str, list[LoggedEvent]] = defaultdict(list)
        for entry in entries:
            by_key[entry.routing_key].append(entry)
        by_key.pop("", None)  # holds nothing, and moves a reader on
        for key, alike in by_key.items():
            kind = kind_of(key)
            if kind is None:
                self._add_one_by_one(alike, heard)
            else:
                self._add_lists(kind, [entry for entry in alike if is_list(entry)], heard)
                self._add_alike(kind, [entry for entry in alike if not is_list(entry)], heard)
        return heard

    def add_fact(self, fields: dict[str, Any], *, recorded_us: int) -> None:
        """A row about the recorder itself."""
        event = self._reader.read(fields)
        assert event is not None, "our own facts can be read"
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

    def _add_lists(self, kind: Kind, entries: Sequence[LoggedEvent], heard: Heard) -> None:
        """Our nodes log what they tell in lists, each of one kind."""
        gathered: list[Any] = []
        recorded_at: list[float] = []
        for entry in entries:
            records = read_list(kind, entry.body)
            if records is None:
                self._add_one_by_one([entry], heard)
                continue
            gathered += records
            recorded_at += [entry.recorded_at] * len(records)
            if len(gathered) >= TOGETHER_MAX:
                self._keep(kind, gathered, recorded_at)
                gathered, recorded_at = [], []
        if gathered:
            self._keep(kind, gathered, recorded_at)

    def _add_alike(self, kind: Kind, entries: Sequence[LoggedEvent], heard: Heard) -> None:
        for place in range(0, len(entries), TOGETHER_MAX):
            some = entries[place : place + TOGETHER_MAX]
            records = read_alike(kind, some)
            if records is not None:
                self._keep(kind, records, [entry.recorded_at for entry in some])
            else:
                self._add_one_by_one(some, heard)

    def _keep(self, kind: Kind, records: list[Any], recorded_at: list[float]) -> None:
        """As columns at once: while the records are in the processor's cache, and to be rid of them."""
        array, count = arrow().array, len(records)
        columns = {}
        for name, values in zip(kind.names, zip(*map(astuple, records), strict=True), strict=True):
            if name == "type":
                continue
            first = values[0]
            # Of one sender's events much is the same. Of floats two that are equal may differ: 0 and -0.
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

    def _add_one_by_one(self, entries: Iterable[LoggedEvent], heard: Heard) -> None:
        gathered: defaultdict[Kind, list[tuple[Any, float]]] = defaultdict(list)
        for entry in entries:
            events = read_any(entry.body)
            if events is None:
                self._add_slowly(entry, heard)
                continue
            for event in events:
                kind = KINDS[type(event)]
                record = kind.record(event)
                if event.extra is None and settle(kind, [record]):
                    gathered[kind].append((record, entry.recorded_at))
                else:
                    self._add_strange(event, entry.recorded_at, heard)
        for kind, found in gathered.items():
            self._keep(kind, [record for record, _ in found], [recorded_at for _, recorded_at in found])

    def _add_strange(self, event: TaskEvent, recorded_at: float, heard: Heard) -> None:
        settled = self._reader.read(msgspec.to_builtins(event))
        assert settled is not None, "what has its type once has it twice"
        self._add_settled(settled, recorded_at, heard)

    def _add_slowly(self, entry: LoggedEvent, heard: Heard) -> None:
        try:
            found = decode_events(entry.body)
        except WireError as error:
            heard.unreadable.append(Unreadable(entry, str(error)))
            return
        for told in found:
            event = self._reader.read(told)
            if event is None:
                heard.unreadable.append(Unreadable(entry, "an event of a task that names no task"))
            else:
                self._add_settled(event, entry.recorded_at, heard)

    def _add_settled(self, event: Event, recorded_at: float, heard: Heard) -> None:
        self._others.append(row(event, recorded_us=round(recorded_at * 1_000_000), source=self._source))
        self.count += 1
        if event.inc is None and event.type_name.startswith("worker-"):
            heard.strangers.add(event.hostname)
            if event.type_name == "worker-online":
                heard.arrived.add(event.hostname)

    def _quick_table(self, kind: Kind, parts: list[_Columns]) -> Any:
        library, count = arrow(), sum(len(part["digest"]) for part in parts)
        constant = {"type": tag_of(kind.of), "slot": kind.of.slot, "source": self._source}
        arrays = [
            library.repeat(constant[one.name], count)
            if one.name in constant
            else library.chunked_array([part[one.name] for part in parts])
            if one.name in parts[0]
            else _nulls(one.type, count)
            for one in event_schema()
        ]
        return library.Table.from_arrays(arrays, schema=event_schema())


def _repeated(name: str, value: Any, count: int) -> Any:
    library, of = arrow(), _types()[name]
    if value is None:
        return _nulls(of, count)
    return library.repeat(library.scalar(to_json(value).decode() if name in _AS_JSON else value, of), count)


_NULLS_MAX = 100_000


def _nulls(kind: Any, count: int) -> Any:
    """Most columns of most rows are null: one lot of them serves all."""
    return _all_nulls(kind)[:count] if count <= _NULLS_MAX else arrow().nulls(count, kind)


@cache
def _all_nulls(kind: Any) -> Any:
    return arrow().nulls(_NULLS_MAX, kind)


@cache
def _types() -> dict[str, Any]:
    return {one.name: one.type for one in event_schema()}


def _table_of_rows(rows: Sequence[dict[str, Any]]) -> Any:
    library = arrow()
    arrays = [library.array([one.get(column.name) for one in rows], column.type) for column in event_schema()]
    return library.Table.from_arrays(arrays, schema=event_schema())
