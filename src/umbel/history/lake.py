"""Lake: the immutable files of recorded events, their layout, and access to PyArrow.

PyArrow is an optional dependency, because most workers never write history. The recorder imports it only in
this module, so there is one error message that explains how to install it.

    events/dt=2026-11-15/hour=07/ev-<recorder>-<boot>-<n>.parquet   recorded events
    compacted/dt=…/hour=…/…parquet, compacted/dt=…/…parquet         an hour or a day of events, by bucket
    compacted/_manifest/000001.json                                 compacted files, and those they replace
    quarantine/                                                     unreadable files and entries, kept forever
    tables/                                                         tables that are built from the events
    _recorder/<name>.json, <name>.lock                              the state and the lock of each recorder

`umbel.stores` accesses the files, in a folder or in S3; this module uses paths relative to the root of the
lake. A file appears as a whole or not at all, and a name is never reused. `dt` and `hour` are the time of
recording by the recorder's clock, so an hour that has passed gets no new files. The same event may be in
several files; its `digest` identifies duplicates.
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

MANIFESTS_KEPT = 5
SUFFIX = ".parquet"
EVENTS, COMPACTED, QUARANTINE, RECORDERS = "events", "compacted", "quarantine", "_recorder"


class Compacted(msgspec.Struct, frozen=True):
    """The manifest of compacted files; readers use the newest. `rows` is the number of rows in each file."""

    files: list[str] = []
    replaces: list[str] = []
    replaced_at: dict[str, float] = {}
    rows: dict[str, int] = {}


@dataclass(frozen=True, slots=True)
class LakeSize:
    """The number and total size of the files in a lake."""

    files: int
    size_bytes: int


class Lake:
    """A lake in a folder or in S3: its files, manifests, quarantine and locks."""

    def __init__(self, where: Where | Store, *, mode: int | None = None) -> None:
        """Open a lake. `mode` is the permission bits for the root folder; None leaves them unchanged."""
        self.store = store_at(where, mode=mode)

    # -- reading ---------------------------------------------------------------------------

    def event_files(self) -> list[str]:
        """Return the files to read: together they contain every event at least once. The quarantine is
        excluded.
        """
        compacted = self.read_compacted()
        replaced = set(compacted.replaces)
        raw = [name for name in self.raw_files() if name not in replaced]
        return sorted([*raw, *self.existing(compacted.files)])

    def raw_files(self) -> list[str]:
        """Return the files that recorders wrote, including those that compacted files replace."""
        return [name for name in self.store.names(EVENTS) if _is_raw(name)]

    def existing(self, files: list[str]) -> list[str]:
        """Return the compacted files among these that exist."""
        there = set(self.store.names(COMPACTED)) if files else set()
        return [name for name in files if name in there]

    def read_compacted(self) -> Compacted:
        """Return the newest manifest of compacted files, or an empty one. Raise LakeError if it is
        unreadable.
        """
        numbers = manifest_numbers(self.store, COMPACTED)
        if not numbers:
            return Compacted()
        found: Compacted = self._read_json(_manifest(numbers[-1]), Compacted)
        return found

    def size(self) -> LakeSize:
        """Return the number and total size of the files that `event_files` returns."""
        sizes = self.store.sizes(self.event_files())
        return LakeSize(len(sizes), sum(sizes))

    # -- writing -------------------------------------------------------------------------

    def publish_compacted(self, compacted: Compacted) -> None:
        """Write the next manifest of compacted files; readers use it from now on."""
        numbers = manifest_numbers(self.store, COMPACTED)
        self.store.put(_manifest(numbers[-1] + 1 if numbers else 1), msgspec.json.encode(compacted))
        self.store.delete(map(_manifest, numbers[:-MANIFESTS_KEPT]))

    def set_aside(self, name: str) -> str:
        """Move an unreadable file to the quarantine, under a name that shows its former path."""
        target = f"{QUARANTINE}/{name.replace('/', '__')}"
        self.store.move(name, target)
        return target

    # -- locks -------------------------------------------------------------------------------------

    @contextmanager
    def locked(self, name: str, what: str) -> Iterator[None]:
        """Hold the lock of this name. Raise LakeBusy if another process holds it."""
        try:
            with self.store.held(lock_of(name), f"pid {os.getpid()}"):
                yield
        except HeldByAnother as held:
            raise LakeBusy(
                f"{what} is already using {self.store.where} ({held}); stop it, or use another name or lake"
            ) from None

    def _read_json(self, name: str, wanted: type[Any]) -> Any:
        """Decode a JSON file of the lake. Raise LakeError if it is unreadable."""
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
    """Hold a lock that is acquired and released in a thread, because the store may answer slowly."""
    await in_thread(lock.__enter__)
    try:
        yield
    finally:
        await in_thread(lock.__exit__, None, None, None)


def hour_folder(at: float) -> str:
    """Return the folder of the files that were recorded in the hour of `at`."""
    when = datetime.fromtimestamp(at, UTC)
    return f"dt={when:%Y-%m-%d}/hour={when:%H}"


def lock_of(name: str) -> str:
    """Return the path of a lock file."""
    return f"{RECORDERS}/{name}.lock"


def _manifest(number: int) -> str:
    """Return the path of a manifest of compacted files."""
    return manifest_name(COMPACTED, number)


def _is_raw(name: str) -> bool:
    """Return whether a path has the form of a file that a recorder has written."""
    parts = name.split("/")
    return (
        len(parts) == 4
        and parts[1].startswith("dt=")
        and parts[2].startswith("hour=")
        and name.endswith(SUFFIX)
    )


# ---- arrow -----------------------------------------------------------------------------------------

VERSION_KEY = b"umbel.lake_version"


@cache
def arrow() -> Any:
    """Return the module `pyarrow`. Raise ConfigurationError if it is not installed."""
    return _imported("pyarrow")


@cache
def parquet() -> Any:
    """Return the module `pyarrow.parquet`."""
    arrow()
    return _imported("pyarrow.parquet")


@cache
def compute() -> Any:
    """Return the module `pyarrow.compute`."""
    arrow()
    return _imported("pyarrow.compute")


@cache
def event_schema() -> Any:
    """Return the Arrow schema of events: a nullable field for each of COLUMNS, in their order."""
    fields = [arrow().field(column.name, arrow_type(column)) for column in COLUMNS]
    return arrow().schema(fields, metadata={VERSION_KEY: str(LAKE_VERSION).encode()})


_REPEATED = (
    *("type", "slot", "hostname", "name", "queue", "exchange", "routing_key", "source"),
    *("sw_ident", "sw_ver", "sw_sys", "topic", "phase", "winner", "outcome", "policy"),
)
"""Text columns with repeated values, which dictionary encoding makes smaller."""


def event_writer(sink: Any) -> Any:
    """Return a Parquet writer with the settings that all files of events share."""
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
    """Return the Arrow type of a column of the lake."""
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
    """Return whether PyArrow is installed, without importing it."""
    return find_spec("pyarrow") is not None


def require_arrow() -> None:
    """Raise ConfigurationError if PyArrow is missing. For a process that starts another process that needs
    it.
    """
    if not can_record():
        arrow()


def _imported(name: str) -> ModuleType:
    """Import a module of PyArrow, with an error that explains how to install it."""
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigurationError(
            f"history needs PyArrow, which cannot be imported ({error}): pip install 'umbel[history]'"
        ) from None
