"""Refusals: what SQLite says no to because of the value, not because of the file.

A blob over its size limit, text that is no Unicode, a number beyond 64 bits, a constraint or trigger
that somebody added. Waiting does not help, and the other values of the batch are not concerned. What
is usually written in few statements is then written part by part, each under a savepoint.
"""

import sqlite3
from collections.abc import Callable, Sequence
from typing import TypeVar

PartT = TypeVar("PartT")
ERRORS = (sqlite3.Error, ValueError, OverflowError)
CODES = {
    sqlite3.SQLITE_TOOBIG,
    sqlite3.SQLITE_CONSTRAINT,
    sqlite3.SQLITE_MISMATCH,
    sqlite3.SQLITE_RANGE,
}


def reason(error: Exception) -> str | None:
    """Why the value was refused; None: the error is about something else."""
    if isinstance(error, sqlite3.Error):
        code = getattr(error, "sqlite_errorcode", None)
        if code is not None and code & 0xFF not in CODES:
            return None
    return f"SQLite cannot store it: {error}"


def apply_each(
    db: sqlite3.Connection, parts: Sequence[PartT], apply: Callable[[PartT], object]
) -> list[tuple[PartT, str]]:
    """Apply each part by itself; those that were refused, and why."""
    refused: list[tuple[PartT, str]] = []
    for part in parts:
        db.execute("SAVEPOINT part")
        try:
            apply(part)
        except ERRORS as error:
            if (why := reason(error)) is None:
                raise
            refused.append((part, why))
            db.execute("ROLLBACK TO part")
        db.execute("RELEASE part")
    return refused
