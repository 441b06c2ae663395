"""Dealing: divide events into buckets by task id, so that a build can read one bucket at a time.

A group of files (`fold/__init__.py`) contains the events of an hour or a day: a file for each bucket, a file
for events without a task, and a file of marks, which are the ranges of sequence numbers of each sender.
Memory is bounded: a fixed number of events is processed at a time. Readers see a group when the manifest of
the lake names it. Groups are joined bucket by bucket; a bucket is divided if the lake has more buckets now.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from umbel.events.tables import REQUIRED
from umbel.fold import bucket_file, marks_file, others_file, place_of
from umbel.fold.buckets import bucket_of, divided
from umbel.fold.senders import EVENTS_KEY, SOURCES_KEY, Marks, marks_of, merged
from umbel.history.lake import event_schema, event_writer
from umbel.stores.interface import Draft, Store, raise_unavailable

ROWS_AT_ONCE = 250_000
DEALT_AT_ONCE = 250_000
"""Limit of events that are collected in memory before they are divided into buckets."""


class NewerFile(Exception):
    """Raised for a file with columns that this version does not know. The file is left unchanged."""


def read_batches(store: Store, name: str, *, rows: int = ROWS_AT_ONCE) -> Iterator[pa.Table]:
    """Yield the events of a file in batches, with the columns of this version."""
    try:
        yield from _read(store, name, rows)
    except UnicodeDecodeError as error:  # Arrow decodes names of columns lazily
        raise pa.ArrowInvalid(f"{name} has a column whose name is not text: {error}") from None


def _read(store: Store, name: str, rows: int) -> Iterator[pa.Table]:
    """Yield the rows of a Parquet file of events. Columns that the file does not have are null.

    A file with unknown columns was written by a newer version. Reading it would lose these columns, so it is
    refused.
    """
    schema = event_schema()
    with store.open(name) as opened, pq.ParquetFile(opened) as file:
        names = set(file.schema_arrow.names)
        if not names <= set(schema.names):
            raise NewerFile
        if not set(REQUIRED) <= names:
            raise pa.ArrowInvalid(f"{name} is not a file of events")
        for batch in file.iter_batches(rows, use_threads=False):
            table = pa.Table.from_batches([batch])
            columns = [
                table[field.name].cast(field.type)
                if field.name in names
                else pa.nulls(table.num_rows, field.type)
                for field in schema
            ]
            yield pa.Table.from_arrays(columns, schema=schema)


@dataclass(frozen=True, slots=True)
class Written:
    """A published group. `rows` is the number of rows in each file of events, by its path in the lake."""

    rows: dict[str, int]


class GroupWriter:
    """Writes one group of files. `finish` publishes them; `forget` removes unfinished ones."""

    def __init__(self, store: Store, group: str, count: int) -> None:
        self._store = store
        self._group = group
        self._count = count
        self._drafts: dict[str, Draft] = {}
        self._writers: dict[str, Any] = {}
        self._rows: dict[str, int] = {}
        self._marks: list[Marks] = []
        self._waiting: list[pa.Table] = []

    def add(self, events: pa.Table) -> None:
        """Add events of any kind, which are divided into buckets later."""
        self._waiting.append(events)
        if sum(table.num_rows for table in self._waiting) >= DEALT_AT_ONCE:
            self._deal()

    def add_marks(self, marks: Marks) -> None:
        """Add the marks of events that are added with `add_bucket`."""
        self._marks.append(marks)

    def add_bucket(self, bucket: int, events: pa.Table) -> None:
        """Add events of one bucket. Their marks must be added separately."""
        self._write(bucket_file(self._group, bucket, self._count), events)

    def add_others(self, events: pa.Table) -> None:
        """Add events that belong to no task."""
        self._write(others_file(self._group), events)

    def _deal(self) -> None:
        """Divide the collected events into buckets, and write them to the files of the group."""
        if not self._waiting:
            return
        events = pa.concat_tables(self._waiting)
        self._waiting.clear()
        self._marks.append(marks_of(events))
        has_task = pc.is_valid(events.column("uuid"))
        self.add_others(events.filter(pc.invert(has_task)))
        events = events.filter(has_task)
        for bucket, part in enumerate(divided(events, self._count)):
            self.add_bucket(bucket, part)
        pa.default_memory_pool().release_unused()

    def _write(self, name: str, events: pa.Table) -> None:
        """Append events to a file of the group, and create the file for the first events."""
        if not events.num_rows:
            return
        if name not in self._writers:
            self._drafts[name] = self._store.draft(name)
            self._writers[name] = event_writer(self._drafts[name].sink)
            self._rows[name] = 0
        self._writers[name].write_table(events, row_group_size=ROWS_AT_ONCE)
        self._rows[name] += events.num_rows

    def finish(self, sources: Sequence[str], trees: Mapping[str, Sequence[str]] | None = None) -> Written:
        """Publish the group. `sources` are the files and groups that its events come from; `trees` are the
        sources of those groups.
        """
        self._deal()
        for writer in self._writers.values():
            writer.close()
        for name, rows in self._rows.items():
            written = pq.read_metadata(self._drafts[name].written()).num_rows
            assert written == rows, "the file contains every row that was written to it"
        total = str(sum(self._rows.values())).encode()
        made_of = {**(trees or {}), self._group: list(sources)}
        metadata = {EVENTS_KEY: total, SOURCES_KEY: msgspec.json.encode(made_of)}
        marks = marks_file(self._group)
        marks_table = merged(self._marks).as_table().replace_schema_metadata(metadata)
        self._drafts[marks] = self._store.draft(marks)
        pq.write_table(marks_table, self._drafts[marks].sink, compression="zstd")
        for name in (marks, *self._rows):
            self._drafts[name].publish(name)
        return Written(dict(self._rows))

    def forget(self) -> None:
        """Discard the unfinished files."""
        for writer in self._writers.values():
            with suppress(OSError, ValueError):  # closing fails on a full disk
                writer.close()
            writer.is_open = False
        for draft in self._drafts.values():
            draft.forget()


def read_marks(store: Store, group: str) -> tuple[Marks, int] | None:
    """Return the marks of a group and the number of its events; None if they are unreadable."""
    try:
        with store.open(marks_file(group)) as file:
            table = pq.read_table(file, partitioning=None)
        return Marks.of_table(table), int((table.schema.metadata or {})[EVENTS_KEY])
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise_unavailable(error)
        return None


def read_sources(store: Store, group: str) -> dict[str, list[str]]:
    """Return the sources of a group, and recursively their sources; empty if they are not recorded."""
    try:
        with store.open(marks_file(group)) as file:
            metadata = pq.read_schema(file).metadata or {}
        return msgspec.json.decode(metadata.get(SOURCES_KEY, b"{}"), type=dict[str, list[str]])
    except (pa.ArrowException, OSError, ValueError) as error:
        raise_unavailable(error)
        return {}


def join_groups(
    writer: GroupWriter, store: Store, names: Sequence[str], count: int, stopped: Callable[[], bool]
) -> bool:
    """Write all events of these files into `count` buckets; return False if `stopped` ended it early. The
    files must not have more buckets than that.
    """
    places = {name: place_of(name) for name in names}
    for name, place in places.items():
        if place is not None and place.bucket is None:
            for table in read_batches(store, name):
                writer.add_others(table)
    for bucket in range(count):
        if stopped():
            return False
        own = [
            (name, place.count)
            for name, place in places.items()
            if place is not None and place.count and place.bucket == bucket % place.count
        ]
        for table in _filled(_bucket_of_files(store, own, bucket, count)):
            writer.add_bucket(bucket, table)
    return True


def _bucket_of_files(
    store: Store, files: Iterable[tuple[str, int]], bucket: int, count: int
) -> Iterator[pa.Table]:
    """Yield the events of one bucket. Files with fewer buckets also contain other buckets, which are
    filtered out.
    """
    for name, made_for in files:
        for table in read_batches(store, name):
            if made_for == count:
                yield table
            else:
                buckets = bucket_of(table.column("uuid").combine_chunks(), count)
                yield table.filter(pa.array(buckets == bucket))


def _filled(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Join small tables, and yield the same rows in fewer tables."""
    waiting: list[pa.Table] = []
    for table in tables:
        waiting.append(table)
        if sum(part.num_rows for part in waiting) >= ROWS_AT_ONCE:
            yield pa.concat_tables(waiting)
            waiting = []
    if waiting:
        yield pa.concat_tables(waiting)
