"""IO: the only place that reads and writes the lake.

    tables/<build>/<table>/part-*.parquet     what one build wrote
    tables/<build>/kept/                      events, samples and keys of segments, for the next build
    tables/<build>/state.json                 what the build has taken and kept (`state.py`)
    tables/_manifest/000042.json              which files readers are to read; the highest number counts
    tables/current.json                       the same files by their full names, for other tools
    .build.lock                               locked by the process that builds

A build writes where no reader looks and publishes by putting a manifest: readers see the tables
of one build or of another, never half of either. A manifest names files of earlier builds too, where they
did not change. What the build before needs stays for readers that are at it; what no manifest needs, and
what a build that died has left, is removed by the next.

Who builds is the only one: it holds a name in the lake's store (`umbel.stores`), and shows that it still does
before it publishes.
"""

import contextlib
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TypeVar

import msgspec

from umbel.events.columns import LAKE_VERSION
from umbel.events.tables import TABLES_VERSION
from umbel.fold.names import TABLES
from umbel.pipeline.faults import BuildFailed, BuildRuns
from umbel.pipeline.state import State
from umbel.stores.interface import Held, Store, Where
from umbel.stores.manifests import MANIFESTS, manifest_name, manifest_numbers
from umbel.stores.opening import store_at
from umbel.stores.refusals import raise_unavailable

LOCK = ".build.lock"
BUILDS_KEPT = 2
STATE = "state.json"
CURRENT = f"{TABLES}/current.json"
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
    state: str = ""
    """What the next build can extend, if there is anything."""


def new_build(store: Store) -> str:
    """A name that no build had, in the order of building."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{os.getpid()}-{newest_number(store) + 1:06d}"


def publish(lake: Where | Store, manifest: Manifest) -> None:
    """Make a build the one that is read. Its files must be there, or readers would miss them."""
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
    """For tools that know nothing of manifests: one name that stays, with names that can be opened."""
    where = store.path(TABLES) or f"{store.where}/{TABLES}"
    named = {table: [f"{where}/{name}" for name in names] for table, names in manifest.tables.items()}
    pointer = {"build": manifest.build, "built_at": manifest.built_at, "tables": named}
    store.put(CURRENT, msgspec.json.format(msgspec.json.encode(pointer), indent=1))


def newest_manifest(lake: Where | Store) -> Manifest | None:
    store = store_at(lake)
    number = newest_number(store)
    return read_json(store, _manifest(number), Manifest) if number else None


def newest_state(lake: Where | Store) -> State | None:
    """What the build that is published has kept; None where that cannot be read."""
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
    return max(manifest_numbers(store_at(lake), TABLES), default=0)


def remove_old_builds(store: Store) -> None:
    """All but the newest few, and what builds that died have left. Only for who holds the lock."""
    numbers = manifest_numbers(store, TABLES)
    manifests = [read_json(store, _manifest(number), Manifest) for number in numbers[-BUILDS_KEPT:]]
    store.delete(map(_manifest, numbers[:-BUILDS_KEPT]))
    needed = {name for one in manifests for names in one.tables.values() for name in names}
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
    """Be the only one that builds in this lake, or say who is."""
    try:
        with store.held(LOCK, f"process {os.getpid()} on {os.uname().nodename}"):
            yield
    except Held as held:
        raise BuildRuns(f"{held} is already building in {store.where}; wait for it, or stop it") from None


def read_json(store: Store, name: str, kind: type[WrittenT]) -> WrittenT:
    try:
        return msgspec.json.decode(store.read(name), type=kind)
    except (OSError, msgspec.MsgspecError) as error:
        raise_unavailable(error)
        raise BuildFailed(
            f"cannot read {store.where}/{name}: {error}; restore the file, or move it away"
        ) from None


def _manifest(number: int) -> str:
    return manifest_name(TABLES, number)
