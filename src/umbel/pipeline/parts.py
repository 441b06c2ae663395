"""Parts: the files that jobs of a build read and write with Arrow, including those of segments."""

import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from umbel.events.tables import REQUIRED
from umbel.fold import TABLES
from umbel.fold import tasks as measured
from umbel.fold.buckets import bucket_of, index_of
from umbel.fold.columns import EVENTS, by_difference, settled
from umbel.fold.kernel import Bucket, fold_bucket
from umbel.pipeline.plan import Counted, Dealt, Fold, Folded, Plan, Samples, Segment
from umbel.stores.interface import Store, raise_unavailable

# ---- parts -----------------------------------------------------------------------------------------

DIFFERING = frozenset(
    {"subject", "task_id", "uuid", "root_id", "args", "kwargs", "result", "detail", "eta", "expires"}
)
"""Text columns whose values differ in each row, so that dictionary encoding would be useless."""

ROWS_AT_ONCE = 250_000


class UnreadPart(Exception):
    """Raised if a file of a build is unreadable. If the store is unavailable, the store's error is raised
    instead.
    """

    def __init__(self, name: str, error: Exception) -> None:
        raise_unavailable(error)
        self.name = name
        self.why = str(error).partition("\n")[0][:200]
        super().__init__(f"{name}: {self.why}")


def fresh_name(folder: str, suffix: str) -> str:
    """Return a unique name for a new file in the folder."""
    return f"{folder}/part-{secrets.token_hex(8)}{suffix}"


def write_part(store: Store, table: pa.Table, folder: str, *, row_group_size: int = 2**20) -> Counted:
    """Write a table to a new Parquet file in the folder, and return its name and number of rows.

    Each file has a unique name. Paths are relative to the lake's root. Divided events are in Arrow's IPC
    format, which is faster to write and read than Parquet; these files are removed at the end of the build.
    """
    name = fresh_name(folder, ".parquet")
    repeated = [
        field.name
        for field in table.schema
        if field.type in (pa.string(), pa.bool_()) and field.name not in DIFFERING
    ]
    instants = [field.name for field in table.schema if pa.types.is_timestamp(field.type)]
    with store.writer(name) as file:
        pq.write_table(
            table,
            file,
            compression="zstd",
            compression_level=1,
            use_dictionary=repeated,
            column_encoding=by_difference(table.schema) or None,
            write_statistics=instants,  # only for sorted columns, because readers select ranges of these
            row_group_size=row_group_size,
        )
    return Counted(name, table.num_rows)


def event_batches(store: Store, name: str, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
    """Yield the events of a file in batches, with the columns and types of the lake. Raise UnreadPart if it
    is unreadable.
    """
    try:
        with store.open(name) as opened, pq.ParquetFile(opened) as file:
            wanted = _filled(file.metadata, columns or [*EVENTS.names], columns or REQUIRED)
            for batch in file.iter_batches(ROWS_AT_ONCE, columns=wanted, use_threads=False):
                table = pa.Table.from_batches([batch])
                yield settled(table) if columns is None else table
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UnreadPart(name, error) from None


def _filled(metadata: pq.FileMetaData, names: Sequence[str], needed: Sequence[str]) -> list[str]:
    """Return the columns to read: those in the file that are not entirely null according to its
    statistics.
    """
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    places = {metadata.schema.column(place).path: place for place in range(metadata.num_columns)}
    return [
        name
        for name in names
        if name in places
        and (name in needed or not all(_is_null(group.column(places[name])) for group in groups))
    ]


def _is_null(chunk: pq.ColumnChunkMetaData) -> bool:
    statistics = chunk.statistics
    if statistics is None or not statistics.has_null_count:
        return False
    return bool(statistics.null_count == chunk.num_values)


class Source:
    """The events that a job folds: from the lake, from segments, and from divided files."""

    def __init__(self, store: Store, plan: Plan, job: Fold) -> None:
        self._store = store
        self._plan = plan
        self._job = job
        self._of_lake = plan.sources(job.target) if job.of_lake else []

    def rows(self) -> int:
        """Return an upper limit for the number of events. A file with fewer buckets also contains events of
        other jobs.
        """
        of_lake = sum(_rows_in(self._store, name) for name, _ in self._of_lake)
        return self._job.kept_rows + self.fresh_rows() + of_lake

    def fresh_rows(self) -> int:
        """Return the number of divided events for this job."""
        return sum(size for dealt in self._plan.dealt for _, size in self._stretches(dealt))

    def batches(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Yield all events of the job in batches."""
        for name, count in self._of_lake:
            for table in event_batches(self._store, name, columns):
                yield table if count == self._plan.count else self._own(table)
        yield from self.kept(columns)
        yield from self.fresh(columns)

    def kept(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Yield the events of segments that earlier builds have stored."""
        for part in self._job.kept:
            yield from event_batches(self._store, f"{TABLES}/{part.file}", columns)

    def fresh(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Yield the divided events for this job."""
        for dealt in self._plan.dealt:
            places = [place for place, _ in self._stretches(dealt)]
            if not places:
                continue
            with self._store.open(dealt.file) as file, pa.ipc.open_file(file) as reader:
                for place in places:
                    table = pa.Table.from_batches([reader.get_batch(place)])
                    yield table if columns is None else table.select(columns)

    def _stretches(self, dealt: Dealt) -> Iterator[tuple[int, int]]:
        """Yield the positions and sizes of the batches in a divided file that belong to this job."""
        for place, (target, size) in enumerate(zip(dealt.targets, dealt.sizes, strict=True)):
            if target == self._job.target:
                yield place, size

    def _own(self, table: pa.Table) -> pa.Table:
        buckets = bucket_of(table.column("uuid").combine_chunks(), self._plan.count)
        return table.filter(pa.array(buckets == self._job.target))

    def all(self) -> pa.Table:
        """Return all events of the job in one table."""
        return pa.concat_tables([EVENTS.empty_table(), *self.batches()])

    def only(self, ids: Sequence[str], *, others: bool = False) -> Iterator[pa.Table]:
        """Yield the events of these tasks; with `others`, of all other tasks."""
        return chosen(self.batches(), ids, others=others)


def chosen(tables: Iterable[pa.Table], ids: Sequence[str], *, others: bool = False) -> Iterator[pa.Table]:
    """Yield the events of these tasks; with `others`, of all other tasks."""
    wanted = pa.array(ids, pa.string())
    for table in tables:
        is_one = pc.is_in(table.column("uuid"), value_set=wanted)
        yield table.filter(pc.invert(is_one) if others else is_one)


def read_part(store: Store, name: str, filters: pc.Expression | None = None) -> pa.Table:
    """Read a file that a job has written. Raise UnreadPart if it is unreadable."""
    try:
        with store.open(name) as file:
            return pq.read_table(file, filters=filters, partitioning=None, use_threads=False)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UnreadPart(name, error) from None


def write_dealt(store: Store, folder: str, stretches: Iterable[tuple[int, pa.Table]]) -> Dealt:
    """Write the events of several targets to one file. A target may occur more than once."""
    dealt = Dealt(fresh_name(folder, ".arrow"), [], [])
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with store.writer(dealt.file) as file, pa.ipc.new_file(file, EVENTS, options=options) as writer:
        for target, part in stretches:
            for batch in part.combine_chunks().to_batches() if part.num_rows else ():
                writer.write_batch(batch)
                dealt.targets.append(target)
                dealt.sizes.append(batch.num_rows)
    return dealt


def write_index(store: Store, index: pa.Buffer, folder: str) -> str:
    """Write the keys of a segment to a new file, and return its name."""
    name = fresh_name(folder, ".keys")
    with store.writer(name) as file:
        file.write(index)
    return name


def read_index(store: Store, name: str) -> pa.Buffer:
    """Read the keys of a segment. Raise UnreadPart if they are unreadable."""
    try:
        return store.buffer(name)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UnreadPart(name, error) from None


def _rows_in(store: Store, name: str) -> int:
    """Return the number of rows of a Parquet file."""
    try:
        with store.open(name) as file:
            count: int = pq.read_metadata(file).num_rows
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UnreadPart(name, error) from None
    return count


# ---- writing ---------------------------------------------------------------------------------------

SAMPLES_A_GROUP = 8_192
KEPT = "kept"
"""The folder of files that are not part of tables: events, samples, suspects, keys."""


class Written:
    """Writes the files of a job. With `counts`, it also reports the number of samples in each minute."""

    def __init__(self, store: Store, plan: Plan, *, counts: bool = False) -> None:
        self._store = store
        self._plan = plan
        self._counts = counts
        self._segments: list[Segment] = []
        self._hot: Segment | None = None
        self._aside: Dealt | None = None
        self._minutes: dict[int, int] = {}

    def folded(self) -> Folded:
        """Return the written files as the result of the job."""
        return Folded(self._segments, self._hot, self._aside, self._minutes)

    def put(self, events: pa.Table) -> None:
        """Write these events as a segment."""
        if events.num_rows:
            bucket = fold_bucket(events)
            self._segments.append(self._segment(bucket, [events], [bucket.timeline]))

    def put_hot(self, events: pa.Table) -> None:
        """Write these events as the hot segment."""
        if events.num_rows:
            bucket = fold_bucket(events)
            self._hot = self._segment(bucket, [events], [bucket.timeline])

    def put_large(self, reduced: pa.Table, events: Iterable[pa.Table], timeline: Iterable[pa.Table]) -> None:
        """Write a segment of one task. `reduced` contains the events that the tables `tasks` and `attempts`
        need.
        """
        self._segments.append(self._segment(fold_bucket(reduced), events, timeline))

    def put_aside(self, stretches: Iterable[tuple[int, pa.Table]]) -> None:
        """Write events for other jobs of this build."""
        self._aside = write_dealt(self._store, f"{self._plan.folder}/scratch", stretches)

    def change(self, minutes: Mapping[int, int]) -> None:
        """Record minutes whose samples have changed."""
        self._minutes |= minutes

    def write(self, table: pa.Table, name: str) -> Counted | None:
        """Write a part of a table; return None if it has no rows."""
        return self._part(table, name) if table.num_rows else None

    def _segment(self, bucket: Bucket, events: Iterable[pa.Table], timeline: Iterable[pa.Table]) -> Segment:
        """Write all files of a segment: rows of the tables, events, keys, samples and suspects."""
        tables = {"tasks": [bucket.tasks], "attempts": [bucket.attempts], "timeline": timeline}
        tables["anomalies"] = [bucket.anomalies]
        written = {
            name: [file for part in parts if (file := self.write(part, name)) is not None]
            for name, parts in tables.items()
            if name in self._plan.wanted
        }
        every, last_us, ids = list[Counted](), 0, list[pa.ChunkedArray]()
        for part in events:
            if part.num_rows:
                every.append(self._kept(_without_nulls(part)))
                last_us = max(last_us, pc.max(part.column("recorded_at").cast(pa.int64())).as_py() or 0)
                ids.append(part.column("uuid"))
        index = write_index(self._store, index_of(ids), f"{self._plan.folder}/{KEPT}")
        name = index.removeprefix(f"{TABLES}/")
        samples = self._sampled(bucket.samples)
        return Segment(every, name, last_us, written, samples, *self._suspects(bucket))

    def _sampled(self, samples: pa.Table) -> Samples | None:
        """Write samples sorted by minute, so that a range of minutes can be read without the others."""
        if "metrics" not in self._plan.wanted or not samples.num_rows:
            return None
        counts = measured.counts_by_minute(samples)
        if self._counts:
            for minute, count in counts.items():
                self._minutes[minute] = self._minutes.get(minute, 0) + count
        table = measured.by_minute(samples)
        file = self._part(table, KEPT, row_group_size=SAMPLES_A_GROUP).file
        return Samples(file, min(counts), max(counts))

    def _suspects(self, bucket: Bucket) -> list[Counted | None]:
        """Write the open tasks, the tasks without a task-sent event, and the first such event of each task
        name.
        """
        if "anomalies" not in self._plan.wanted:
            return [None, None, None]
        suspects = bucket.suspects
        parts = [suspects.filter(suspects.column(name)) for name in ("is_open", "is_untold")]
        return [self._kept(part) if part.num_rows else None for part in (*parts, bucket.told)]

    def _kept(self, table: pa.Table) -> Counted:
        return self._part(table, KEPT)

    def _part(self, table: pa.Table, name: str, *, row_group_size: int = 2**20) -> Counted:
        folder = f"{self._plan.folder}/{name}"
        return kept_name(write_part(self._store, table, folder, row_group_size=row_group_size))


def _without_nulls(events: pa.Table) -> pa.Table:
    """Return the events without columns that are entirely null, which are about half. Readers add missing
    columns.
    """
    return events.select(
        [name for name in events.schema.names if events.column(name).null_count < len(events)]
    )


def kept_name(written: Counted) -> Counted:
    """Return the file with its path relative to the folder of tables."""
    return Counted(written.file.removeprefix(f"{TABLES}/"), written.rows)
