"""Results: what tasks returned, until their retention ends. The first SUCCESS of a task stays."""

import sqlite3
from collections.abc import Iterable, Sequence

from umbel.brokers.sqlite import rows
from umbel.protocol.delivery.states import SUCCESS
from umbel.wire.message import StoredResult

_REPLACE = f"""
ON CONFLICT (task_id) DO UPDATE
SET status = excluded.status, payload = excluded.payload, expires_at = excluded.expires_at
WHERE results.status <> '{SUCCESS}' OR results.expires_at <= ?"""


def store(db: sqlite3.Connection, results: Sequence[StoredResult], now_s: float, expires_at: float) -> None:
    new = [(result.task_id, result.status, result.payload, expires_at) for result in results]
    rows.insert(db, "results", new, otherwise=_REPLACE, with_=[now_s])


def read(db: sqlite3.Connection, task_ids: Iterable[str], now_s: float) -> dict[str, StoredResult]:
    found = db.execute(
        """SELECT task_id, status, payload FROM results
           WHERE task_id IN (SELECT value FROM json_each(?)) AND expires_at > ?""",
        (rows.pack(task_ids), now_s),
    )
    return {task_id: StoredResult(task_id, status, payload) for task_id, status, payload in found}


def forget(db: sqlite3.Connection, task_ids: Iterable[str]) -> None:
    db.execute(
        "DELETE FROM results WHERE task_id IN (SELECT value FROM json_each(?))",
        (rows.pack(task_ids),),
    )


def sweep(db: sqlite3.Connection, now_s: float, limit: int) -> int:
    return db.execute(
        "DELETE FROM results WHERE task_id IN (SELECT task_id FROM results WHERE expires_at <= ? LIMIT ?)",
        (now_s, limit),
    ).rowcount
