"""Chords: which parts have ended, and whether the body was sent. Kept as long as results.

Counting a part and finding that it was the last is one transaction, and so is sending the body and
remembering it: however often parts are delivered, the body is sent once. Where another broker sends the body,
those are two steps; so who sends it claims the chord first, or two parts that are repeated at the same time
would each send one. A claim can be taken again by the same task, and by others when its time is over.
"""

import sqlite3
from collections.abc import Sequence
from typing import NamedTuple

from umbel.brokers.interface import Refused
from umbel.brokers.sqlite import dead_letters, uniques, wakeup
from umbel.brokers.sqlite.store import Store
from umbel.wire.message import Outgoing

CLAIM_S = 30.0


class Part(NamedTuple):
    task_id: str
    place: int | None
    status: str
    payload: bytes


class ChordStore:
    def __init__(self, store: Store) -> None:
        self._store = store

    def start(self, group_id: str, size: int) -> None:
        """Sent again (its sender was redelivered), a chord goes on with the parts it has."""
        with self._store.database.write() as db:
            db.execute(
                "INSERT OR IGNORE INTO chords VALUES (?, ?, 0, ?)", (group_id, size, self._expires_at())
            )

    def add(self, group_id: str, part: Part) -> list[Part] | None:
        with self._store.database.write() as db:
            row = db.execute("SELECT size, done FROM chords WHERE group_id = ?", (group_id,)).fetchone()
            if row is None or row[1]:
                return None
            db.execute("INSERT OR REPLACE INTO chord_parts VALUES (?, ?, ?, ?, ?)", (group_id, *part))
            return _whole(db, group_id, row[0])

    def grow(self, group_id: str, task_id: str) -> None:
        """One part more, which has no status until it ends; once for each task."""
        with self._store.database.write() as db:
            added = db.execute(
                """INSERT OR IGNORE INTO chord_parts SELECT group_id, ?, NULL, '', x'' FROM chords
                   WHERE group_id = ? AND NOT done""",
                (task_id, group_id),
            )
            if added.rowcount:
                db.execute("UPDATE chords SET size = size + 1 WHERE group_id = ?", (group_id,))

    def claim(self, group_id: str, by: str) -> bool:
        """Whether `by` may send the body: nobody else does, unless it takes longer than CLAIM_S."""
        with self._store.database.write() as db:
            row = db.execute("SELECT done FROM chords WHERE group_id = ?", (group_id,)).fetchone()
            now_s = self._store.clock.wall_s()
            key = _claim_key(group_id)
            return row is not None and not row[0] and uniques.hold(db, key, by, now_s, now_s + CLAIM_S) == by

    def end(self, group_id: str, batch: Sequence[Outgoing]) -> Sequence[Refused]:
        with self._store.database.write(durable=True) as db:
            ended = db.execute("UPDATE chords SET done = 1 WHERE group_id = ? AND NOT done", (group_id,))
            if not ended.rowcount:
                return ()
            queues, refused = dead_letters.insert_or_bury(db, batch, self._store.clock.wall_s())
            db.execute("DELETE FROM chord_parts WHERE group_id = ?", (group_id,))
            db.execute("DELETE FROM uniques WHERE key = ?", (_claim_key(group_id),))
            awake = wakeup.addresses(db, map(wakeup.queue, queues))
        self._store.poke(awake)
        return refused

    def _expires_at(self) -> float:
        return self._store.clock.wall_s() + self._store.settings.result_expires_s


def _claim_key(group_id: str) -> str:
    return f"umbel.chord\n{group_id}"


def sweep(db: sqlite3.Connection, now_s: float, limit: int) -> int:
    old = "SELECT group_id FROM chords WHERE expires_at <= ? LIMIT ?"
    db.execute(f"DELETE FROM chord_parts WHERE group_id IN ({old})", (now_s, limit))
    return db.execute(f"DELETE FROM chords WHERE group_id IN ({old})", (now_s, limit)).rowcount


def _whole(db: sqlite3.Connection, group_id: str, size: int) -> list[Part] | None:
    found = db.execute(
        """SELECT task_id, place, status, payload FROM chord_parts
           WHERE group_id = ? AND status <> '' ORDER BY place, task_id""",
        (group_id,),
    ).fetchall()
    return [Part(*row) for row in found] if len(found) >= size else None
