"""Lake: immutable files that holds what happened.

    events/dt=2026-11-15/hour=07/ev-<recorder>-<boot>-<n>.parquet   as recorded
    compacted/dt=…/hour=…/…parquet, compacted/dt=…/…parquet         hours and days of them, by bucket
    compacted/_manifest/000001.json                                 which of them replace which
    quarantine/                                                     what could not be read; never deleted
    tables/                                                         what is built from the events
    _recorder/<name>.json, <name>.lock                              how far each recorder is; that it lives

Where the files lie, a folder or S3, is known by `umbel.stores`; here they are named from the lake's root.
A file appears whole or not at all. Names are never used again. The parts dt and hour are the time of
recording, by the recorder's clock, so an hour that has passed gets no more files. The same event may be
in several files; its `digest` shows that.
"""

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec

from umbel.errors import LakeBusy, LakeError
from umbel.stores.interface import Held, Store, Where
from umbel.stores.manifests import manifest_name, manifest_numbers
from umbel.stores.opening import store_at

MANIFESTS_KEPT = 5
SUFFIX = ".parquet"
EVENTS, COMPACTED, QUARANTINE, RECORDERS = "events", "compacted", "quarantine", "_recorder"


class Compacted(msgspec.Struct, frozen=True):
    """The newest of these is the whole truth: these files stand for those. `rows`: of files, by name."""

    files: list[str] = []
    replaces: list[str] = []
    replaced_at: dict[str, float] = {}
    rows: dict[str, int] = {}


@dataclass(frozen=True, slots=True)
class LakeSize:
    files: int
    size_bytes: int


class Lake:
    def __init__(self, where: Where | Store, *, mode: int | None = None) -> None:
        """`mode`: what the root is to have, where that is a folder; None: what it has."""
        self.store = store_at(where, mode=mode)

    # -- what is there ---------------------------------------------------------------------------

    def event_files(self) -> list[str]:
        """The files that hold the events now, each event at least once; not what was set aside."""
        compacted = self.read_compacted()
        replaced = set(compacted.replaces)
        raw = [name for name in self.raw_files() if name not in replaced]
        return sorted([*raw, *self.existing(compacted.files)])

    def raw_files(self) -> list[str]:
        return [name for name in self.store.names(EVENTS) if _is_raw(name)]

    def existing(self, files: list[str]) -> list[str]:
        """Those of these compacted files that are there."""
        there = set(self.store.names(COMPACTED)) if files else set()
        return [name for name in files if name in there]

    def read_compacted(self) -> Compacted:
        numbers = manifest_numbers(self.store, COMPACTED)
        if not numbers:
            return Compacted()
        found: Compacted = self._read_json(_manifest(numbers[-1]), Compacted)
        return found

    def size(self) -> LakeSize:
        sizes = self.store.sizes(self.event_files())
        return LakeSize(len(sizes), sum(sizes))

    # -- what is written -------------------------------------------------------------------------

    def publish_compacted(self, compacted: Compacted) -> None:
        numbers = manifest_numbers(self.store, COMPACTED)
        self.store.put(_manifest(numbers[-1] + 1 if numbers else 1), msgspec.json.encode(compacted))
        self.store.delete(map(_manifest, numbers[:-MANIFESTS_KEPT]))

    def set_aside(self, name: str) -> str:
        """Move a file that cannot be read to the quarantine, under a name that shows where it was."""
        target = f"{QUARANTINE}/{name.replace('/', '__')}"
        self.store.move(name, target)
        return target

    # -- who is at work --------------------------------------------------------------------------

    @contextmanager
    def locked(self, name: str, what: str) -> Iterator[None]:
        """Be the only one with this name here, or say who is."""
        try:
            with self.store.held(lock_of(name), f"pid {os.getpid()}"):
                yield
        except Held as held:
            raise LakeBusy(
                f"{what} is already using {self.store.where} ({held}); stop it, or use another name or lake"
            ) from None

    def _read_json(self, name: str, wanted: type[Any]) -> Any:
        try:
            return msgspec.json.decode(self.store.read(name), type=wanted)
        except (OSError, msgspec.MsgspecError) as error:
            raise LakeError(
                f"cannot read {self.store.where}/{name}: {error}; restore the file, or move it away"
            ) from None


@asynccontextmanager
async def entered(
    lock: AbstractContextManager[None], in_thread: Callable[..., Awaitable[object]]
) -> AsyncIterator[None]:
    """A lock taken and given back in a thread: that may take as long as the store takes to answer."""
    await in_thread(lock.__enter__)
    try:
        yield
    finally:
        await in_thread(lock.__exit__, None, None, None)


def hour_folder(at: float) -> str:
    """The part of a name that says when a file was recorded."""
    when = datetime.fromtimestamp(at, UTC)
    return f"dt={when:%Y-%m-%d}/hour={when:%H}"


def lock_of(name: str) -> str:
    return f"{RECORDERS}/{name}.lock"


def _manifest(number: int) -> str:
    return manifest_name(COMPACTED, number)


def _is_raw(name: str) -> bool:
    parts = name.split("/")
    return (
        len(parts) == 4
        and parts[1].startswith("dt=")
        and parts[2].startswith("hour=")
        and name.endswith(SUFFIX)
    )
