"""IO: the only place that reads and writes the lake.

    tables/<build>/<table>/part-*.parquet     what one build wrote
    tables/_manifest/000042.json              which build readers are to read; the highest number counts
    stream/                                   partial states and checkpoint of a stream (`jobs/follow.py`)
    .build.lock                               locked by the process that builds

A build writes where no reader looks and publishes by giving a manifest its name: readers see the tables
of one build or of another, never half of either. The tables of the build before stay for readers that
are at them; older ones, and what a build that died has left, are removed by the next.

The lock is a file lock: it ends with its holder, however that ends. It holds on one machine and on
network file systems that carry such locks.
"""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import msgspec
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T

from umbel.events.columns import LAKE_VERSION
from umbel.events.tables import TABLES_VERSION
from umbel.pipeline.faults import BuildFailed, BuildRuns
from umbel.pipeline.schemas import EVENTS, SCHEMAS

BUILDS_KEPT = 2
PARQUET = "*.parquet"
DIFFERING = frozenset({"uuid", "task_id", "root_id", "args", "kwargs", "result", "clock", "digest", "seq"})
WrittenT = TypeVar("WrittenT")


class Manifest(msgspec.Struct, frozen=True):
    """What is published. Files are named from the folder `tables`."""

    build: str
    tables: dict[str, list[str]]
    rows: dict[str, int]
    events: int
    tasks: int
    built_at: str
    source_files: int
    seconds: float
    lake_version: int = LAKE_VERSION
    tables_version: int = TABLES_VERSION
    quarantined: list[str] = []
    origin: str = "batch"


def read_events(spark: SparkSession, files: Sequence[Path]) -> DataFrame:
    """Files that `files.look_into` found readable."""
    if not files:
        return spark.createDataFrame([], EVENTS)
    return spark.read.schema(EVENTS).option("pathGlobFilter", PARQUET).parquet(*map(_as_pattern, files))


def follow_events(spark: SparkSession, folder: Path, *, files_per_batch: int) -> DataFrame:
    """The raw files of the lake as a stream; names of folders are not columns of it. Files elsewhere
    below `events` are not the lake's: nobody has looked into them."""
    source = (
        spark.readStream.schema(EVENTS)
        .option("pathGlobFilter", PARQUET)
        .option("recursiveFileLookup", "true")
        .option("maxFilesPerTrigger", files_per_batch)
        .option("maxFileAge", "3650d")  # a file that is copied in late is not to be passed over
        .option("ignoreMissingFiles", "true")  # one that was set aside after it was planned for a batch
    )
    return source.parquet(f"{_as_pattern(folder)}/dt=*/hour=*")


def files_of_batch(checkpoint: Path, batch_id: int) -> list[Path]:
    """Which files a batch of the stream is made of, from what Spark wrote down before it ran it."""
    last, before = _log_offset(checkpoint, batch_id), _log_offset(checkpoint, batch_id - 1)
    logs = sorted((checkpoint / "sources" / "0").glob("[0-9]*"))
    lines = {line for log in logs for line in log.read_bytes().splitlines()[1:]}  # the first is a version
    entries = [msgspec.json.decode(line, type=_Planned) for line in lines]
    return sorted(_local_path(one.path) for one in entries if before < one.batch_id <= last)


class _Planned(msgspec.Struct, rename="camel"):
    path: str
    batch_id: int


class _Offset(msgspec.Struct, rename="camel"):
    log_offset: int


def _log_offset(checkpoint: Path, batch_id: int) -> int:
    told = checkpoint / "offsets" / str(batch_id)
    return (
        msgspec.json.decode(told.read_bytes().splitlines()[-1], type=_Offset).log_offset
        if told.exists()
        else -1
    )


def read_table(spark: SparkSession, lake: Path, build: str, table: str) -> DataFrame:
    return spark.read.schema(SCHEMAS[table]).parquet(_as_pattern(table_folder(lake, build, table)))


def read_parts(spark: SparkSession, schema: T.StructType, folders: Sequence[Path]) -> DataFrame:
    """Partial states of a stream's batches."""
    if not folders:
        return spark.createDataFrame([], schema)
    return spark.read.schema(schema).option("pathGlobFilter", PARQUET).parquet(*map(_as_pattern, folders))


def _as_pattern(path: Path) -> str:
    """What Hadoop, which takes names of files for patterns, reads as this one."""
    return "".join(f"\\{sign}" if sign in "\\{}[]*?" else sign for sign in str(path))


def _local_path(name: str) -> Path:
    """A file as the system names it, from how Spark does: as an address, with escapes."""
    return Path(unquote(urlsplit(name).path))


def write(frame: DataFrame, folder: Path) -> None:
    """As Parquet. Columns whose values differ from row to row get no dictionary: in a profile of `tasks` a
    sixth of the samples lay in dictionaries, those of such columns are given up, and the files stay the
    size they were."""
    plain = {
        f"parquet.enable.dictionary#{field.name}": "false"
        for field in frame.schema
        if field.name in DIFFERING or isinstance(field.dataType, T.TimestampType | T.DoubleType)
    }
    frame.write.mode("overwrite").options(compression="zstd", **plain).parquet(str(folder))


def table_folder(lake: Path, build: str, table: str) -> Path:
    return lake / "tables" / build / table


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob(PARQUET) if not path.name.startswith((".", "_")))


def new_build(lake: Path) -> str:
    """A name that no build had, in the order of building."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{os.getpid()}-{newest_number(lake) + 1:06d}"


def publish(lake: Path, manifest: Manifest) -> Path:
    """Make a build the one that is read. Its files must be there, or readers would miss them."""
    missing = [
        name for names in manifest.tables.values() for name in names if not (lake / "tables" / name).exists()
    ]
    if missing:
        raise BuildFailed(f"{missing[0]} was written but is missing now; nothing was published. Build again")
    path = _manifests(lake) / f"{newest_number(lake) + 1:06d}.json"
    write_file(path, msgspec.json.format(msgspec.json.encode(manifest), indent=1))
    return path


def newest_manifest(lake: Path) -> Manifest | None:
    number = newest_number(lake)
    if number == 0:
        return None
    return read_json(_manifests(lake) / f"{number:06d}.json", Manifest)


def newest_number(lake: Path) -> int:
    return max((int(path.stem) for path in _manifests(lake).glob("[0-9]*.json")), default=0)


def remove_old_builds(lake: Path) -> None:
    """All but the newest few, and what builds that died have left. Only for who holds the lock."""
    paths = sorted(_manifests(lake).glob("[0-9]*.json"), key=lambda path: int(path.stem))
    kept = {read_json(path, Manifest).build for path in paths[-BUILDS_KEPT:]}
    for path in paths[:-BUILDS_KEPT]:
        path.unlink()
    for folder in (lake / "tables").iterdir():
        if folder.is_dir() and folder.name != "_manifest" and folder.name not in kept:
            shutil.rmtree(folder)


@contextlib.contextmanager
def locked(lake: Path) -> Iterator[None]:
    """Be the only one that builds in this lake, or say who is."""
    with (lake / ".build.lock").open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            holder = file.read(200).strip() or "another process"
            raise BuildRuns(f"{holder} is already building in {lake}; wait for it, or stop it") from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {os.uname().nodename}")
        file.flush()
        yield


def write_file(path: Path, data: bytes) -> None:
    """There whole, or as it was before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}")
    with fresh.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_json(path: Path, what: Mapping[str, Any]) -> None:
    write_file(path, msgspec.json.encode(what))


def read_json(path: Path, kind: type[WrittenT]) -> WrittenT:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError) as error:
        raise BuildFailed(f"cannot read {path}: {error}; restore the file, or move it away") from None


def _manifests(lake: Path) -> Path:
    return lake / "tables" / "_manifest"
