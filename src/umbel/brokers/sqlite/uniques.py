"""Uniques: which task holds a key, until it gives it back or its time is over."""

import sqlite3
from collections.abc import Sequence

_TAKE = """INSERT INTO uniques VALUES (?, ?, ?) ON CONFLICT (key) DO UPDATE
           SET task_id = excluded.task_id, expires_at = excluded.expires_at WHERE expires_at <= ?"""


def hold(db: sqlite3.Connection, key: str, task_id: str, now_s: float, expires_at: float) -> str:
    """Take a key that is free; the task that holds it now."""
    db.execute(_TAKE, (key, task_id, expires_at, now_s))
    return str(db.execute("SELECT task_id FROM uniques WHERE key = ?", (key,)).fetchone()[0])


def take(db: sqlite3.Connection, key: str, task_id: str, now_s: float, expires_at: float) -> bool:
    """Whether the key was free, and is the task's now."""
    return bool(db.execute(_TAKE, (key, task_id, expires_at, now_s)).rowcount)


def release(db: sqlite3.Connection, held: Sequence[tuple[str, str]]) -> None:
    db.executemany("DELETE FROM uniques WHERE key = ? AND task_id = ?", held)


def sweep(db: sqlite3.Connection, now_s: float, limit: int) -> int:
    return db.execute(
        "DELETE FROM uniques WHERE key IN (SELECT key FROM uniques WHERE expires_at <= ? LIMIT ?)",
        (now_s, limit),
    ).rowcount
