"""IO: the only place that reads and writes the lake.

    tables/<build>/<table>/part-*.parquet     what one build wrote
    tables/<build>/kept/                      events, samples and keys of segments, for the next build
    tables/<build>/state.json                 what the build has taken and kept (`state.py`)
    tables/_manifest/000042.json              which files readers are to read; the highest number counts
    .build.lock                               locked by the process that builds

A build writes where no reader looks and publishes by giving a manifest its name: readers see the tables
of one build or of another, never half of either. A manifest names files of earlier builds too, where they
did not change. What the build before needs stays for readers that are at it; what no manifest needs, and
what a build that died has left, is removed by the next.

The lock is a file lock: it ends with its holder, however that ends. It holds on one machine and on
network file systems that carry such locks.
"""

import contextlib
import fcntl
import os
from collections.abc import Collection, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import msgspec

from umbel.events.columns import LAKE_VERSION
from umbel.events.tables import TABLES_VERSION
from umbel.pipeline.faults import BuildFailed, BuildRuns
from umbel.pipeline.state import State

BUILDS_KEPT = 2
STATE = "state.json"
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


def newest_state(lake: Path) -> State | None:
    """What the build that is published has kept; None where that cannot be read."""
    try:
        manifest = newest_manifest(lake)
    except BuildFailed:
        return None
    return None if manifest is None else _state_of(lake, manifest)


def _state_of(lake: Path, manifest: Manifest) -> State | None:
    try:
        return msgspec.json.decode((lake / "tables" / manifest.state).read_bytes(), type=State)
    except (OSError, msgspec.MsgspecError):
        return None


def newest_number(lake: Path) -> int:
    return max((int(path.stem) for path in _manifests(lake).glob("[0-9]*.json")), default=0)


def remove_old_builds(lake: Path) -> None:
    """All but the newest few, and what builds that died have left. Only for who holds the lock."""
    paths = sorted(_manifests(lake).glob("[0-9]*.json"), key=lambda path: int(path.stem))
    manifests = [read_json(path, Manifest) for path in paths[-BUILDS_KEPT:]]
    for path in paths[:-BUILDS_KEPT]:
        path.unlink()
    needed = {name for one in manifests for names in one.tables.values() for name in names}
    if manifests and (state := _state_of(lake, manifests[-1])) is not None:
        needed |= {manifests[-1].state, *state.names()}
    for folder in (lake / "tables").iterdir():
        if folder.is_dir() and folder.name != "_manifest":
            _remove_others(folder, lake / "tables", needed)


def _remove_others(folder: Path, tables: Path, needed: Collection[str]) -> None:
    """Files that nothing needs, and folders that are empty then."""
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir():
            if not any(path.iterdir()):
                path.rmdir()
        elif path.relative_to(tables).as_posix() not in needed:
            path.unlink()
    if not any(folder.iterdir()):
        folder.rmdir()


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


def read_json(path: Path, kind: type[WrittenT]) -> WrittenT:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError) as error:
        raise BuildFailed(f"cannot read {path}: {error}; restore the file, or move it away") from None


def _manifests(lake: Path) -> Path:
    return lake / "tables" / "_manifest"
