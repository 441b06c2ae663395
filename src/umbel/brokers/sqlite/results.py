"""Results: what tasks returned, until their retention ends. The first SUCCESS of a task stays."""

import sqlite3
from collections.abc import Iterable, Sequence

import msgspec

from umbel.wire.message import StoredResult

SUCCESS = "SUCCESS"
FINAL = frozenset({SUCCESS, "FAILURE", "REVOKED"})

_STORE = f"""
INSERT INTO results VALUES (?, ?, ?, ?) ON CONFLICT (task_id) DO UPDATE
SET status = excluded.status, payload = excluded.payload, expires_at = excluded.expires_at
WHERE results.status <> '{SUCCESS}' OR results.expires_at <= ?"""


def store(db: sqlite3.Connection, results: Sequence[StoredResult], now_s: float, expires_at: float) -> None:
    db.executemany(
        _STORE, [(result.task_id, result.status, result.payload, expires_at, now_s) for result in results]
    )


def read(db: sqlite3.Connection, task_ids: Iterable[str], now_s: float) -> dict[str, StoredResult]:
    rows = db.execute(
        """SELECT task_id, status, payload FROM results
           WHERE task_id IN (SELECT value FROM json_each(?)) AND expires_at > ?""",
        (msgspec.json.encode(list(task_ids)).decode(), now_s),
    )
    return {task_id: StoredResult(task_id, status, payload) for task_id, status, payload in rows}


def forget(db: sqlite3.Connection, task_ids: Iterable[str]) -> None:
    db.execute(
        "DELETE FROM results WHERE task_id IN (SELECT value FROM json_each(?))",
        (msgspec.json.encode(list(task_ids)).decode(),),
    )


def sweep(db: sqlite3.Connection, now_s: float, limit: int) -> int:
    return db.execute(
        "DELETE FROM results WHERE task_id IN (SELECT task_id FROM results WHERE expires_at <= ? LIMIT ?)",
        (now_s, limit),
    ).rowcount
