"""Chords: which parts have ended, and whether the body was sent. Stored as long as results.

Counting a part and finding that it was the last is one transaction, and so is sending the body and recording
that: however often parts are delivered, the body is sent once. Where another broker sends the body, those are
two steps; so the sender claims the chord first, or two parts that are repeated at the same time would each
send a body. A claim can be taken again by the same task, and by others when its time is over.
"""

import sqlite3
from collections.abc import Sequence
from typing import NamedTuple

from umbel.brokers.interface import Refused
from umbel.brokers.sqlite import publishing, rows, verdicts, wakeup
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
            db.execute(
                "INSERT OR IGNORE INTO chords VALUES (?, ?, 0, ?)", (group_id, size, self._expires_at())
            )

    def add(self, group_id: str, part: Part) -> list[Part] | None:
        """Store the end of a part; all parts in order if none is missing now, else None."""
        with self._store.database.write() as db:
            found = db.execute("SELECT size, done FROM chords WHERE group_id = ?", (group_id,))
            row = rows.read_one(found, tuple[int, int])
            if row is None or row[1]:
                return None
            db.execute("INSERT OR REPLACE INTO chord_parts VALUES (?, ?, ?, ?, ?)", (group_id, *part))
            return _whole(db, group_id, row[0])

    def grow(self, group_id: str, task_id: str) -> None:
        """Add a part, which has no status until it ends; once for each task."""
        with self._store.database.write() as db:
            added = db.execute(
                """INSERT OR IGNORE INTO chord_parts SELECT group_id, ?, NULL, '', x'' FROM chords
                   WHERE group_id = ? AND NOT done""",
                (task_id, group_id),
            )
            if added.rowcount:
                db.execute("UPDATE chords SET size = size + 1 WHERE group_id = ?", (group_id,))

    def claim(self, group_id: str, by: str) -> bool:
        """Whether `by` may send the body: no other task does, unless it takes longer than CLAIM_S."""
        with self._store.database.write() as db:
            found = db.execute("SELECT done FROM chords WHERE group_id = ?", (group_id,))
            row = rows.read_one(found, tuple[int])
            now_s = self._store.clock.wall_s()
            key = _claim_key(group_id)
            return (
                row is not None
                and not row[0]
                and publishing.hold_key(db, key, by, now_s, now_s + CLAIM_S) == by
            )

    def end(self, group_id: str, batch: Sequence[Outgoing]) -> Sequence[Refused]:
        """Send the body and remove the parts, once; what the broker refused."""
        with self._store.database.write(durable=True) as db:
            ended = db.execute("UPDATE chords SET done = 1 WHERE group_id = ? AND NOT done", (group_id,))
            if not ended.rowcount:
                return ()
            queues, refused = verdicts.insert_or_bury(db, batch, self._store.clock.wall_s())
            db.execute("DELETE FROM chord_parts WHERE group_id = ?", (group_id,))
            db.execute("DELETE FROM uniques WHERE key = ?", (_claim_key(group_id),))
            awake = wakeup.addresses(db, map(wakeup.queue, queues))
        self._store.poke(awake)
        return refused

    def _expires_at(self) -> float:
        return self._store.clock.wall_s() + self._store.settings.result_expires_s


def _claim_key(group_id: str) -> str:
    return f"umbel.chord\n{group_id}"


def sweep_chords(db: sqlite3.Connection, now_s: float, limit: int) -> int:
    """Remove up to `limit` chords past their retention; return how many were removed."""
    old = "SELECT group_id FROM chords WHERE expires_at <= ? LIMIT ?"
    db.execute(f"DELETE FROM chord_parts WHERE group_id IN ({old})", (now_s, limit))
    return db.execute(f"DELETE FROM chords WHERE group_id IN ({old})", (now_s, limit)).rowcount


def _whole(db: sqlite3.Connection, group_id: str, size: int) -> list[Part] | None:
    """All parts in their order, read only when the count says that none is missing."""
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
