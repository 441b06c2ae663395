"""Rows of the embedded broker's file: typed when they are read, written many at a time.

SQLite stores any value in any column, and other programs may write to the file. So every row is converted to
its type when it is read. A row that does not fit raises `Malformed`: the transaction is rolled back, and
`integrity.py` moves the row out of its table.

Python's sqlite3 releases the interpreter lock at every step of a statement. While the event loop is busy in
another thread, each step may have to wait for the lock. So a batch is written by one INSERT of many rows,
instead of `executemany`, which takes a step for each row; and a list of ids is passed as one JSON array.

SQLite refuses some values because of the value, not because of the file: a blob over its size limit, text
that is not Unicode, a number beyond 64 bits, a constraint or trigger that another program added. A retry does
not help, and the rest of the batch is not affected. So such a batch is written again part by part, each part
under a savepoint (`apply_each`).
"""

import sqlite3
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import chain
from typing import Annotated, Any, TypeVar

import msgspec

T = TypeVar("T")

ID_MAX = 2**53  # SQLite gives random ids after 2**63 - 1; this many are never used up
Id = Annotated[int, msgspec.Meta(ge=0, le=ID_MAX)]
_SIZES = (64, 8, 1)  # few sizes, so that their statements stay in the connection's cache

_encode = msgspec.json.Encoder().encode
_ints = msgspec.json.Decoder(list[int]).decode
_strings = msgspec.json.Decoder(list[str]).decode


class Malformed(Exception):
    """A row has another type or value than the schema says."""


# ---- reading ---------------------------------------------------------------------------------------


def read(cursor: sqlite3.Cursor, shape: type[T]) -> list[T]:
    """All rows; `shape` is the type of a row: `tuple[int, str]`, or a Struct, which costs less."""
    try:
        found = cursor.fetchall()
    except sqlite3.Error:
        cursor.close()  # an open cursor holds its snapshot, and no write can begin on that
        raise
    if len(found) < 2:
        return [typed(found[0], shape)] if found else []
    return typed(found, list[shape])  # type: ignore[valid-type]


def read_one(cursor: sqlite3.Cursor, shape: type[T]) -> T | None:
    """The next row, or None; Malformed if it has another shape."""
    try:
        found = cursor.fetchone()
    except sqlite3.Error:
        cursor.close()
        raise
    return None if found is None else typed(found, shape)


def typed(found: object, shape: type[T]) -> T:
    """The value as this type; Malformed if it has another type."""
    try:
        return msgspec.convert(found, shape)
    except msgspec.ValidationError as error:
        raise Malformed(str(error)) from None


def last_of_sequence(db: sqlite3.Connection, table: str) -> int:
    """The last number that an AUTOINCREMENT table has given."""
    found = db.execute("SELECT seq FROM sqlite_sequence WHERE name = ?", (table,))
    row = read_one(found, tuple[Id])
    return 0 if row is None else row[0]


def pack(values: Iterable[int | str]) -> str:
    """The values as an argument for json_each()."""
    return _encode(list(values)).decode()


def ints(packed: str) -> list[int]:
    """The numbers of a JSON array that SQLite made of a column."""
    try:
        return _ints(packed)
    except msgspec.DecodeError as error:
        raise Malformed(str(error)) from None


def strings(packed: str | bytes) -> list[str]:
    """The texts of a JSON array; Malformed if it is something else."""
    try:
        return _strings(packed)
    except msgspec.DecodeError as error:
        raise Malformed(str(error)) from None


# ---- writing ---------------------------------------------------------------------------------------


def insert(
    db: sqlite3.Connection,
    into: str,
    rows: Sequence[Sequence[Any]],
    *,
    otherwise: str = "",
    with_: Sequence[Any] = (),
) -> int:
    """INSERT INTO `into` the rows; `otherwise` is a conflict clause, and `with_` its arguments.

    Returns the rowid of the last row, where the table has rowids and there was no conflict.
    """
    if len(rows) == 1:  # as for every message that is sent alone
        return db.execute(_statement(into, 1, len(rows[0]), otherwise), (*rows[0], *with_)).lastrowid or 0
    done = last_id = 0
    for size in _SIZES:
        while len(rows) - done >= size:
            statement = _statement(into, size, len(rows[0]), otherwise)
            cursor = db.execute(statement, [*chain.from_iterable(rows[done : done + size]), *with_])
            last_id = cursor.lastrowid or 0
            done += size
    return last_id


@cache
def _statement(into: str, size: int, width: int, otherwise: str) -> str:
    row = f"({', '.join('?' * width)})"
    return f"INSERT INTO {into} VALUES {', '.join([row] * size)} {otherwise}"


def sweep(
    db: sqlite3.Connection,
    table: str,
    before: float,
    limit: int,
    *,
    key: str = "id",
    column: str = "expires_at",
) -> int:
    """Delete up to `limit` rows whose `column`, which has an index, is not after `before`; how many."""
    old = f"SELECT {key} FROM {table} WHERE {column} <= ? ORDER BY {column} LIMIT ?"
    return db.execute(f"DELETE FROM {table} WHERE {key} IN ({old})", (before, limit)).rowcount


def trim(db: sqlite3.Connection, table: str, limit: int, dropped: str) -> None:
    """Delete the oldest rows beyond the limit, and add their number to the value `dropped` of `meta`."""
    if may_exceed(db, table, limit):
        excess = db.execute(f"SELECT count(*) FROM {table}").fetchone()[0] - limit
        if excess > 0:
            oldest = f"SELECT id FROM {table} ORDER BY id LIMIT ?"
            db.execute(f"DELETE FROM {table} WHERE id IN ({oldest})", (excess,))
            add_to_meta(db, dropped, excess)


def may_exceed(db: sqlite3.Connection, table: str, limit: int, key: str = "id") -> bool:
    """Whether a table may have more rows than the limit.

    Keys only grow, so their span is the most rows there can be. Counting the rows is slow, and only worth it
    when the span exceeds the limit.
    """
    # Each end is a separate subquery: for both in one, SQLite reads the whole table.
    ends = f"SELECT (SELECT min({key}) FROM {table}), (SELECT max({key}) FROM {table})"
    low, high = db.execute(ends).fetchone()
    return low is not None and bool(high - low >= limit)


# ---- refusals --------------------------------------------------------------------------------------

PartT = TypeVar("PartT")
REFUSED_ERRORS = (sqlite3.Error, ValueError, OverflowError)
REFUSED_CODES = {
    sqlite3.SQLITE_TOOBIG,
    sqlite3.SQLITE_CONSTRAINT,
    sqlite3.SQLITE_MISMATCH,
    sqlite3.SQLITE_RANGE,
}


def refusal_reason(error: Exception) -> str | None:
    """Why the value was refused; None: the error has another cause."""
    if isinstance(error, sqlite3.Error):
        code = getattr(error, "sqlite_errorcode", None)
        if code is not None and code & 0xFF not in REFUSED_CODES:
            return None
    return f"SQLite cannot store it: {error}"


def apply_each(
    db: sqlite3.Connection, parts: Iterable[PartT], apply: Callable[[PartT], object]
) -> list[tuple[PartT, str]]:
    """Apply each part by itself; returns the parts that SQLite refused, each with the reason."""
    refused: list[tuple[PartT, str]] = []
    for part in parts:
        db.execute("SAVEPOINT part")
        try:
            apply(part)
        except REFUSED_ERRORS as error:
            if (why := refusal_reason(error)) is None:
                raise
            refused.append((part, why))
            db.execute("ROLLBACK TO part")
        db.execute("RELEASE part")
    return refused


# ---- meta ------------------------------------------------------------------------------------------
#
# A table of named values, one in each row, which the store keeps about itself.

BOOT_ID = "boot_id"
BORN = "born"
LAST_TERM = "last_term"
CLOCK = "clock"
FILED = "filed"
ADDITIONS = "additions"
CLUSTER, CLUSTER_SINCE = "cluster", "cluster_since"
EVENTS_LOST = "events_lost"
EVENTS_DROPPED = "events_dropped"  # the last offset that was dropped at the limit
DEAD_LETTERS_DROPPED, FAILED_DROPPED = "dead_letters_dropped", "failed_dropped"

_VALUE = "SELECT value FROM meta WHERE name = ?"


def meta_text(db: sqlite3.Connection, name: str) -> str:
    """The text with this name; "" if there is none."""
    row = read_one(db.execute(_VALUE, (name,)), tuple[str])
    return "" if row is None else row[0]


def meta_number(db: sqlite3.Connection, name: str) -> float:
    """The number with this name; 0.0 if there is none."""
    row = read_one(db.execute(_VALUE, (name,)), tuple[float])
    return 0.0 if row is None else row[0]


def meta_count(db: sqlite3.Connection, name: str) -> int:
    """The count with this name; 0 if there is none."""
    row = read_one(db.execute(_VALUE, (name,)), tuple[Id])
    return 0 if row is None else row[0]


def put_meta(db: sqlite3.Connection, name: str, value: str | float) -> None:
    """Store a value under this name."""
    db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, value))


def add_to_meta(db: sqlite3.Connection, name: str, more: int) -> None:
    """Add to the count with this name."""
    put_meta(db, name, meta_count(db, name) + more)
