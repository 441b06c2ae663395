"""IO: the only place of the pipeline that reads the lake, and publishes builds in it.

Files are checked before a build reads them. A build becomes visible by one manifest.

    tables/<build>/<table>/part-*.parquet     what one build wrote
    tables/<build>/kept/                      events, samples and keys of segments, for the next build
    tables/<build>/state.json                 which events the build has, and its segments
    tables/_manifest/000042.json              which files readers are to read; the highest number counts
    tables/current.json                       the same files by their full names, for other tools
    .build.lock                               locked by the process that builds

A build writes files that no reader looks at, and publishes them by a manifest: readers see the tables of one
build or of another, never a mixture. A manifest also names unchanged files of earlier builds. Files of the
build before stay for readers that still use them; the next build removes files that no manifest names, and
those of a build that died.

Only one process builds: it holds a lock in the lake's store (`umbel.stores`), and confirms it before it
publishes.
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
from umbel.fold.names import TABLES
from umbel.pipeline.faults import BuildFailed, BuildRuns, NewerLake
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
#
# The only place that reads and writes the lake.

LOCK = ".build.lock"
BUILDS_KEPT = 2
STATE = "state.json"
CURRENT = f"{TABLES}/current.json"
WrittenT = TypeVar("WrittenT")


class Manifest(msgspec.Struct, frozen=True):
    """A published build. Files are named from the folder `tables`."""

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
    """The file of the state that the next build can extend; empty if there is none."""


def new_build(store: Store) -> str:
    """A new, unique name of a build; names sort in the order of building."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{os.getpid()}-{newest_number(store) + 1:06d}"


def publish(lake: Where | Store, manifest: Manifest) -> None:
    """Publish a build: readers use it from now on. BuildFailed if one of its files is missing."""
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
    """Write the newest build's full file names to a fixed file, for tools that do not know manifests."""
    where = store.path(TABLES) or f"{store.where}/{TABLES}"
    named = {table: [f"{where}/{name}" for name in names] for table, names in manifest.tables.items()}
    pointer = {"build": manifest.build, "built_at": manifest.built_at, "tables": named}
    store.put(CURRENT, msgspec.json.format(msgspec.json.encode(pointer), indent=1))


def newest_manifest(lake: Where | Store) -> Manifest | None:
    """The manifest of the published build; None if nothing was built. BuildFailed if it cannot be read."""
    store = store_at(lake)
    number = newest_number(store)
    return read_json(store, _manifest(number), Manifest) if number else None


def newest_state(lake: Where | Store) -> State | None:
    """The state of the published build; None if there is none or it cannot be read."""
    store = store_at(lake)
    try:
        manifest = newest_manifest(store)
    except BuildFailed:
        return None
    return None if manifest is None else _state_of(store, manifest)


def _state_of(store: Store, manifest: Manifest) -> State | None:
    try:
        return msgspec.json.decode(store.read(f"{TABLES}/{manifest.state}"), type=State)
    except (OSError, msgspec.MsgspecError) as error:
        raise_unavailable(error)
        return None


def newest_number(lake: Where | Store) -> int:
    """The number of the newest manifest; 0 if there is none."""
    return max(manifest_numbers(store_at(lake), TABLES), default=0)


def remove_old_builds(store: Store) -> None:
    """Remove all but the newest builds, and files of builds that died. The caller holds the lock."""
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
    """Hold the lock for building in this lake; BuildRuns with its holder if another process has it."""
    try:
        with store.held(LOCK, f"process {os.getpid()} on {os.uname().nodename}"):
            yield
    except HeldByAnother as held:
        raise BuildRuns(f"{held} is already building in {store.where}; wait for it, or stop it") from None


def read_json(store: Store, name: str, kind: type[WrittenT]) -> WrittenT:
    """A file of the lake, decoded as `kind`; BuildFailed if it cannot be read."""
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
#
# Which files of the lake can be read, checked before a build reads them.
#
# One truncated file would end a build, hours into it. A Parquet file has its metadata at its end, so
# reading the metadata alone finds truncated files, columns of a wrong type and files of something else. The
# metadata has the lake's version: a file of a newer Umbel may mean something else, and is refused.
#
# Damage in the data is found by reading all of it, which is done only after a build has failed on some.

VERSION_KEY = b"umbel.lake_version"
READERS = 8
THOROUGH_READERS = 2  # each has columns of a file in memory
ROWS_AT_ONCE = 65_536


@dataclass(frozen=True, slots=True)
class UnreadableFile:
    """A file that cannot be read, and why."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Found:
    """The files to build from. They are named from the lake's root."""

    files: list[str] = field(default_factory=list)
    unreadable: list[UnreadableFile] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    """The number of rows of each file."""
    events: int = 0
    """The number of rows; an event that was recorded twice counts twice."""

    def rows_of(self) -> dict[str, int]:
        """The number of rows by file."""
        return dict(zip(self.files, self.rows, strict=True))


def look_into(
    lake: Where | Store,
    names: Sequence[str],
    *,
    thorough: bool = False,
    known: Mapping[str, int] | None = None,
) -> Found:
    """Divide the files into readable and unreadable ones; NewerLake if one was written by a newer version.

    `thorough`: read all of each file, not only its metadata. `known`: files that were checked before, and
    the number of events of each.
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
    """How many rows a file has, or why it cannot be read."""
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
    """The version of the lake in a file's metadata; this version if it is missing, None if it is no
    number.
    """
    stated = (schema.metadata or {}).get(VERSION_KEY, str(LAKE_VERSION).encode())
    return int(stated) if stated.isdigit() else None


_EXPECTED: dict[str, Kind] = {column.name: column.kind for column in COLUMNS}


def _fits(found: pa.DataType, expected: Kind) -> bool:
    if pa.types.is_dictionary(found):  # in the writer's memory; the file has the values' type
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
