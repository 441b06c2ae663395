"""Chords: which parts have ended, and whether the body was sent. Stored as long as results.

Counting a part and finding that it was the last is one transaction, and so is sending the body and recording
that: however often parts are delivered, the body is sent once. If the body goes to another broker, those are
two steps. So the sender claims the chord first, or two parts that are repeated at the same time would each
send a body. The same task can claim the chord again, and other tasks can when the claim has expired.
"""

import sqlite3
from collections.abc import Sequence
from typing import NamedTuple

from umbel.brokers.interface import Refused
from umbel.brokers.sqlite import publishing, rows, verdicts
from umbel.brokers.sqlite.store import Store
from umbel.wire.message import Outgoing

CLAIM_S = 30.0


class Part(NamedTuple):
    """The result of one part of a chord; `place` is its index in the header."""

    task_id: str
    place: int | None
    status: str
    payload: bytes


class ChordStore:
    """The operations on chords, each one transaction."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def start(self, group_id: str, size: int) -> None:
        """Create the chord. A chord that is sent again (its sender was redelivered) keeps its parts."""
        with self._store.database.write() as db:
            expires_at = self._store.clock.wall_s() + self._store.settings.result_expires_s
            db.execute("INSERT OR IGNORE INTO chords VALUES (?, ?, 0, ?)", (group_id, size, expires_at))

    def add(self, group_id: str, part: Part) -> list[Part] | None:
        """Store the end of a part; returns all parts in order if none is missing now."""
        with self._store.database.write() as db:
            found = db.execute("SELECT size, done FROM chords WHERE group_id = ?", (group_id,))
            row = rows.read_one(found, tuple[int, int])
            if row is None or row[1]:
                return None
            db.execute("INSERT OR REPLACE INTO chord_parts VALUES (?, ?, ?, ?, ?)", (group_id, *part))
            return _whole(db, group_id, row[0])

    def grow(self, group_id: str, task_id: str) -> None:
        """Add a part that has no status until it ends, once for each task."""
        with self._store.database.write() as db:
            added = db.execute(
                """INSERT OR IGNORE INTO chord_parts SELECT group_id, ?, NULL, '', x'' FROM chords
                   WHERE group_id = ? AND NOT done""",
                (task_id, group_id),
            )
            if added.rowcount:
                db.execute("UPDATE chords SET size = size + 1 WHERE group_id = ?", (group_id,))

    def claim(self, group_id: str, by: str) -> bool:
        """Whether the task `by` may send the body: no other task may for the next CLAIM_S."""
        with self._store.database.write() as db:
            found = db.execute("SELECT done FROM chords WHERE group_id = ?", (group_id,))
            row = rows.read_one(found, tuple[int])
            if row is None or row[0]:
                return False
            now_s = self._store.clock.wall_s()
            return publishing.hold_key(db, _claim_key(group_id), by, now_s, now_s + CLAIM_S) == by

    def end(self, group_id: str, batch: Sequence[Outgoing]) -> Sequence[Refused]:
        """Send the body and remove the parts, once; returns the messages that the broker refused."""
        with self._store.write_and_wake(durable=True) as (db, grown):
            ended = db.execute("UPDATE chords SET done = 1 WHERE group_id = ? AND NOT done", (group_id,))
            if not ended.rowcount:
                return ()
            queues, refused = verdicts.insert_or_bury(db, batch, self._store.clock.wall_s())
            grown.update(queues)
            db.execute("DELETE FROM chord_parts WHERE group_id = ?", (group_id,))
            db.execute("DELETE FROM uniques WHERE key = ?", (_claim_key(group_id),))
        return refused


def _claim_key(group_id: str) -> str:
    return f"umbel.chord\n{group_id}"


def sweep_chords(db: sqlite3.Connection, now_s: float, limit: int) -> int:
    """Remove up to `limit` chords past their retention; how many."""
    old = "SELECT group_id FROM chords WHERE expires_at <= ? LIMIT ?"
    db.execute(f"DELETE FROM chord_parts WHERE group_id IN ({old})", (now_s, limit))
    return db.execute(f"DELETE FROM chords WHERE group_id IN ({old})", (now_s, limit)).rowcount


def _whole(db: sqlite3.Connection, group_id: str, size: int) -> list[Part] | None:
    """All parts in order, or None; they are read only when the count says that none is missing."""
    ended = db.execute("SELECT ended FROM chord_progress WHERE group_id = ?", (group_id,))
    counted = rows.read_one(ended, tuple[rows.Id])
    if counted is not None and counted[0] < size:
        return None
    found = db.execute(
        """SELECT task_id, place, status, payload FROM chord_parts
           WHERE group_id = ? AND status <> '' ORDER BY place, task_id""",
        (group_id,),
    )
    parts = rows.read(found, Part)
    if len(parts) >= size:
        return parts
    db.execute("INSERT OR REPLACE INTO chord_progress VALUES (?, ?)", (group_id, len(parts)))
    return None
