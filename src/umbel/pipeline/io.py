"""IO: check the files of the lake, and publish builds in it.

    tables/<build>/<table>/part-*.parquet     files that one build wrote
    tables/<build>/kept/                      events, samples and keys of segments for the next build
    tables/<build>/state.json                 the events that the build contains, and its segments
    tables/_manifest/000042.json              the files for readers; they use the highest number
    tables/current.json                       the same files by full path, for other tools
    .build.lock                               the lock of the process that builds

A build writes files that no reader uses yet, and publishes them with a manifest. Readers therefore see the
tables of one build, never a mixture of two. A manifest also names unchanged files of earlier builds. Files
of the previous build stay for readers that still use them; the next build removes files that no manifest
names, including those of a build that crashed.

Only one process builds at a time. It holds a lock in the lake's store (`umbel.stores`), and confirms the
lock before it publishes, because a lock in S3 can expire.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TypeVar

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from umbel.events.tables import COLUMNS, LAKE_VERSION, REQUIRED, TABLES_VERSION, Kind
from umbel.fold import TABLES
from umbel.pipeline import BuildFailed, BuildRuns, NewerLake
from umbel.pipeline.plan import State
from umbel.stores.interface import (
    MANIFESTS,
    HeldByAnother,
    Store,
    Where,
    manifest_name,
    manifest_numbers,
    raise_unavailable,
)
from umbel.stores.local import store_at

# ---- io --------------------------------------------------------------------------------------------

LOCK = ".build.lock"
BUILDS_KEPT = 2
STATE = "state.json"
CURRENT = f"{TABLES}/current.json"
WrittenT = TypeVar("WrittenT")


class Manifest(msgspec.Struct, frozen=True):
    """A published build. Paths are relative to the folder `tables`."""

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
    state: str = ""
    """The file with the state that the next build can extend; empty if there is none."""


def new_build(store: Store) -> str:
    """Return a new unique name for a build. Names sort in the order of the builds."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{os.getpid()}-{newest_number(store) + 1:06d}"


def publish(lake: Where | Store, manifest: Manifest) -> None:
    """Publish a build, so that readers use it. Raise BuildFailed if one of its files is missing."""
    store = store_at(lake)
    there = set(store.names(TABLES))
    named = [name for names in manifest.tables.values() for name in names]
    missing = [name for name in named if f"{TABLES}/{name}" not in there]
    if missing:
        raise BuildFailed(f"{missing[0]} was written but is missing now; nothing was published. Build again")
    data = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    name = _manifest(newest_number(store) + 1)
    store.confirm(LOCK)
    store.put(name, data)


def point_to(store: Store, manifest: Manifest) -> None:
    """Write the full paths of the newest build to a fixed file, for tools that do not read manifests."""
    where = store.path(TABLES) or f"{store.where}/{TABLES}"
    named = {table: [f"{where}/{name}" for name in names] for table, names in manifest.tables.items()}
    pointer = {"build": manifest.build, "built_at": manifest.built_at, "tables": named}
    store.put(CURRENT, msgspec.json.format(msgspec.json.encode(pointer), indent=1))


def newest_manifest(lake: Where | Store) -> Manifest | None:
    """Return the manifest of the published build; None if there is none. Raise BuildFailed if it is
    unreadable.
    """
    store = store_at(lake)
    number = newest_number(store)
    return read_json(store, _manifest(number), Manifest) if number else None


def newest_state(lake: Where | Store) -> State | None:
    """Return the state of the published build; None if there is none or it is unreadable."""
    store = store_at(lake)
    try:
        manifest = newest_manifest(store)
    except BuildFailed:
        return None
    return None if manifest is None else _state_of(store, manifest)


def _state_of(store: Store, manifest: Manifest) -> State | None:
    """Read the state of a manifest; None if it is unreadable, so that the next build reads all events."""
    try:
        return msgspec.json.decode(store.read(f"{TABLES}/{manifest.state}"), type=State)
    except (OSError, msgspec.MsgspecError) as error:
        raise_unavailable(error)
        return None


def newest_number(lake: Where | Store) -> int:
    """Return the number of the newest manifest; 0 if there is none."""
    return max(manifest_numbers(store_at(lake), TABLES), default=0)


def remove_old_builds(store: Store) -> None:
    """Remove all builds except the newest, and files of builds that crashed. The caller must hold the
    lock.
    """
    numbers = manifest_numbers(store, TABLES)
    manifests = [read_json(store, _manifest(number), Manifest) for number in numbers[-BUILDS_KEPT:]]
    store.delete(map(_manifest, numbers[:-BUILDS_KEPT]))
    needed = {name for manifest in manifests for names in manifest.tables.values() for name in names}
    if manifests and (state := _state_of(store, manifests[-1])) is not None:
        needed |= {manifests[-1].state, *state.names()}
    builds = {name.partition("/")[0] for name in needed}
    for build in store.folders(TABLES):
        if build != MANIFESTS and build not in builds:
            store.delete_folder(f"{TABLES}/{build}")
    written = [name.removeprefix(f"{TABLES}/") for name in store.names(TABLES, hidden=True)]
    old = [name for name in written if name not in needed and not name.startswith(f"{MANIFESTS}/")]
    store.delete(f"{TABLES}/{name}" for name in old if "/" in name)


@contextlib.contextmanager
def locked(store: Store) -> Iterator[None]:
    """Hold the lock for building in this lake. Raise BuildRuns if another process holds it."""
    try:
        with store.held(LOCK, f"process {os.getpid()} on {os.uname().nodename}"):
            yield
    except HeldByAnother as held:
        raise BuildRuns(f"{held} is already building in {store.where}; wait for it, or stop it") from None


def read_json(store: Store, name: str, kind: type[WrittenT]) -> WrittenT:
    """Read a JSON file of the lake as `kind`. Raise BuildFailed if it is unreadable."""
    try:
        return msgspec.json.decode(store.read(name), type=kind)
    except (OSError, msgspec.MsgspecError) as error:
        raise_unavailable(error)
        raise BuildFailed(
            f"cannot read {store.where}/{name}: {error}; restore the file, or move it away"
        ) from None


def _manifest(number: int) -> str:
    return manifest_name(TABLES, number)


# ---- files -----------------------------------------------------------------------------------------

VERSION_KEY = b"umbel.lake_version"
READERS = 8
THOROUGH_READERS = 2  # each holds columns of a file in memory
ROWS_AT_ONCE = 65_536


@dataclass(frozen=True, slots=True)
class UnreadableFile:
    """An unreadable file, and the reason."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Found:
    """The files to build from. Paths are relative to the lake's root."""

    files: list[str] = field(default_factory=list)
    unreadable: list[UnreadableFile] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    """The number of rows of each file."""
    events: int = 0
    """The number of rows in all files. An event that was recorded twice counts twice."""

    def rows_of(self) -> dict[str, int]:
        """Return the number of rows of each file."""
        return dict(zip(self.files, self.rows, strict=True))


def look_into(
    lake: Where | Store,
    names: Sequence[str],
    *,
    thorough: bool = False,
    known: Mapping[str, int] | None = None,
) -> Found:
    """Divide the files into readable and unreadable ones. Raise NewerLake if a newer version wrote one.

    With `thorough`, read the data of each file, not only its metadata. `known` contains files that were
    checked before, and their numbers of events.

    Files are checked before a build, because one truncated file could end a build after hours. The metadata
    of a Parquet file is at its end, so reading it finds truncated files, columns of a wrong type and files
    of other kinds. The metadata contains the lake's version; a file of a newer version is rejected, because
    its meaning may differ. Damaged data is found only by reading all of it, which is done after a build has
    failed on such a file.
    """
    store = store_at(lake)
    counts = {} if thorough else known or {}

    def look(name: str) -> int | UnreadableFile:
        if name in counts:
            return counts[name]
        return _look_thoroughly(store, name) if thorough else _look(store, name)

    with ThreadPoolExecutor(THOROUGH_READERS if thorough else READERS) as readers:
        looks = list(readers.map(look, names))
    good = [
        (name, look) for name, look in zip(names, looks, strict=True) if not isinstance(look, UnreadableFile)
    ]
    return Found(
        files=[name for name, _ in good],
        unreadable=[look for look in looks if isinstance(look, UnreadableFile)],
        rows=[rows for _, rows in good],
        events=sum(rows for _, rows in good),
    )


def _look(store: Store, name: str) -> int | UnreadableFile:
    """Return the number of rows of a file, or the reason why it is unreadable."""
    try:
        with store.open(name) as file:
            metadata = pq.read_metadata(file)
        schema = metadata.schema.to_arrow_schema()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise_unavailable(error)
        return UnreadableFile(name, f"not a complete Parquet file: {_gist(error)}")
    version = _version(schema)
    if version is None:
        return UnreadableFile(
            name, f"its version of the lake is {(schema.metadata or {}).get(VERSION_KEY)!r}"
        )
    if version > LAKE_VERSION:
        raise NewerLake(
            f"{store.where}/{name} was written for version {version} of the lake, but this Umbel knows"
            f" {LAKE_VERSION}; upgrade Umbel here, or build with the version that recorded it"
        )
    missing = [name for name in REQUIRED if name not in schema.names]
    if missing:
        return UnreadableFile(name, f"it has no column {missing[0]}, so it is not a file of events")
    for column, expected in _EXPECTED.items():
        place = schema.get_field_index(column)
        if place >= 0 and not _fits(schema.field(place).type, expected):
            return UnreadableFile(
                name, f"column {column} is {schema.field(place).type}, and {expected} in the lake"
            )
    rows: int = metadata.num_rows
    return rows


def _look_thoroughly(store: Store, name: str) -> int | UnreadableFile:
    """Read all data of a file, and return its number of rows or why it is unreadable."""
    look = _look(store, name)
    try:
        with store.open(name) as opened, pq.ParquetFile(opened) as file:
            columns = [name for name in file.schema_arrow.names if name in _EXPECTED]
            for _ in file.iter_batches(ROWS_AT_ONCE, columns=columns):
                pass
    except (pa.ArrowException, OSError, ValueError) as error:
        raise_unavailable(error)
        return look if isinstance(look, UnreadableFile) else UnreadableFile(name, f"damaged: {_gist(error)}")
    return look


def _gist(error: Exception) -> str:
    return str(error).splitlines()[0][:200]


def _version(schema: pa.Schema) -> int | None:
    """Return the lake's version from a file's metadata; the current version if it is missing, None if it is
    not a number.
    """
    stated = (schema.metadata or {}).get(VERSION_KEY, str(LAKE_VERSION).encode())
    return int(stated) if stated.isdigit() else None


_EXPECTED: dict[str, Kind] = {column.name: column.kind for column in COLUMNS}


def _fits(found: pa.DataType, expected: Kind) -> bool:
    """Return whether a column has the type that the lake defines."""
    # dictionaries exist only in the writer's memory; the file contains the type of the values
    if pa.types.is_dictionary(found):
        return _fits(found.value_type, expected)
    match expected:
        case "text" | "json":
            return bool(pa.types.is_string(found) or pa.types.is_large_string(found))
        case "int":
            return bool(pa.types.is_signed_integer(found))
        case "float":
            return bool(pa.types.is_float64(found))
        case "bool":
            return bool(pa.types.is_boolean(found))
        case "instant":
            return bool(pa.types.is_timestamp(found) and found.unit == "us" and found.tz is not None)
