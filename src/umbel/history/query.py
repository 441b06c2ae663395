"""Query: run SQL over the published tables with DuckDB, and export rows as CSV, Parquet and JSON.

It can also write the tables and views of a build as a DuckDB file, for dbt, notebooks and other tools.
"""

import csv
import io
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from importlib.util import find_spec
from itertools import chain
from math import inf, isfinite
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from umbel.errors import BadQuery, ConfigurationError, HistoryError, SlowQuery
from umbel.events.tables import TABLES, Table, TableColumn
from umbel.history.lake import arrow, parquet
from umbel.history.tables import (
    Build,
    Wanted,
    as_pattern,
    newest_build,
    newest_number,
    paths_of,
    quoted_name,
    scanned,
    text_literal,
)
from umbel.history.views import ANY_TASKS, ANY_TIME, VIEWS
from umbel.stores.interface import Store, Where, unavailable
from umbel.stores.local import store_at

if TYPE_CHECKING:
    import duckdb


# ---- query -----------------------------------------------------------------------------------------

ROWS_MAX = 1_000_000
BYTES_MAX = 512 * 1024 * 1024  # of the fetched rows
FETCHED_AT_ONCE = 1000  # rows
TIMEOUT_S = 60.0
ALARM_AGAIN_S = 0.05
MEMORY_MAX = "1 GB"
THREADS = "2"
SPILL_MAX = "16 GB"
_RENAMED = {column.was: column.name for table in TABLES.values() for column in table.columns if column.was}
WorkT = TypeVar("WorkT")


@dataclass(frozen=True)
class Answer:
    """The rows of a query. `more` is true if there are rows beyond the limit."""

    columns: tuple[str, ...]
    types: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    more: bool

    def dicts(self) -> list[dict[str, Any]]:
        """Return each row as a dict by column."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


class UnreadableBuild(HistoryError):
    """Raised if a file of the build is missing or damaged, in contrast to a wrong query."""

    def __init__(self, build: Build, error: Exception) -> None:
        super().__init__(
            f"build {build.number} of the lake {build.store.where!r} cannot be read: {error};"
            " rebuild it with `umbel history build`"
        )


@dataclass(frozen=True, slots=True)
class _Limit:
    """The time limit for all queries of one `read`. `since` is on the monotonic clock."""

    seconds: float
    since: float

    def left_s(self) -> float:
        """Return the seconds that remain."""
        return self.since + self.seconds - monotonic()


class _Alarm(threading.Timer):
    """Interrupts repeatedly, because DuckDB ignores an interrupt that arrives before the query starts."""

    def run(self) -> None:
        while not self.finished.wait(self.interval):
            self.function()
            self.interval = ALARM_AGAIN_S


class Tables:
    """The tables of one build, open for reading, with a filter.

    Each table is a DuckDB view of the Parquet files that the manifest names; further views are computed from
    the tables (`views.py`). Users write queries, so queries are restricted: a single SELECT, no other files,
    no network, no extensions, no changed settings, and limits for memory, rows, bytes and seconds. Data that
    does not fit into memory is sorted in a temporary folder of limited size.
    """

    def __init__(
        self, build: Build, connection: "duckdb.DuckDBPyConnection", within: _Limit, wanted: Wanted
    ) -> None:
        self.build = build
        self.wanted = wanted
        self._connection = connection
        self._within = within

    def ask(
        self,
        sql: str,
        parameters: Sequence[Any] | dict[str, Any] = (),
        *,
        limit: int = ROWS_MAX,
        timeout_s: float = TIMEOUT_S,
    ) -> Answer:
        """Run one query. Raise BadQuery if it is wrong or its result is too large, SlowQuery if it takes too
        long.
        """
        import duckdb

        limit_s, left_s = min(timeout_s, self._within.seconds), min(timeout_s, self._within.left_s())
        if left_s <= 0:
            raise SlowQuery(
                f"the limit of {limit_s:g} s passed before this query could start; run fewer queries"
            )
        alarm = _Alarm(left_s, self._connection.interrupt)
        alarm.daemon = True
        alarm.start()
        try:
            self._refuse_changes(sql)
            result = self._connection.execute(sql, parameters or None)
            described = result.description or []
            rows = _fetched(result, limit + 1)
        except duckdb.InterruptException:
            raise SlowQuery(
                f"the query took longer than {limit_s:g} s; select a shorter time or fewer rows"
            ) from None
        except duckdb.OutOfMemoryException:
            raise BadQuery(
                f"the query needs more than {MEMORY_MAX} of memory or {SPILL_MAX} of disk; select less: "
                "a shorter time, one task or queue, fewer columns"
            ) from None
        except duckdb.Error as error:
            _raise_unavailable(self.build, error)
            if isinstance(error, duckdb.IOException) or not self.build.is_there():
                raise UnreadableBuild(self.build, error) from None
            raise BadQuery(_problem(sql, error)) from None
        finally:
            alarm.cancel()
        names = tuple(str(column[0]) for column in described)
        return Answer(names, tuple(str(column[1]) for column in described), rows[:limit], len(rows) > limit)

    def rows(
        self, sql: str, parameters: Sequence[Any] | dict[str, Any] = (), *, timeout_s: float = TIMEOUT_S
    ) -> list[dict[str, Any]]:
        """Run one query, and return its rows as dicts. Raise the same errors as `ask`."""
        return self.ask(sql, parameters, timeout_s=timeout_s).dicts()

    def _refuse_changes(self, sql: str) -> None:
        """Raise BadQuery unless the text is a single SELECT statement."""
        import duckdb

        statements = self._connection.extract_statements(sql)
        if len(statements) != 1:
            raise BadQuery(f"got {len(statements)} queries; give one at a time")
        if statements[0].type != duckdb.StatementType.SELECT:  # EXPLAIN ANALYZE runs the statement
            kind = str(statements[0].type).rpartition(".")[2]
            raise BadQuery(f"history is read-only and {kind} is refused; use SELECT")


def read(
    lake: Where, work: Callable[[Tables], WorkT], *, timeout_s: float = inf, wanted: Wanted | None = None
) -> WorkT:
    """Run `work` on the newest build with the filter `wanted`, within `timeout_s`, and return its result.

    New builds may delete the files while `work` reads them. In this case, `work` is repeated once on the
    build that is then the newest.
    """
    store = store_at(lake)
    build, within = newest_build(store), _Limit(timeout_s, monotonic())
    try:
        with _opened(build, within, wanted or Wanted()) as tables:
            return work(tables)
    except UnreadableBuild:
        if newest_number(store) == build.number:
            raise
    with _opened(newest_build(store), within, wanted or Wanted()) as tables:
        return work(tables)


def require_duckdb() -> None:
    """Raise ConfigurationError if DuckDB is not installed. It is not imported, because another process may
    run the query.
    """
    if find_spec("duckdb") is None:
        raise ConfigurationError(
            "reading history needs DuckDB, which is not installed; run: pip install 'umbel[history]'"
        )


def _fetched(result: "duckdb.DuckDBPyConnection", limit: int) -> list[tuple[Any, ...]]:
    """Fetch rows up to the limit of rows. Raise BadQuery above the limit of bytes."""
    rows: list[tuple[Any, ...]] = []
    size = 0
    while len(rows) < limit:
        part = result.fetchmany(min(FETCHED_AT_ONCE, limit - len(rows)))
        if not part:
            break
        size += sum(map(_size, chain.from_iterable(part)))
        if size > BYTES_MAX:
            raise BadQuery(f"the answer has more than {BYTES_MAX:,} bytes; select fewer columns or rows")
        rows += part
    return rows


def _size(value: Any) -> int:
    """Return the approximate size of a value in bytes."""
    match value:
        case str() | bytes():
            return len(value)
        case list() | tuple():
            return 8 + sum(map(_size, value))
        case dict():
            return 8 + sum(_size(key) + _size(part) for key, part in value.items())
        case _:
            return 8


def _problem(sql: str, error: Exception) -> str:
    """Return the problem of a query and its position, in one line."""
    _, brace, details = str(error).partition("{")
    try:
        facts = msgspec.json.decode(brace + details, type=dict[str, str])
    except msgspec.MsgspecError:
        return str(error).strip()
    if facts.get("type") == "Table" and facts.get("error_subtype") == "MISSING_ENTRY":
        problem = f"unknown table {facts.get('name', '')!r}; the tables are {', '.join((*TABLES, *VIEWS))}"
    elif facts.get("error_subtype") == "COLUMN_NOT_FOUND" and (now := _RENAMED.get(facts.get("name", ""))):
        problem = f"unknown column {facts['name']!r}; it is called {now!r}"
    else:
        problem = " ".join(facts.get("exception_message", str(error)).split())
    if not facts.get("position", "").isdigit():
        return problem
    before = sql.encode()[: int(facts["position"])].decode(errors="replace")
    line, column = before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1
    return f"line {line}, column {column}: {problem}"


@contextmanager
def _opened(build: Build, within: _Limit, wanted: Wanted) -> Iterator[Tables]:
    """Open an in-memory database with views of the build's files.

    The views are created before the database is confined, because afterwards DuckDB cannot open other files.
    """
    import duckdb

    with tempfile.TemporaryDirectory(prefix="umbel-history-") as spill:
        connection = duckdb.connect(
            ":memory:",
            config={
                "autoinstall_known_extensions": "false",
                "autoload_known_extensions": "false",
                "python_enable_replacements": "false",
                "memory_limit": MEMORY_MAX,
                "threads": THREADS,
                "temp_directory": spill,
                "max_temp_directory_size": SPILL_MAX,
            },
        )
        try:
            try:
                make_views(connection, build, wanted)
            except (duckdb.Error, OSError) as error:
                _raise_unavailable(build, error)
                raise UnreadableBuild(build, error) from None
            _confine(connection, build)
            yield Tables(build, connection, within, wanted)
        finally:
            connection.close()


def _raise_unavailable(build: Build, error: Exception) -> None:
    """Raise HistoryError if the store is unavailable, because reading another build would fail too."""
    if (down := unavailable(error)) is not None:
        raise HistoryError(f"the lake {build.store.where} cannot be read: {down}") from None


def make_views(connection: "duckdb.DuckDBPyConnection", build: Build, wanted: Wanted) -> None:
    """Create the tables with the filter, and the views on them."""
    for table in TABLES.values():
        select = _select(connection, table, build.store, build.files.get(table.name, ()))
        connection.execute(_view(table.name, select, wanted.of(table.name)))
        if table.name == "tasks":
            connection.execute(_view(ANY_TASKS, select, ""))
        if table.name == "attempts":
            connection.execute(_view(ANY_TIME, select, wanted.of_any_time(table.name)))
    for statement in chain.from_iterable(view.statements for view in VIEWS.values()):
        connection.execute(statement)


def _view(name: str, select: str, condition: str) -> str:
    """Return the SQL statement for a view with an optional condition."""
    return f"create view {quoted_name(name)} as {select}" + (f" where {condition}" if condition else "")


def _select(connection: "duckdb.DuckDBPyConnection", table: Table, store: Store, files: Sequence[str]) -> str:
    """Return a query for all columns of the table in their order. Columns that the build does not have are
    null.

    A renamed column is read under its former name from files of earlier builds.
    """
    source = scanned(connection, f"files of {table.name}", store, files) if files else ""
    described = connection.execute(f"describe select * from {source}").fetchall() if files else []
    found = {row[0] for row in described}
    chosen = [_column(column, found) for column in table.columns]
    inner = f"select {', '.join(chosen)}" + (f" from {source}" if files else " where false")
    return f"select * from ({inner})"


def _column(column: TableColumn, found: Collection[str]) -> str:
    """Return the SQL expression for a column of a table; null if the build does not have it."""
    if column.name in found:
        return quoted_name(column.name)
    value = quoted_name(column.was) if column.was in found else f"null::{_TYPES[column.kind]}"
    return f"{value} as {quoted_name(column.name)}"


def _confine(connection: "duckdb.DuckDBPyConnection", build: Build) -> None:
    """Restrict the database to the files of the build, and lock its configuration.

    This is what makes it safe to run queries of users: they cannot read other files, load extensions or lift
    the limits.
    """
    paths = [path for files in build.files.values() for path in paths_of(build.store, files)]
    allowed = ", ".join(map(text_literal, sorted({*map(str, paths), *map(as_pattern, paths)})))
    connection.execute("set TimeZone='UTC'")
    connection.execute(f"set allowed_paths=[{allowed}]")
    connection.execute("set enable_external_access=false")
    connection.execute("set errors_as_json=true")  # includes the position of the problem
    connection.execute("set lock_configuration=true")


_TYPES = {
    "text": "varchar",
    "json": "varchar",
    "int": "bigint",
    "float": "double",
    "bool": "boolean",
    "instant": "timestamptz",
}


# ---- export ----------------------------------------------------------------------------------------

CALCULATED = ("=", "+", "-", "@", "\t", "\r")


def plain(value: Any) -> Any:
    """Convert a value of DuckDB to a value that JSON supports."""

    match value:
        case datetime():
            at = value.astimezone(UTC) if value.tzinfo else value.replace(tzinfo=UTC)
            return at.isoformat(timespec="auto").replace("+00:00", "Z")
        case date():
            return value.isoformat()
        case timedelta():
            return value.total_seconds()
        case Decimal():
            return float(value)
        case float():
            return value if isfinite(value) else str(value)
        case bytes():
            return value.hex()
        case list() | tuple():
            return [plain(item) for item in value]
        case dict():
            return {str(key): plain(item) for key, item in value.items()}
        case None | bool() | int() | str():
            return value
        case _:
            return str(value)


def asked(tables: Tables, sql: str, *, limit: int, timeout_s: float) -> Answer:
    """Run one query, and return its rows with values that JSON supports."""
    found = tables.ask(sql, limit=limit, timeout_s=timeout_s)
    return replace(found, rows=[tuple(map(plain, row)) for row in found.rows])


def as_csv(answer: Answer) -> str:
    """Return the rows as CSV with a header line."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(answer.columns)
    writer.writerows([["" if value is None else plain(value) for value in row] for row in answer.rows])
    return text.getvalue()


def for_spreadsheets(answer: Answer) -> Answer:
    """Add an apostrophe to each text that a spreadsheet would interpret as a formula."""
    rows = [tuple(map(_guarded, row)) for row in answer.rows]
    return replace(answer, columns=tuple(map(_guarded, answer.columns)), rows=rows)


def _guarded(value: Any) -> Any:
    """Add an apostrophe to a text that looks like a formula."""
    return f"'{value}" if isinstance(value, str) and value.startswith(CALCULATED) else value


def as_parquet(answer: Answer) -> bytes:
    """Return the rows as a Parquet file. A repeated column name gets a number, because names in a file are
    unique.
    """
    names = [
        name if name not in answer.columns[:place] else f"{name}_{place}"
        for place, name in enumerate(answer.columns)
    ]
    columns = list(zip(*answer.rows, strict=True)) or [()] * len(names)
    table = arrow().table({name: list(column) for name, column in zip(names, columns, strict=True)})
    written = io.BytesIO()
    parquet().write_table(table, written)
    return written.getvalue()


# ---- database --------------------------------------------------------------------------------------


def write_database(lake: Where, path: Path) -> Build:
    """Write the DuckDB file atomically, and return the build that it refers to. Raise HistoryError if
    writing fails.

    The DuckDB file contains no rows, only the names of the Parquet files of each table and the queries of
    the views. These files are deleted some builds later, so users must write the DuckDB file again after
    each build.
    """
    require_duckdb()
    import duckdb

    store = store_at(lake)
    if store.path("") is None:
        raise HistoryError(
            f"a database names the files of a folder, which {store.where} is not; use `umbel history sql`, or"
            " build in a folder"
        )
    build = newest_build(store)
    try:
        with TemporaryDirectory(
            prefix=f".{path.name}.", dir=path.parent
        ) as room:  # readable only by this user
            draft = Path(room, path.name)
            with duckdb.connect(draft) as connection:
                make_views(connection, build, Wanted())
            draft.replace(path)
    except (OSError, duckdb.Error) as error:
        raise HistoryError(f"cannot write {str(path)!r}: {error}; name another file") from None
    return build
