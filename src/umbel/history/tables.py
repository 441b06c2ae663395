"""Tables: find the current build of the history, and describe its files and filters to DuckDB.

A build writes its files first and its manifest last. Readers take the newest manifest and open only the
files that it names, so they never see an incomplete build. The files of a build never change. They are
deleted some builds later; a reader that is too slow opens the newest build again (`query.read`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import msgspec

from umbel.errors import HistoryError, NothingBuilt
from umbel.events.tables import LAKE_VERSION
from umbel.fold import TABLES
from umbel.stores.interface import Store, Where, manifest_name, manifest_numbers
from umbel.stores.local import store_at
from umbel.wire.values import UNREADABLE

if TYPE_CHECKING:
    import duckdb


# ---- tables ----------------------------------------------------------------------------------------

MANIFEST_BYTES_MAX = 64_000_000


@dataclass(frozen=True)
class Build:
    """A published build. `facts` contains the other fields of its manifest: counts and the time of the
    build.
    """

    number: int
    store: Store
    files: Mapping[str, tuple[str, ...]]
    facts: Mapping[str, Any]

    def is_there(self) -> bool:
        """Return whether all files of the build still exist."""
        return {name for files in self.files.values() for name in files} <= {*self.store.names(TABLES)}


class Manifest(msgspec.Struct, frozen=True):
    """The fields of a manifest that readers need. Paths are relative to the folder of the tables."""

    build: str
    tables: dict[str, list[str]]
    lake_version: int = 1


def newest_build(lake: Where | Store) -> Build:
    """Return the build that was published last. Raise NothingBuilt if there is none."""
    store = store_at(lake)
    number = newest_number(store)
    if number is None:
        raise NothingBuilt(store.where)
    name = manifest_name(TABLES, number)
    path = f"{store.where}/{name}"
    try:
        text = store.read(name, at_most=MANIFEST_BYTES_MAX)
        manifest = msgspec.json.decode(text, type=Manifest)
        facts = msgspec.json.decode(text)
    except (OSError, *UNREADABLE) as error:
        raise HistoryError(
            f"the manifest {path!r} cannot be read ({error}); rebuild with `umbel history build`"
        ) from None
    if manifest.lake_version > LAKE_VERSION:
        raise HistoryError(
            f"{path!r} has version {manifest.lake_version}, but this Umbel reads up to"
            f" {LAKE_VERSION}; upgrade Umbel"
        )
    files = {name: tuple(_inside(store, file) for file in named) for name, named in manifest.tables.items()}
    return Build(number, store, files, {name: value for name, value in facts.items() if name != "tables"})


def newest_number(lake: Where | Store) -> int | None:
    """Return the number of the newest manifest, or None if there is none."""
    store = store_at(lake)
    try:
        return max(manifest_numbers(store, TABLES), default=None)
    except OSError as error:
        raise HistoryError(f"the lake {store.where} cannot be read: {error}") from None


def _inside(store: Store, name: str) -> str:
    """Return the path of a file that a manifest names. Raise HistoryError if it is outside the folder of the
    tables: a manifest may come from another machine and is not trusted.
    """
    folder, path = store.path(TABLES), store.path(f"{TABLES}/{name}")
    is_inside = ".." not in PurePosixPath(name).parts and not name.startswith("/")
    if folder is not None and path is not None:  # a symbolic link may point outside
        is_inside &= path.resolve().is_relative_to(folder.resolve())
    if not is_inside:
        raise HistoryError(
            f"a manifest in {store.where!r} names {name!r} outside it; rebuild with `umbel history build`"
        )
    return f"{TABLES}/{name}"


# ---- spelling --------------------------------------------------------------------------------------


def text_literal(value: str) -> str:
    """Return a text as an SQL literal, for places where SQL permits no parameter."""
    return "'" + value.replace("'", "''") + "'"


def quoted_name(value: str) -> str:
    """Return a name as a quoted SQL identifier."""
    return '"' + value.replace('"', '""') + '"'


def percentiles(column: str, name: str, percents: Sequence[int], *, where: str = "") -> str:
    """Return SQL for exact percentiles of a column; `name` contains `{}` for the percent.

    One call computes all percentiles of the column, because each call of the function stores all values in
    memory.
    """
    shares = [percent / 100 for percent in percents]
    listed = f"quantile_cont({column}, {shares})" + (f" filter ({where})" if where else "")
    return ", ".join(
        f"({listed})[{place}] as {name.format(percent)}" for place, percent in enumerate(percents, 1)
    )


# ---- scanning --------------------------------------------------------------------------------------


def scanned(
    connection: "duckdb.DuckDBPyConnection",
    name: str,
    store: Store,
    files: Sequence[str],
    schema: Callable[[], Any] | None = None,
) -> str:
    """Return an SQL expression for the rows of these files, to be used after `from`.

    DuckDB opens files of a folder itself. Arrow reads files in S3, with the columns and conditions of the
    query: DuckDB would have to download an extension for S3. `name` must be unique in this connection.
    `schema` returns the Arrow schema of files that may have different columns.
    """
    dataset = store.dataset(files, schema)
    if dataset is not None:
        connection.register(name, dataset)
        return quoted_name(name)
    names = ", ".join(text_literal(as_pattern(path)) for path in paths_of(store, files))
    return f"read_parquet([{names}], union_by_name=true, hive_partitioning=false)"


def paths_of(store: Store, files: Sequence[str]) -> list[Path]:
    """Return the local paths of these files; empty for S3."""
    return [path for name in files if (path := store.path(name)) is not None]


def as_pattern(path: Path) -> str:
    """Return a pattern that matches only this file. DuckDB interprets file names as patterns."""
    return "".join(f"[{sign}]" if sign in "*?[" else sign for sign in str(path))


# ---- wanted ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wanted:
    """A filter on the history. `task` and `queue` are patterns such as `shop.*`; `until` is exclusive.

    `query.py` applies this filter when it opens a table, so it holds for every query. A table without the
    column of a condition is not filtered by it: a filter on tasks does not limit node sessions, elections
    and clocks.
    """

    since: datetime | None = None
    until: datetime | None = None
    task: str = ""
    queue: str = ""

    def __bool__(self) -> bool:
        return self != Wanted()

    def of(self, table: str) -> str:
        """Return the SQL condition for the rows of a table."""
        return _all([self.of_any_time(table), *self._when(table)])

    def of_any_time(self, table: str) -> str:
        """Return the SQL condition for tasks and queues, without the time range."""
        named = ((self.task, _NAMES.get(table)), (self.queue, _QUEUES.get(table)))
        return _all(
            [f"{column} glob {text_literal(wanted)}" for wanted, column in named if wanted and column]
        )

    def _when(self, table: str) -> list[str]:
        """Return the conditions for the time range."""
        first, last = _TIMES[table]
        found = [f"{last} >= {_instant(self.since)}"] if self.since else []
        return [*found, f"{first} < {_instant(self.until)}"] if self.until else found

    def said(self) -> str:
        """Return a description of the filter for people; empty if there is no filter."""
        parts = [
            f"tasks {self.task}" if self.task else "",
            f"queue {self.queue}" if self.queue else "",
            f"since {_shown(self.since)}" if self.since else "",
            f"until {_shown(self.until)}" if self.until else "",
        ]
        return ", ".join(filter(None, parts))


_NAMES = dict.fromkeys(("tasks", "attempts", "metrics", "anomalies"), "name")
_QUEUES = dict.fromkeys(("tasks", "attempts", "metrics"), "queue")
_ENDED = "coalesce(ended_at, state_at)"
_TIMES: Mapping[str, tuple[str, str]] = {
    "tasks": ("state_at", "state_at"),
    "attempts": (_ENDED, _ENDED),
    "timeline": ("recorded_at", "recorded_at"),
    "workers": ("online_at", "coalesce(ended_at, last_at)"),
    "elections": ("first_at", "coalesce(last_at, first_at)"),
    "metrics": ("minute", "minute"),
    "anomalies": ('"at"', '"at"'),
}
"""The first and last time of a row in each table. A row matches if this period overlaps the time range."""


def _all(conditions: list[str]) -> str:
    """Join conditions with `and`."""
    return " and ".join(filter(None, conditions))


def _instant(at: datetime) -> str:
    """Return a time as an SQL literal."""
    return f"timestamptz {text_literal(at.astimezone(UTC).isoformat())}"


def _shown(at: datetime) -> str:
    """Return a time in UTC for people."""
    return at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")
