"""Lake: immutable files of recorded events, where they lie, and the Parquet library that reads and writes
them.

PyArrow is an extra, because most workers never write a file of history. It is imported here and nowhere else
in the recorder, so one error says that it is missing, and how to install it.

    events/dt=2026-11-15/hour=07/ev-<recorder>-<boot>-<n>.parquet   as recorded
    compacted/dt=…/hour=…/…parquet, compacted/dt=…/…parquet         hours and days of them, by bucket
    compacted/_manifest/000001.json                                 which of them replace which
    quarantine/                                                     what could not be read; never deleted
    tables/                                                         what is built from the events
    _recorder/<name>.json, <name>.lock                              each recorder's progress, and its lock

Where the files lie, a folder or S3, is known by `umbel.stores`; here they are named from the lake's root. A
file appears whole or not at all. Names are never used again. The parts dt and hour are the time of recording,
by the recorder's clock, so an hour that has passed gets no more files. The same event may be in several
files; its `digest` shows that.
"""

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import msgspec

from umbel.errors import ConfigurationError, LakeBusy, LakeError
from umbel.events.tables import COLUMNS, LAKE_VERSION, Column
from umbel.stores.interface import HeldByAnother, Store, Where, manifest_name, manifest_numbers
from umbel.stores.local import store_at
from umbel.wire.values import UNREADABLE

# ---- lake ------------------------------------------------------------------------------------------
#
# Immutable files of recorded events.

MANIFESTS_KEPT = 5
SUFFIX = ".parquet"
EVENTS, COMPACTED, QUARANTINE, RECORDERS = "events", "compacted", "quarantine", "_recorder"


class Compacted(msgspec.Struct, frozen=True):
    """The manifest of compacted files; the newest one counts. `rows`: the number of rows of each file."""

    files: list[str] = []
    replaces: list[str] = []
    replaced_at: dict[str, float] = {}
    rows: dict[str, int] = {}


@dataclass(frozen=True, slots=True)
class LakeSize:
    """How many files a lake has, and their size."""

    files: int
    size_bytes: int


class Lake:
    """A lake in a folder or in S3: its files, manifests, quarantine and locks."""

    def __init__(self, where: Where | Store, *, mode: int | None = None) -> None:
        """`mode`: permission bits that a root folder gets; None leaves them unchanged."""
        self.store = store_at(where, mode=mode)

    # -- what is there ---------------------------------------------------------------------------

    def event_files(self) -> list[str]:
        """The files that hold the events now, each event at least once; without the quarantine."""
        compacted = self.read_compacted()
        replaced = set(compacted.replaces)
        raw = [name for name in self.raw_files() if name not in replaced]
        return sorted([*raw, *self.existing(compacted.files)])

    def raw_files(self) -> list[str]:
        """Files as recorders wrote them, also those that compacted files replace."""
        return [name for name in self.store.names(EVENTS) if _is_raw(name)]

    def existing(self, files: list[str]) -> list[str]:
        """Those of the given compacted files that exist."""
        there = set(self.store.names(COMPACTED)) if files else set()
        return [name for name in files if name in there]

    def read_compacted(self) -> Compacted:
        """The newest manifest of compacted files; an empty one where there is none. LakeError if it cannot be
        read.
        """
        numbers = manifest_numbers(self.store, COMPACTED)
        if not numbers:
            return Compacted()
        found: Compacted = self._read_json(_manifest(numbers[-1]), Compacted)
        return found

    def size(self) -> LakeSize:
        """The number and size of the files that hold the events now."""
        sizes = self.store.sizes(self.event_files())
        return LakeSize(len(sizes), sum(sizes))

    # -- what is written -------------------------------------------------------------------------

    def publish_compacted(self, compacted: Compacted) -> None:
        """Write the next manifest of compacted files; from then on readers use it."""
        numbers = manifest_numbers(self.store, COMPACTED)
        self.store.put(_manifest(numbers[-1] + 1 if numbers else 1), msgspec.json.encode(compacted))
        self.store.delete(map(_manifest, numbers[:-MANIFESTS_KEPT]))

    def set_aside(self, name: str) -> str:
        """Move a file that cannot be read to the quarantine, under a name that shows where it was."""
        target = f"{QUARANTINE}/{name.replace('/', '__')}"
        self.store.move(name, target)
        return target

    # -- locks -------------------------------------------------------------------------------------

    @contextmanager
    def locked(self, name: str, what: str) -> Iterator[None]:
        """Hold the lock of this name; LakeBusy with its holder if another process has it."""
        try:
            with self.store.held(lock_of(name), f"pid {os.getpid()}"):
                yield
        except HeldByAnother as held:
            raise LakeBusy(
                f"{what} is already using {self.store.where} ({held}); stop it, or use another name or lake"
            ) from None

    def _read_json(self, name: str, wanted: type[Any]) -> Any:
        try:
            return msgspec.json.decode(self.store.read(name), type=wanted)
        except (OSError, *UNREADABLE) as error:
            raise LakeError(
                f"cannot read {self.store.where}/{name}: {error}; restore the file, or move it away"
            ) from None


@asynccontextmanager
async def entered(
    lock: AbstractContextManager[None], in_thread: Callable[..., Awaitable[object]]
) -> AsyncIterator[None]:
    """Acquire and release a lock in a thread: both may take as long as the store takes to answer."""
    await in_thread(lock.__enter__)
    try:
        yield
    finally:
        await in_thread(lock.__exit__, None, None, None)


def hour_folder(at: float) -> str:
    """The folder of files that were recorded in the hour of `at`."""
    when = datetime.fromtimestamp(at, UTC)
    return f"dt={when:%Y-%m-%d}/hour={when:%H}"


def lock_of(name: str) -> str:
    """The name of a lock's file."""
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


# ---- arrow -----------------------------------------------------------------------------------------
#
# The library that reads and writes Parquet, and the lake's schema in its words.
#
# PyArrow is an extra, because most workers never write a file of history. It is asked for here and nowhere
# else, so that one error says that it is missing, and how to get it.

VERSION_KEY = b"umbel.lake_version"


@cache
def arrow() -> Any:
    """The module `pyarrow`."""
    return _imported("pyarrow")


@cache
def parquet() -> Any:
    """The module `pyarrow.parquet`."""
    arrow()
    return _imported("pyarrow.parquet")


@cache
def compute() -> Any:
    """The module `pyarrow.compute`."""
    arrow()
    return _imported("pyarrow.compute")


@cache
def event_schema() -> Any:
    """One field for each of COLUMNS, in their order; all may be null."""
    fields = [arrow().field(column.name, arrow_type(column)) for column in COLUMNS]
    return arrow().schema(fields, metadata={VERSION_KEY: str(LAKE_VERSION).encode()})


_REPEATED = (
    *("type", "slot", "hostname", "name", "queue", "exchange", "routing_key", "source"),
    *("sw_ident", "sw_ver", "sw_sys", "topic", "phase", "winner", "outcome", "policy"),
)
"""Text columns with repeating values, which a dictionary makes smaller."""


def event_writer(sink: Any) -> Any:
    """A Parquet writer with the settings of every file of events."""
    from umbel.fold.columns import by_difference  # with Arrow

    schema = event_schema()
    return parquet().ParquetWriter(
        sink,
        schema,
        compression="zstd",
        compression_level=1,
        use_dictionary=list(_REPEATED),
        column_encoding=by_difference(schema),
    )


def arrow_type(column: Column) -> Any:
    """The Arrow type of a column of the lake."""
    library = arrow()
    match column.kind:
        case "text" | "json":
            return library.string()
        case "int":
            return library.int64()
        case "float":
            return library.float64()
        case "bool":
            return library.bool_()
        case "instant":
            return library.timestamp("us", tz="UTC")


def can_record() -> bool:
    """Whether PyArrow, which writes history, is installed. It is not imported for that."""
    return find_spec("pyarrow") is not None


def require_arrow() -> None:
    """Raise ConfigurationError if PyArrow is missing; for a process that starts another one that uses it."""
    if not can_record():
        arrow()


def _imported(name: str) -> ModuleType:
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigurationError(
            f"history needs PyArrow, which cannot be imported ({error}): pip install 'umbel[history]'"
        ) from None
