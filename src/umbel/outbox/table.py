"""Table: the SQL of the outbox in PostgreSQL and SQLite, the contents of its rows, and the relay's progress.

Within a transaction, row ids follow the order of the inserts, and an id is never reused. Between transactions
ids show no order: a lower id may be committed after a higher one. So a reader selects the lowest ids in the
table, and remembers no position.

A row is a prepared message in one form for all brokers. The relay only publishes it: queue or exchange,
headers, properties, body and the task's id are fixed when the row is written.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from umbel.errors import BadMessage, ConfigurationError, UmbelError, WireError
from umbel.wire.call import read_headers
from umbel.wire.message import Message, Outgoing
from umbel.wire.values import UNREADABLE, decode_json_as

# ---- SQL -------------------------------------------------------------------------------------------

DEFAULT_TABLE = "umbel_outbox"
COUNT_MAX = 100_000  # counting stops above this
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}(\.[A-Za-z_][A-Za-z0-9_]{0,62})?")
_NAME_MAX = 63  # PostgreSQL truncates longer names
_WAITING = "_waiting"


class Dialect(msgspec.Struct, frozen=True):
    """How the SQL of the outbox differs between databases."""

    name: str
    row_id: str
    blob: str
    message: str  # the column as bytes, for values of any type
    written_at: str
    age_s: str  # seconds since the lowest `written_at`, by the database's clock
    storage: str  # storage options of the table
    chosen: str  # the condition that selects ids, given as one parameter
    placeholder: str  # of a parameter


POSTGRESQL = Dialect(
    name="postgresql",
    row_id="bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY",
    blob="bytea",
    message="message",
    written_at="timestamptz NOT NULL DEFAULT now()",
    age_s="extract(epoch FROM clock_timestamp() - min(written_at))::float8",
    # Every row is deleted soon, so vacuum after a number of dead rows, not at their share of a small table.
    storage=" WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000)",
    chosen="id = ANY({})",
    placeholder="%s",
)
SQLITE = Dialect(
    name="sqlite",
    row_id="INTEGER PRIMARY KEY AUTOINCREMENT",  # without AUTOINCREMENT SQLite reuses ids
    blob="BLOB",
    message="CAST(message AS BLOB)",  # a column holds values of any type; text need not be UTF-8
    written_at="REAL NOT NULL DEFAULT ((julianday('now') - 2440587.5) * 86400.0)",
    age_s="(julianday('now') - 2440587.5) * 86400.0 - min(written_at)",
    storage="",
    chosen="id IN (SELECT value FROM json_each({}))",
    placeholder="?",
)


def check_table(table: str) -> str:
    """Return the table's name unchanged; ConfigurationError unless it is a plain name or schema.name."""
    if not _NAME.fullmatch(table):
        raise ConfigurationError(
            f"outbox_table is {table!r}: it must be a plain name, or schema.name, of letters, digits and _"
        )
    return table


def _quoted(schema: str, name: str) -> str:
    """The name quoted for SQL, so that a reserved word is allowed."""
    return f'"{schema}"."{name}"' if schema else f'"{name}"'


class Statements:
    """The statements for one table. `placeholder`: that of the library which runs them, if it differs."""

    def __init__(
        self, dialect: Dialect, table: str = DEFAULT_TABLE, *, placeholder: str | None = None
    ) -> None:
        self.dialect = dialect
        self.table = check_table(table)
        self._schema, _, self._name = table.rpartition(".")
        self._quoted = _quoted(self._schema, self._name)
        self._placeholder = placeholder or dialect.placeholder

    def create(self) -> tuple[str, ...]:
        """Create the table and its index; has no effect if they exist."""
        kind = self.dialect
        index = f"{self._name[: _NAME_MAX - len(_WAITING)]}{_WAITING}"
        # PostgreSQL creates an index in the schema of its table. SQLite takes the schema before the index.
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
        """Insert one row; with named parameters where names are given."""
        values = f"{task_id or self._placeholder}, {message or self._placeholder}"
        return f"INSERT INTO {self._quoted} (task_id, message) VALUES ({values})"

    def fetch(self) -> str:
        """Select the next rows. Parameters: the most rows, and the bytes at which the selection ends."""
        chosen = f"SELECT id, {self.dialect.message} AS message FROM {self._quoted} WHERE problem IS NULL"
        first = f"{chosen} ORDER BY id LIMIT {self._placeholder}"
        ahead = "sum(length(message)) OVER (ORDER BY id) - length(message)"
        return (
            f"SELECT id, message FROM (SELECT id, message, {ahead} AS ahead FROM ({first}) AS lowest) "
            f"AS sized WHERE ahead < {self._placeholder} ORDER BY id"
        )

    def remove(self) -> str:
        """Delete the rows with the given ids."""
        return f"DELETE FROM {self._quoted} WHERE {self.dialect.chosen.format(self._placeholder)}"

    def set_aside(self) -> str:
        """Set the problem of one row, so that it is not fetched again."""
        return f"UPDATE {self._quoted} SET problem = {self._placeholder} WHERE id = {self._placeholder}"

    def retry(self) -> str:
        """Clear the problems of all rows that were set aside."""
        return f"UPDATE {self._quoted} SET problem = NULL WHERE problem IS NOT NULL"

    def counts(self) -> str:
        """Select (waiting, age of the oldest in seconds, set aside)."""
        return (
            f"SELECT (SELECT count(*) FROM ({self._some('IS NULL')}) AS w), "
            f"(SELECT {self.dialect.age_s} FROM {self._quoted} WHERE id = "
            f"(SELECT min(id) FROM {self._quoted} WHERE problem IS NULL)), "
            f"(SELECT count(*) FROM ({self._some('IS NOT NULL')}) AS s)"
        )

    def problems(self) -> str:
        """Select the first rows that were set aside. Parameter: the most rows."""
        return (
            f"SELECT id, task_id, problem FROM {self._quoted} WHERE problem IS NOT NULL "
            f"ORDER BY id LIMIT {self._placeholder}"
        )

    def _some(self, condition: str) -> str:
        return f"SELECT 1 FROM {self._quoted} WHERE problem {condition} LIMIT {COUNT_MAX + 1}"


# ---- rows ------------------------------------------------------------------------------------------

PROBLEM_MAX_CHARS = 500


class StoredRow(NamedTuple):
    """A committed row. Its `row_id` is never reused."""

    row_id: int
    message: bytes


class Problem(NamedTuple):
    """Why a row was set aside."""

    row_id: int
    why: str


class Readable(NamedTuple):
    """A row whose message can be published."""

    row_id: int
    outgoing: Outgoing


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Outgoing).decode
_MAP = msgspec.json.Decoder(dict[str, Any])


def encode_rows(batch: Iterable[Outgoing]) -> list[tuple[str, bytes]]:
    """(task id, message) of each row, in the order of sending."""
    return [(outgoing.message.correlation_id, _encode(outgoing)) for outgoing in batch]


def decode_row(data: bytes) -> Outgoing:
    """The message of a row; BadMessage says why it cannot be read."""
    try:
        outgoing = _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadMessage(f"not a valid outbox row: {error}") from None
    _check_maps(outgoing.message)
    if not outgoing.message.correlation_id:
        raise BadMessage("the message in the outbox row has no task id")
    if not (outgoing.queue or outgoing.exchange):
        raise BadMessage("the message in the outbox row names neither a queue nor an exchange")
    return outgoing


def _check_maps(message: Message) -> None:
    """Refuse headers and properties that a broker cannot store, such as values that are nested too deep."""
    read_headers(message)
    decode_json_as(_MAP, message.headers, what="the map of headers")
    if message.properties:
        decode_json_as(_MAP, message.properties, what="the map of properties")


def read_rows(rows: Sequence[StoredRow]) -> tuple[list[Readable], list[Problem]]:
    """The rows that can be published, in order, and the problems of those that cannot."""
    readable: list[Readable] = []
    problems: list[Problem] = []
    for row in rows:
        try:
            readable.append(Readable(row.row_id, decode_row(row.message)))
        except WireError as error:
            problems.append(problem(row.row_id, error))
    return readable, problems


def problem(row_id: int, error: BaseException) -> Problem:
    """The reason for which a row is set aside, cut to PROBLEM_MAX_CHARS."""
    kind = type(error).__name__
    text = str(error) if isinstance(error, UmbelError) else f"{kind}: {error}"
    # A text of PostgreSQL cannot contain NUL.
    return Problem(row_id, text.replace("\0", "")[:PROBLEM_MAX_CHARS] or kind)


# ---- progress --------------------------------------------------------------------------------------
#
# A relay stores its progress in the data of its lease, for `umbel outbox status` and for the next relay.


class Progress(msgspec.Struct, frozen=True):
    """How many messages of an outbox were published, over all relays, and when the last was (Unix time)."""

    published: int = 0
    at: float = 0.0

    def and_more(self, count: int, at: float) -> "Progress":
        """The progress after this many more messages."""
        return Progress(self.published + count, at) if count else self


def encode_progress(progress: Progress) -> bytes:
    """The bytes that are stored with the lease."""
    return msgspec.json.encode(progress)


def decode_progress(data: bytes) -> Progress:
    """The stored progress; an empty one if nothing was stored or it cannot be read."""
    try:
        return msgspec.json.decode(data, type=Progress)
    except UNREADABLE:
        return Progress()
