"""Revokes: the durable record of tasks that must not start, read by every claim.

Each entry gets a growing cursor; a claim hands out those after the cursor it was given. When
more wait than fit into one answer, that claim hands out no messages, so that no message overtakes
the revoke that names it. The record never forgets early: at its limit it refuses.
"""

import sqlite3
from collections.abc import Sequence

from umbel.errors import RevokesFull
from umbel.wire.revoke import Revoke

PAGE_MAX = 10_000


def record(db: sqlite3.Connection, batch: Sequence[Revoke], limit: int, now_s: float) -> None:
    db.executemany(
        """INSERT OR REPLACE INTO revokes (task_id, header, recorded_at, expires_at)
           VALUES (?, ?, ?, ?)""",
        [(entry.task_id, entry.header, entry.recorded_at, entry.expires_at) for entry in batch],
    )
    # The span of cursors is the most there can be; only near the limit is counting worth it.
    low, high = db.execute("SELECT min(cursor), max(cursor) FROM revokes").fetchone()
    if low is None or high - low < limit:
        return
    sweep(db, now_s, limit)
    count = db.execute("SELECT count(*) FROM revokes").fetchone()[0]
    if count > limit:
        raise RevokesFull(
            f"the revoke record is at its limit of {limit:,} entries: {len(batch)} more were not recorded; "
            "raise revokes_max, shorten revoke_retention, or purge the queue instead"
        )


def after(db: sqlite3.Connection, cursor: int, now_s: float) -> tuple[list[Revoke], int, bool]:
    """The entries after a cursor, the cursor after them, and whether these are all there are."""
    rows = db.execute(
        """SELECT cursor, task_id, recorded_at, expires_at, header FROM revokes
           WHERE cursor > ? ORDER BY cursor LIMIT ?""",
        (cursor, PAGE_MAX),
    ).fetchall()
    if not rows:
        return [], cursor, True
    news = [revoke for _, *entry in rows if (revoke := Revoke(*entry)).is_news(now_s)]
    return news, rows[-1][0], len(rows) < PAGE_MAX


def sweep(db: sqlite3.Connection, now_s: float, limit: int) -> int:
    return db.execute(
        "DELETE FROM revokes WHERE cursor IN (SELECT cursor FROM revokes WHERE expires_at <= ? LIMIT ?)",
        (now_s, limit),
    ).rowcount
