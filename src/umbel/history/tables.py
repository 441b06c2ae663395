"""Tables: the current build of the history, how DuckDB reads its files, and which part is asked for."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import msgspec

from umbel.errors import HistoryError, NothingBuilt
from umbel.events.tables import LAKE_VERSION
from umbel.fold.names import TABLES
from umbel.stores.interface import Store, Where, manifest_name, manifest_numbers
from umbel.stores.local import store_at
from umbel.wire.values import UNREADABLE

if TYPE_CHECKING:
    import duckdb


# ---- tables ----------------------------------------------------------------------------------------
#
# Which build of the history is the current one, and which files it is made of.
#
# A build writes its files first and its manifest last: the manifest is the publication. Readers look at the
# newest manifest and read only the files it names, so they never see half a build. The files of a build
# never change. They go away some builds later; a reader that slow looks again (`query.read`).

MANIFEST_BYTES_MAX = 64_000_000


@dataclass(frozen=True)
class Build:
    """What one build published. `facts` is the rest of its manifest: counts and when it was built."""

    number: int
    store: Store
    files: Mapping[str, tuple[str, ...]]
    facts: Mapping[str, Any]

    def is_there(self) -> bool:
        """Whether all files of the build still exist."""
        return {name for files in self.files.values() for name in files} <= {*self.store.names(TABLES)}


class Manifest(msgspec.Struct, frozen=True):
    """What readers need of a manifest; the files are named from the folder of the tables."""

    build: str
    tables: dict[str, list[str]]
    lake_version: int = 1


def newest_build(lake: Where | Store) -> Build:
    """The build that was published last; NothingBuilt where there is none."""
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
    """The number of the newest manifest."""
    store = store_at(lake)
    try:
        return max(manifest_numbers(store, TABLES), default=None)
    except OSError as error:
        raise HistoryError(f"the lake {store.where} cannot be read: {error}") from None


def _inside(store: Store, name: str) -> str:
    """The path of a file that a manifest names. HistoryError if it is outside the tables' folder: a manifest
    may come from another machine.
    """
    folder, path = store.path(TABLES), store.path(f"{TABLES}/{name}")
    is_inside = ".." not in PurePosixPath(name).parts and not name.startswith("/")
    if folder is not None and path is not None:  # a link may lead elsewhere
        is_inside &= path.resolve().is_relative_to(folder.resolve())
    if not is_inside:
        raise HistoryError(
            f"a manifest in {store.where!r} names {name!r} outside it; rebuild with `umbel history build`"
        )
    return f"{TABLES}/{name}"


# ---- spelling --------------------------------------------------------------------------------------
#
# Values and names as SQL writes them, where a parameter cannot stand.


def text_literal(value: str) -> str:
    """A text as a literal of SQL."""
    return "'" + value.replace("'", "''") + "'"


def quoted_name(value: str) -> str:
    """A name as a quoted identifier of SQL."""
    return '"' + value.replace('"', '""') + '"'


def percentiles(column: str, name: str, percents: Sequence[int], *, where: str = "") -> str:
    """Exact ones, by a name with `{}` for the percent. All of a column come from one list: each call of the
    function with another share would keep all values once more."""
    shares = [percent / 100 for percent in percents]
    listed = f"quantile_cont({column}, {shares})" + (f" filter ({where})" if where else "")
    return ", ".join(
        f"({listed})[{place}] as {name.format(percent)}" for place, percent in enumerate(percents, 1)
    )


# ---- scanning --------------------------------------------------------------------------------------
#
# Files of a lake as DuckDB reads them, wherever they lie.
#
# DuckDB opens files of a folder itself. Files in S3 are read by Arrow, which gets the columns and
# conditions of a query; DuckDB's own way to S3 is an extension that it would have to download.


def scanned(
    connection: "duckdb.DuckDBPyConnection",
    name: str,
    store: Store,
    files: Sequence[str],
    schema: Callable[[], Any] | None = None,
) -> str:
    """The SQL expression to select from for the rows of these files. `name`: unique in this connection.
    `schema`: Arrow's, where the files need not have the same columns."""
    dataset = store.dataset(files, schema)
    if dataset is not None:
        connection.register(name, dataset)
        return quoted_name(name)
    names = ", ".join(text_literal(as_pattern(path)) for path in paths_of(store, files))
    return f"read_parquet([{names}], union_by_name=true, hive_partitioning=false)"


def paths_of(store: Store, files: Sequence[str]) -> list[Path]:
    """Paths of the files that DuckDB opens itself."""
    return [path for name in files if (path := store.path(name)) is not None]


def as_pattern(path: Path) -> str:
    """The pattern that matches just this file: DuckDB treats names of files as patterns."""
    return "".join(f"[{sign}]" if sign in "*?[" else sign for sign in str(path))


# ---- wanted ----------------------------------------------------------------------------------------
#
# The part of the history that is queried: a time, tasks, a queue.
#
# Each table is narrowed when it is opened (`query.py`), so that every query is about that part. A condition
# on a column that a table lacks does not narrow it: node sessions, elections and clocks are those of all
# tasks.


@dataclass(frozen=True)
class Wanted:
    """A part of the history. `task` and `queue` are patterns such as `shop.*`; `until` is exclusive."""

    since: datetime | None = None
    until: datetime | None = None
    task: str = ""
    queue: str = ""

    def __bool__(self) -> bool:
        return self != Wanted()

    def of(self, table: str) -> str:
        """A condition of SQL on the rows of a table."""
        return _all([self.of_any_time(table), *self._when(table)])

    def of_any_time(self, table: str) -> str:
        """A condition of SQL on tasks and queues only, whatever the wanted time is."""
        named = ((self.task, _NAMES.get(table)), (self.queue, _QUEUES.get(table)))
        return _all(
            [f"{column} glob {text_literal(wanted)}" for wanted, column in named if wanted and column]
        )

    def _when(self, table: str) -> list[str]:
        first, last = _TIMES[table]
        found = [f"{last} >= {_instant(self.since)}"] if self.since else []
        return [*found, f"{first} < {_instant(self.until)}"] if self.until else found

    def said(self) -> str:
        """A description for people; empty where everything is wanted."""
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
"""First and last time of a row of each table; a row is wanted if that overlaps the wanted time."""


def _all(conditions: list[str]) -> str:
    return " and ".join(filter(None, conditions))


def _instant(at: datetime) -> str:
    return f"timestamptz {text_literal(at.astimezone(UTC).isoformat())}"


def _shown(at: datetime) -> str:
    return at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")
