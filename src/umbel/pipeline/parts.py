"""Parts: files that the jobs of a build read and write, by Arrow alone.

A job's file has a name that no other has, and the mode of its folder. Events that are dealt out lie in
Arrow's own format, which is written and read for less than Parquet and is gone when the build is done.
"""

import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from umbel.fold.buckets import bucket_of
from umbel.fold.schemas import EVENTS, settled
from umbel.pipeline.plan import Counted, Dealt, Fold, Plan

DIFFERING = frozenset(
    {"subject", "task_id", "uuid", "root_id", "args", "kwargs", "result", "detail", "eta", "expires"}
)
"""Texts that differ from row to row get no dictionary: it would be given up half way."""

ROWS_AT_ONCE = 250_000


class UnreadPart(Exception):
    """A file that cannot be read; says which, and why."""

    def __init__(self, path: str, error: Exception) -> None:
        self.path = path
        self.why = str(error).partition("\n")[0][:200]
        super().__init__(f"{path}: {self.why}")


def fresh_path(folder: Path, suffix: str) -> Path:
    return folder / f"part-{secrets.token_hex(8)}{suffix}"


def write_part(table: pa.Table, folder: Path, *, row_group_size: int = 2**20) -> Counted:
    path = fresh_path(folder, ".parquet")
    repeated = [
        field.name
        for field in table.schema
        if field.type in (pa.string(), pa.bool_()) and field.name not in DIFFERING
    ]
    with created(path) as file:
        pq.write_table(
            table,
            file,
            compression="zstd",
            compression_level=1,
            use_dictionary=repeated,
            row_group_size=row_group_size,
        )
    return Counted(str(path), table.num_rows)


def created(path: Path) -> pa.PythonFile:
    """A file that those may read who may read its folder."""
    mode = path.parent.stat().st_mode & 0o666
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    os.fchmod(descriptor, mode)
    os.close(descriptor)
    return pa.OSFile(str(path), "wb")


def event_batches(path: str, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
    """The events of a file of the lake, a bounded number at a time, in the lake's columns and types."""
    try:
        with pq.ParquetFile(path) as file:
            wanted = [name for name in file.schema_arrow.names if name in (columns or EVENTS.names)]
            for batch in file.iter_batches(ROWS_AT_ONCE, columns=wanted, use_threads=False):
                table = pa.Table.from_batches([batch])
                yield settled(table) if columns is None else table
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UnreadPart(path, error) from None


class Source:
    """All events that a job folds, wherever they lie."""

    def __init__(self, plan: Plan, job: Fold) -> None:
        self._plan = plan
        self._job = job
        self._of_lake = plan.sources(job.target) if job.of_lake else []

    def rows(self) -> int:
        """At most; files of fewer buckets have events of others too."""
        kept = sum(one.rows for one in self._job.kept)
        return kept + self.fresh_rows() + sum(_rows_in(path) for path, _ in self._of_lake)

    def fresh_rows(self) -> int:
        """Of what was dealt out."""
        return sum(size for one in self._plan.dealt for _, size in self._stretches(one))

    def batches(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        for path, count in self._of_lake:
            for table in event_batches(path, columns):
                yield table if count == self._plan.count else self._own(table)
        yield from self.kept(columns)
        yield from self.fresh(columns)

    def kept(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        for one in self._job.kept:
            yield from event_batches(str(Path(self._plan.root) / one.file), columns)

    def fresh(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        for one in self._plan.dealt:
            places = [place for place, _ in self._stretches(one)]
            if not places:
                continue
            with pa.OSFile(one.file) as file, pa.ipc.open_file(file) as reader:
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


def read_part(path: Path | str, filters: pc.Expression | None = None) -> pa.Table:
    """A file that a job has written."""
    try:
        return pq.read_table(path, filters=filters, partitioning=None, use_threads=False)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UnreadPart(str(path), error) from None


def write_index(index: pa.Buffer, folder: Path) -> Path:
    path = fresh_path(folder, ".keys")
    with created(path) as file:
        file.write(index)
    return path


def read_index(path: Path) -> pa.Buffer:
    """Only what is looked at is read."""
    try:
        with pa.memory_map(str(path)) as file:
            return file.read_buffer()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UnreadPart(str(path), error) from None


def _rows_in(path: str) -> int:
    try:
        count: int = pq.read_metadata(path).num_rows
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UnreadPart(path, error) from None
    return count
