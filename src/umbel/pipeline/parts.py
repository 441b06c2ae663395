"""Parts: files that the jobs of a build read and write, by Arrow alone.

A job's file has a name that no other has. Files are named from the lake's root. Events that are dealt out
lie in Arrow's own format, which is written and read for less than Parquet and is gone when the build is
done.
"""

import secrets
from collections.abc import Iterable, Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from umbel.events.columns import REQUIRED
from umbel.fold.buckets import bucket_of
from umbel.fold.names import TABLES
from umbel.fold.schemas import EVENTS, by_difference, settled
from umbel.pipeline.plan import Counted, Dealt, Fold, Plan
from umbel.stores.interface import Store
from umbel.stores.refusals import raise_unavailable

DIFFERING = frozenset(
    {"subject", "task_id", "uuid", "root_id", "args", "kwargs", "result", "detail", "eta", "expires"}
)
"""Texts that differ from row to row get no dictionary: it would be given up half way."""

ROWS_AT_ONCE = 250_000


class UnreadPart(Exception):
    """A file that cannot be read; says which, and why. If it is the store that does not answer, that is
    raised instead."""

    def __init__(self, name: str, error: Exception) -> None:
        raise_unavailable(error)
        self.name = name
        self.why = str(error).partition("\n")[0][:200]
        super().__init__(f"{name}: {self.why}")


def fresh_name(folder: str, suffix: str) -> str:
    return f"{folder}/part-{secrets.token_hex(8)}{suffix}"


def write_part(store: Store, table: pa.Table, folder: str, *, row_group_size: int = 2**20) -> Counted:
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
            write_statistics=instants,  # what is asked for by a range, and lies by it
            row_group_size=row_group_size,
        )
    return Counted(name, table.num_rows)


def event_batches(store: Store, name: str, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
    """The events of a file of the lake, a bounded number at a time, in the lake's columns and types."""
    try:
        with store.open(name) as opened, pq.ParquetFile(opened) as file:
            wanted = _filled(file.metadata, columns or [*EVENTS.names], columns or REQUIRED)
            for batch in file.iter_batches(ROWS_AT_ONCE, columns=wanted, use_threads=False):
                table = pa.Table.from_batches([batch])
                yield settled(table) if columns is None else table
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UnreadPart(name, error) from None


def _filled(metadata: pq.FileMetaData, names: Sequence[str], needed: Sequence[str]) -> list[str]:
    """Those of the columns that the file has, without those that it says are null throughout."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    places = {metadata.schema.column(place).path: place for place in range(metadata.num_columns)}
    return [
        name
        for name in names
        if name in places
        and (name in needed or not all(_is_null(group.column(places[name])) for group in groups))
    ]


def _is_null(chunk: pq.ColumnChunkMetaData) -> bool:
    told = chunk.statistics
    return told is not None and told.has_null_count and bool(told.null_count == chunk.num_values)


class Source:
    """All events that a job folds, wherever they lie."""

    def __init__(self, store: Store, plan: Plan, job: Fold) -> None:
        self._store = store
        self._plan = plan
        self._job = job
        self._of_lake = plan.sources(job.target) if job.of_lake else []

    def rows(self) -> int:
        """At most; files of fewer buckets have events of others too."""
        of_lake = sum(_rows_in(self._store, name) for name, _ in self._of_lake)
        return self._job.kept_rows + self.fresh_rows() + of_lake

    def fresh_rows(self) -> int:
        """Of what was dealt out."""
        return sum(size for one in self._plan.dealt for _, size in self._stretches(one))

    def batches(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        for name, count in self._of_lake:
            for table in event_batches(self._store, name, columns):
                yield table if count == self._plan.count else self._own(table)
        yield from self.kept(columns)
        yield from self.fresh(columns)

    def kept(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        for one in self._job.kept:
            yield from event_batches(self._store, f"{TABLES}/{one.file}", columns)

    def fresh(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        for one in self._plan.dealt:
            places = [place for place, _ in self._stretches(one)]
            if not places:
                continue
            with self._store.open(one.file) as file, pa.ipc.open_file(file) as reader:
                for place in places:
                    table = pa.Table.from_batches([reader.get_batch(place)])
                    yield table if columns is None else table.select(columns)

    def _stretches(self, dealt: Dealt) -> Iterator[tuple[int, int]]:
        """Where in the file its events lie, and how many."""
        for place, (target, size) in enumerate(zip(dealt.targets, dealt.sizes, strict=True)):
            if target == self._job.target:
                yield place, size

    def _own(self, table: pa.Table) -> pa.Table:
        buckets = bucket_of(table.column("uuid").combine_chunks(), self._plan.count)
        return table.filter(pa.array(buckets == self._job.target))

    def all(self) -> pa.Table:
        return pa.concat_tables([EVENTS.empty_table(), *self.batches()])

    def only(self, ids: Sequence[str], *, others: bool = False) -> Iterator[pa.Table]:
        """Events of these tasks, or of all others."""
        return chosen(self.batches(), ids, others=others)


def chosen(tables: Iterable[pa.Table], ids: Sequence[str], *, others: bool = False) -> Iterator[pa.Table]:
    """Events of these tasks, or of all others."""
    wanted = pa.array(ids, pa.string())
    for table in tables:
        is_one = pc.is_in(table.column("uuid"), value_set=wanted)
        yield table.filter(pc.invert(is_one) if others else is_one)


def read_part(store: Store, name: str, filters: pc.Expression | None = None) -> pa.Table:
    """A file that a job has written."""
    try:
        with store.open(name) as file:
            return pq.read_table(file, filters=filters, partitioning=None, use_threads=False)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UnreadPart(name, error) from None


def write_dealt(store: Store, folder: str, stretches: Iterable[tuple[int, pa.Table]]) -> Dealt:
    """Events for each of some targets. A target may come more than once."""
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
    name = fresh_name(folder, ".keys")
    with store.writer(name) as file:
        file.write(index)
    return name


def read_index(store: Store, name: str) -> pa.Buffer:
    try:
        return store.buffer(name)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UnreadPart(name, error) from None


def _rows_in(store: Store, name: str) -> int:
    try:
        with store.open(name) as file:
            count: int = pq.read_metadata(file).num_rows
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UnreadPart(name, error) from None
    return count
