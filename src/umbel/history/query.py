"""Query: SQL over the published tables, in this process, without a JVM.

DuckDB reads the Parquet files that the manifest names, each table as a view, and has the views that are
computed from them (`views/`). What is asked comes from people, so it is confined: one statement that reads,
no other file, no network, no extension, no setting changed, so much memory, so many rows, bytes and seconds.
Sorting what does not fit into memory uses a separate folder, which is bounded and removed afterwards.
"""

import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from umbel.errors import BadQuery, ConfigurationError, HistoryError, SlowQuery
from umbel.events.tables import TABLES, Table, TableColumn
from umbel.history.scanning import as_pattern, paths_of, scanned
from umbel.history.spelling import quoted_name, text_literal
from umbel.history.tables import Build, newest_build, newest_number
from umbel.history.views import VIEWS
from umbel.history.views.view import ANY_TASKS, ANY_TIME
from umbel.history.wanted import Wanted
from umbel.stores.interface import Store, Where
from umbel.stores.opening import store_at
from umbel.stores.refusals import unavailable

if TYPE_CHECKING:
    import duckdb

ROWS_MAX = 1_000_000
BYTES_MAX = 512 * 1024 * 1024  # of what is fetched
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
    """`more`: there were rows beyond the limit."""

    columns: tuple[str, ...]
    types: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    more: bool

    def dicts(self) -> list[dict[str, Any]]:
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


class Unreadable(HistoryError):
    """A file is missing or torn, which is no fault of the query."""

    def __init__(self, build: Build, error: Exception) -> None:
        super().__init__(
            f"build {build.number} of the lake {build.store.where!r} cannot be read: {error};"
            " rebuild it with `umbel history build`"
        )


@dataclass(frozen=True, slots=True)
class _Limit:
    """For all that is asked of one build together; `since` is of the monotonic clock."""

    seconds: float
    since: float

    def left_s(self) -> float:
        return self.since + self.seconds - monotonic()


class _Alarm(threading.Timer):
    """Rings until it is cancelled: DuckDB forgets an interruption that comes before the query begins."""

    def run(self) -> None:
        while not self.finished.wait(self.interval):
            self.function()
            self.interval = ALARM_AGAIN_S


class Tables:
    """The tables of one build, open for reading, as far as they are wanted."""

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
        """Run one query; BadQuery when it is none, is wrong, takes too long or answers too much."""
        import duckdb

        limit_s, left_s = min(timeout_s, self._within.seconds), min(timeout_s, self._within.left_s())
        if left_s <= 0:
            raise SlowQuery(f"the limit of {limit_s:g} s passed before this query could start; ask for less")
        alarm = _Alarm(left_s, self._connection.interrupt)
        alarm.daemon = True
        alarm.start()
        try:
            self._refuse_changes(sql)
            result = self._connection.execute(sql, parameters or None)
            described = result.description or []
            rows = _fetched(result, limit + 1)
        except duckdb.InterruptException:
            raise SlowQuery(f"the query took longer than {limit_s:g} s; narrow it") from None
        except duckdb.OutOfMemoryException:
            raise BadQuery(
                f"the query needs more than {MEMORY_MAX} of memory or {SPILL_MAX} of disk; ask for less: "
                "a shorter time, one task or queue, fewer columns"
            ) from None
        except duckdb.Error as error:
            _raise_unavailable(self.build, error)
            if isinstance(error, duckdb.IOException) or not self.build.is_there():
                raise Unreadable(self.build, error) from None
            raise BadQuery(_problem(sql, error)) from None
        finally:
            alarm.cancel()
        names = tuple(str(one[0]) for one in described)
        return Answer(names, tuple(str(one[1]) for one in described), rows[:limit], len(rows) > limit)

    def rows(
        self, sql: str, parameters: Sequence[Any] | dict[str, Any] = (), *, timeout_s: float = TIMEOUT_S
    ) -> list[dict[str, Any]]:
        return self.ask(sql, parameters, timeout_s=timeout_s).dicts()

    def _refuse_changes(self, sql: str) -> None:
        import duckdb

        statements = self._connection.extract_statements(sql)
        if len(statements) != 1:
            raise BadQuery(f"got {len(statements)} queries; give one at a time")
        if statements[0].type != duckdb.StatementType.SELECT:  # EXPLAIN ANALYZE does what it explains
            kind = str(statements[0].type).rpartition(".")[2]
            raise BadQuery(f"history is read-only and {kind} is refused; use SELECT")


def read(
    lake: Where, work: Callable[[Tables], WorkT], *, timeout_s: float = inf, wanted: Wanted | None = None
) -> WorkT:
    """Do all of the work on the newest build, within `timeout_s`; on a part of it, where that is `wanted`.

    During a read, new builds may remove the files that are read. Then the work is
    done again, once, on what is the newest by now.
    """
    store = store_at(lake)
    build, within = newest_build(store), _Limit(timeout_s, monotonic())
    try:
        with _opened(build, within, wanted or Wanted()) as tables:
            return work(tables)
    except Unreadable:
        if newest_number(store) == build.number:
            raise
    with _opened(newest_build(store), within, wanted or Wanted()) as tables:
        return work(tables)


def require_duckdb() -> None:
    try:
        import duckdb  # noqa: F401
    except ImportError:
        raise ConfigurationError(
            "reading history needs DuckDB, which is not installed; run: pip install 'umbel[history]'"
        ) from None


def _fetched(result: "duckdb.DuckDBPyConnection", limit: int) -> list[tuple[Any, ...]]:
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
    """About how many bytes a value has."""
    match value:
        case str() | bytes():
            return len(value)
        case list() | tuple():
            return 8 + sum(map(_size, value))
        case dict():
            return 8 + sum(_size(key) + _size(one) for key, one in value.items())
        case _:
            return 8


def _problem(sql: str, error: Exception) -> str:
    """What is wrong with a query and where, in one line."""
    _, brace, told = str(error).partition("{")
    try:
        facts = msgspec.json.decode(brace + told, type=dict[str, str])
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
                raise Unreadable(build, error) from None
            _confine(connection, build)
            yield Tables(build, connection, within, wanted)
        finally:
            connection.close()


def _raise_unavailable(build: Build, error: Exception) -> None:
    """Where it is the store that does not answer, another build would not be read either."""
    if (down := unavailable(error)) is not None:
        raise HistoryError(f"the lake {build.store.where} cannot be read: {down}") from None


def make_views(connection: "duckdb.DuckDBPyConnection", build: Build, wanted: Wanted) -> None:
    """The tables, as far as they are wanted, and the views of them."""
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
    return f"create view {quoted_name(name)} as {select}" + (f" where {condition}" if condition else "")


def _select(connection: "duckdb.DuckDBPyConnection", table: Table, store: Store, files: Sequence[str]) -> str:
    """All columns of the table in their order; null where the build that wrote it did not have one.

    One that has another name by now is found under the one that it had.
    """
    source = scanned(connection, f"files of {table.name}", store, files) if files else ""
    described = connection.execute(f"describe select * from {source}").fetchall() if files else []
    found = {row[0] for row in described}
    chosen = [_column(column, found) for column in table.columns]
    inner = f"select {', '.join(chosen)}" + (f" from {source}" if files else " where false")
    return f"select * from ({inner})"


def _column(column: TableColumn, found: Collection[str]) -> str:
    if column.name in found:
        return quoted_name(column.name)
    value = quoted_name(column.was) if column.was in found else f"null::{_TYPES[column.kind]}"
    return f"{value} as {quoted_name(column.name)}"


def _confine(connection: "duckdb.DuckDBPyConnection", build: Build) -> None:
    paths = [path for files in build.files.values() for path in paths_of(build.store, files)]
    allowed = ", ".join(map(text_literal, sorted({*map(str, paths), *map(as_pattern, paths)})))
    connection.execute("set TimeZone='UTC'")
    connection.execute(f"set allowed_paths=[{allowed}]")
    connection.execute("set enable_external_access=false")
    connection.execute("set errors_as_json=true")  # with the place of what is wrong
    connection.execute("set lock_configuration=true")


_TYPES = {
    "text": "varchar",
    "json": "varchar",
    "int": "bigint",
    "float": "double",
    "bool": "boolean",
    "instant": "timestamptz",
}
