"""Dealing: events written by bucket of their task, so that a build reads each bucket by itself.

A group of files (`fold/names.py`) has the events of an hour or of a day: a file for each bucket, one for
events without a task, one for the marks of all. It is written from a bounded number of events at a time,
synced, and given its names; it counts once the manifest of the lake names it. Groups are joined bucket by
bucket, and a bucket is divided where the lake has more buckets by now.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from umbel.events.columns import REQUIRED
from umbel.fold.buckets import bucket_of, divided
from umbel.fold.marks import EVENTS_KEY, SOURCES_KEY, Marks, marks_of, merged
from umbel.fold.names import bucket_file, marks_file, others_file, place_of
from umbel.fold.schemas import EVENTS
from umbel.history.arrow import event_schema
from umbel.history.lake import Lake, create, hidden, publish, sync_file

ROWS_AT_ONCE = 250_000
DEALT_AT_ONCE = 250_000
"""So many events are in memory before they are dealt out."""

REPEATED = (
    *("type", "slot", "hostname", "name", "queue", "exchange", "routing_key", "source"),
    *("sw_ident", "sw_ver", "sw_sys", "topic", "phase", "winner", "outcome", "policy"),
)
"""Texts that are worth a dictionary; others differ from event to event."""


class NewerFile(Exception):
    """It has columns that this version does not know, so it is left as it is."""


def read_batches(path: Path, *, rows: int = ROWS_AT_ONCE) -> Iterator[pa.Table]:
    """The events of a file in today's columns."""
    schema = event_schema()
    with pq.ParquetFile(path) as file:
        names = set(file.schema_arrow.names)
        if not names <= set(schema.names):
            raise NewerFile
        if not set(REQUIRED) <= names:
            raise pa.ArrowInvalid(f"{path} is not a file of events")
        for batch in file.iter_batches(rows, use_threads=False):
            table = pa.Table.from_batches([batch])
            columns = [
                table[one.name].cast(one.type) if one.name in names else pa.nulls(table.num_rows, one.type)
                for one in schema
            ]
            yield pa.Table.from_arrays(columns, schema=schema)


@dataclass(frozen=True, slots=True)
class Written:
    """A group as it lies there. `rows`: of each file of events, by its name in the lake."""

    rows: dict[str, int]


class GroupWriter:
    """Writes one group. Nothing has its name before `finish`; `forget` removes what was begun."""

    def __init__(self, lake: Lake, folder: Path, name: str, count: int) -> None:
        lake.make_folder(folder)
        self._lake = lake
        self._group = str(folder / name)
        self._count = count
        self._writers: dict[Path, Any] = {}
        self._rows: dict[Path, int] = {}
        self._marks: list[Marks] = []
        self._waiting: list[pa.Table] = []

    def add(self, events: pa.Table) -> None:
        """Events of any kind."""
        self._waiting.append(events)
        if sum(one.num_rows for one in self._waiting) >= DEALT_AT_ONCE:
            self._deal()

    def add_marks(self, marks: Marks) -> None:
        self._marks.append(marks)

    def add_bucket(self, bucket: int, events: pa.Table) -> None:
        """Events of one bucket, whose marks are added apart."""
        self._write(Path(bucket_file(self._group, bucket, self._count)), events)

    def add_others(self, events: pa.Table) -> None:
        self._write(Path(others_file(self._group)), events)

    def _deal(self) -> None:
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

    def _write(self, path: Path, events: pa.Table) -> None:
        if not events.num_rows:
            return
        if path not in self._writers:
            self._writers[path] = pq.ParquetWriter(
                str(create(hidden(path))),
                event_schema(),
                compression="zstd",
                compression_level=1,
                use_dictionary=[name for name in REPEATED if name in EVENTS.names],
            )
            self._rows[path] = 0
        self._writers[path].write_table(events, row_group_size=ROWS_AT_ONCE)
        self._rows[path] += events.num_rows

    def finish(self, sources: Sequence[str], trees: Mapping[str, Sequence[str]] | None = None) -> Written:
        """Synced, under their names. `sources`: the files and groups that the events are from; `trees`: what
        those groups were made of."""
        self._deal()
        for writer in self._writers.values():
            writer.close()
        for path, rows in self._rows.items():
            written = pq.read_metadata(hidden(path)).num_rows
            assert written == rows, "a file has every row that was written to it"
        marks = Path(marks_file(self._group))
        total = str(sum(self._rows.values())).encode()
        made_of = {**(trees or {}), self._lake.name_of(Path(self._group)): list(sources)}
        metadata = {EVENTS_KEY: total, SOURCES_KEY: msgspec.json.encode(made_of)}
        told = merged(self._marks).as_table().replace_schema_metadata(metadata)
        pq.write_table(told, str(create(hidden(marks))), compression="zstd")
        for path in (marks, *self._rows):
            sync_file(hidden(path))
            publish(hidden(path), path)
        return Written({self._lake.name_of(path): rows for path, rows in self._rows.items()})

    def forget(self) -> None:
        for path, writer in self._writers.items():
            with suppress(OSError, ValueError):  # on a full disk even this fails
                writer.close()
            writer.is_open = False
            hidden(path).unlink(missing_ok=True)


def read_marks(group: str) -> tuple[Marks, int] | None:
    """The marks of a group and of how many events they are; None where they cannot be read."""
    try:
        table = pq.read_table(marks_file(group), partitioning=None)
        return Marks.of_table(table), int((table.schema.metadata or {})[EVENTS_KEY])
    except (pa.ArrowException, OSError, ValueError, KeyError):
        return None


def read_sources(group: str) -> dict[str, list[str]]:
    """What a group was made of, and what that was made of; nothing where it does not say so."""
    try:
        metadata = pq.read_schema(marks_file(group)).metadata or {}
        return msgspec.json.decode(metadata.get(SOURCES_KEY, b"{}"), type=dict[str, list[str]])
    except (pa.ArrowException, OSError, ValueError):
        return {}


def join_groups(writer: GroupWriter, paths: Sequence[Path], count: int, stopped: Callable[[], bool]) -> bool:
    """All events of these files, which are written by bucket, by as many or fewer buckets than `count`; False
    if it was stopped before the end."""
    places = {path: place_of(str(path)) for path in paths}
    for path, place in places.items():
        if place is not None and place.bucket is None:
            for table in read_batches(path):
                writer.add_others(table)
    for bucket in range(count):
        if stopped():
            return False
        own = [
            (path, place.count)
            for path, place in places.items()
            if place is not None and place.count and place.bucket == bucket % place.count
        ]
        for table in _filled(_bucket_of_files(own, bucket, count)):
            writer.add_bucket(bucket, table)
    return True


def _bucket_of_files(files: Iterable[tuple[Path, int]], bucket: int, count: int) -> Iterator[pa.Table]:
    for path, made_for in files:
        for table in read_batches(path):
            if made_for == count:
                yield table
            else:
                buckets = bucket_of(table.column("uuid").combine_chunks(), count)
                yield table.filter(pa.array(buckets == bucket))


def _filled(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """The same rows in fewer tables."""
    waiting: list[pa.Table] = []
    for table in tables:
        waiting.append(table)
        if sum(one.num_rows for one in waiting) >= ROWS_AT_ONCE:
            yield pa.concat_tables(waiting)
            waiting = []
    if waiting:
        yield pa.concat_tables(waiting)
