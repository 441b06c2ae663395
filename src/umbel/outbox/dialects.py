"""Dialects: the SQL of the outbox, for PostgreSQL and SQLite.

The order of a transaction is that of its rows' ids: each is drawn when the row is inserted, and is never
used again. Ids of different transactions say nothing about their order, and a lower id may be committed
after a higher one; so whoever reads asks for the lowest ids that are there, and remembers no place.
"""

import re

import msgspec

from umbel.errors import ConfigurationError

DEFAULT_TABLE = "umbel_outbox"
COUNT_MAX = 100_000  # a count goes no further
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}(\.[A-Za-z_][A-Za-z0-9_]{0,62})?")
_NAME_MAX = 63  # PostgreSQL cuts what is longer
_WAITING = "_waiting"


class Dialect(msgspec.Struct, frozen=True):
    name: str
    row_id: str
    blob: str
    message: str  # its bytes, whatever is in the column
    written_at: str
    age_s: str  # of what was written at `written_at`, by the database's clock
    storage: str  # how the table is kept
    chosen: str  # the condition on ids, given as one parameter
    mark: str  # of a parameter


POSTGRESQL = Dialect(
    name="postgresql",
    row_id="bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY",
    blob="bytea",
    message="message",
    written_at="timestamptz NOT NULL DEFAULT now()",
    age_s="extract(epoch FROM clock_timestamp() - min(written_at))::float8",
    # Every row is deleted soon: dead rows are cleared by their number, not by their share of a table of none.
    storage=" WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000)",
    chosen="id = ANY({mark})",
    mark="%s",
)
SQLITE = Dialect(
    name="sqlite",
    row_id="INTEGER PRIMARY KEY AUTOINCREMENT",  # without the last word SQLite uses ids again
    blob="BLOB",
    message="CAST(message AS BLOB)",  # a column holds values of any type; text need not be UTF-8
    written_at="REAL NOT NULL DEFAULT ((julianday('now') - 2440587.5) * 86400.0)",
    age_s="(julianday('now') - 2440587.5) * 86400.0 - min(written_at)",
    storage="",
    chosen="id IN (SELECT value FROM json_each({mark}))",
    mark="?",
)


def check_table(table: str) -> str:
    if not _NAME.fullmatch(table):
        raise ConfigurationError(
            f"outbox_table is {table!r}: it must be a plain name, or schema.name, of letters, digits and _"
        )
    return table


def _quoted(schema: str, name: str) -> str:
    """As SQL takes it, be it a reserved word or not."""
    return f'"{schema}"."{name}"' if schema else f'"{name}"'


class Statements:
    """The statements for one table. `mark`: how the library that runs them writes a parameter."""

    def __init__(self, dialect: Dialect, table: str = DEFAULT_TABLE, *, mark: str | None = None) -> None:
        self.dialect = dialect
        self.table = check_table(table)
        self._schema, _, self._name = table.rpartition(".")
        self._quoted = _quoted(self._schema, self._name)
        self._mark = mark or dialect.mark

    def create(self) -> tuple[str, ...]:
        """The table and its index; done again, they change nothing."""
        kind = self.dialect
        index = f"{self._name[: _NAME_MAX - len(_WAITING)]}{_WAITING}"
        # PostgreSQL puts an index where its table is; SQLite wants the schema before the index alone.
        named, on = (
            (_quoted(self._schema, index), _quoted("", self._name))
            if kind is SQLITE
            else (_quoted("", index), self._quoted)
        )
        columns = (
            f"CREATE TABLE IF NOT EXISTS {self._quoted} (\n"
            f"    id {kind.row_id},\n"
            "    task_id text NOT NULL,\n"
            f"    message {kind.blob} NOT NULL,\n"
            f"    written_at {kind.written_at},\n"
            "    problem text\n"
            f"){kind.storage}"
        )
        return columns, f"CREATE INDEX IF NOT EXISTS {named} ON {on} (id) WHERE problem IS NULL"

    def insert(self, task_id: str = "", message: str = "") -> str:
        """Of one row; with the names of the parameters where they have some."""
        values = f"{task_id or self._mark}, {message or self._mark}"
        return f"INSERT INTO {self._quoted} (task_id, message) VALUES ({values})"

    def fetch(self) -> str:
        """The next rows: at most so many (first parameter), while those before have fewer bytes (second)."""
        chosen = f"SELECT id, {self.dialect.message} AS message FROM {self._quoted} WHERE problem IS NULL"
        first = f"{chosen} ORDER BY id LIMIT {self._mark}"
        ahead = "sum(length(message)) OVER (ORDER BY id) - length(message)"
        return (
            f"SELECT id, message FROM (SELECT id, message, {ahead} AS ahead FROM ({first}) AS lowest) "
            f"AS sized WHERE ahead < {self._mark} ORDER BY id"
        )

    def remove(self) -> str:
        return f"DELETE FROM {self._quoted} WHERE {self._chosen()}"

    def set_aside(self) -> str:
        return f"UPDATE {self._quoted} SET problem = {self._mark} WHERE id = {self._mark}"

    def retry(self) -> str:
        return f"UPDATE {self._quoted} SET problem = NULL WHERE problem IS NOT NULL"

    def counts(self) -> str:
        """(waiting, age of the oldest in seconds, set aside)."""
        return (
            f"SELECT (SELECT count(*) FROM ({self._some('IS NULL')}) AS w), "
            f"(SELECT {self.dialect.age_s} FROM {self._quoted} WHERE id = "
            f"(SELECT min(id) FROM {self._quoted} WHERE problem IS NULL)), "
            f"(SELECT count(*) FROM ({self._some('IS NOT NULL')}) AS s)"
        )

    def problems(self) -> str:
        return (
            f"SELECT id, task_id, problem FROM {self._quoted} WHERE problem IS NOT NULL "
            f"ORDER BY id LIMIT {self._mark}"
        )

    def _chosen(self) -> str:
        return self.dialect.chosen.format(mark=self._mark)

    def _some(self, condition: str) -> str:
        return f"SELECT 1 FROM {self._quoted} WHERE problem {condition} LIMIT {COUNT_MAX + 1}"
