"""Parts: files that the jobs of a build read and write, by Arrow alone.

A job's file has a name that no other has, and the mode of its folder. Events that are dealt out lie in
Arrow's own format, which is written and read for less than Parquet and is gone when the build is done.
"""

import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from umbel.fold.buckets import bucket_of
from umbel.fold.schemas import EVENTS, settled
from umbel.pipeline.plan import Counted, Plan

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
    """All events of one bucket, wherever they lie."""

    def __init__(self, plan: Plan, bucket: int) -> None:
        self._plan = plan
        self._bucket = bucket

    def rows(self) -> int:
        """At most; files of fewer buckets have events of others too."""
        dealt = sum(
            size
            for one in self._plan.dealt
            for bucket, size in zip(one.buckets, one.sizes, strict=True)
            if bucket == self._bucket
        )
        return dealt + sum(self._rows_in(path) for path, _ in self._plan.sources(self._bucket))

    def _rows_in(self, path: str) -> int:
        try:
            count: int = pq.read_metadata(path).num_rows
        except (pa.ArrowException, OSError, ValueError) as error:
            raise UnreadPart(path, error) from None
        return count

    def batches(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        for path, count in self._plan.sources(self._bucket):
            for table in event_batches(path, columns):
                yield table if count == self._plan.count else self._own(table)
        for one in self._plan.dealt:
            if self._bucket not in one.buckets:
                continue
            with pa.OSFile(one.file) as file, pa.ipc.open_file(file) as reader:
                for place, bucket in enumerate(one.buckets):
                    if bucket == self._bucket:
                        table = pa.Table.from_batches([reader.get_batch(place)])
                        yield table if columns is None else table.select(columns)

    def _own(self, table: pa.Table) -> pa.Table:
        buckets = bucket_of(table.column("uuid").combine_chunks(), self._plan.count)
        return table.filter(pa.array(buckets == self._bucket))

    def all(self) -> pa.Table:
        return pa.concat_tables([EVENTS.empty_table(), *self.batches()])

    def only(self, ids: Sequence[str], *, others: bool = False) -> Iterator[pa.Table]:
        """Events of these tasks, or of all others."""
        wanted = pa.array(ids, pa.string())
        for table in self.batches():
            is_one = pc.is_in(table.column("uuid"), value_set=wanted)
            yield table.filter(pc.invert(is_one) if others else is_one)
