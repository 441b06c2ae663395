"""Rows: many of them in few statements.

Python's sqlite3 gives up the interpreter lock at every step of a statement. With the event loop
busy in another thread each of them may cost a wait, so `executemany`, which takes a step for
every row, is replaced by inserts of many rows at a time and by ids in one JSON array.
"""

import sqlite3
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import chain
from typing import Any

import msgspec

_SIZES = (64, 8, 1)  # few sizes, so that their statements stay in the connection's cache

_encode = msgspec.json.Encoder().encode
ints = msgspec.json.Decoder(list[int]).decode
strings = msgspec.json.Decoder(list[str]).decode


def pack(values: Iterable[int | str]) -> str:
    """The values as an argument for json_each()."""
    return _encode(list(values)).decode()


def insert(
    db: sqlite3.Connection,
    into: str,
    rows: Sequence[Sequence[Any]],
    *,
    otherwise: str = "",
    with_: Sequence[Any] = (),
) -> int:
    """INSERT INTO `into` the rows; `otherwise` is a conflict clause, and `with_` its arguments.

    The rowid of the last one, where the table has rowids and there was no conflict.
    """
    if len(rows) == 1:  # as with every message that is sent by itself
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
