"""Event log: what happened, kept for recorders until they have read it.

It is written only while a recorder is registered. Offsets have no gaps and never come back, so a
reader sees by them what it missed. At the limit the oldest events go; those that a recorder had
not acknowledged are counted as lost.
"""

import sqlite3
from collections.abc import Sequence

from umbel.brokers.interface import EventLogState, LoggedEvent
from umbel.brokers.sqlite import meta, rows

LOST = "events_lost"


def register(db: sqlite3.Connection, name: str) -> int:
    """Log for this reader too, from now on if it is new; the offset it has acknowledged."""
    db.execute("INSERT OR IGNORE INTO recorders VALUES (?, ?)", (name, _last_offset(db)))
    acknowledged: int = db.execute("SELECT acknowledged FROM recorders WHERE name = ?", (name,)).fetchone()[0]
    return acknowledged


def forget(db: sqlite3.Connection, name: str) -> None:
    db.execute("DELETE FROM recorders WHERE name = ?", (name,))


def recorders(db: sqlite3.Connection) -> list[str]:
    return [name for (name,) in db.execute("SELECT name FROM recorders ORDER BY name")]


def append(db: sqlite3.Connection, events: Sequence[tuple[str, bytes]], limit: int, now_s: float) -> None:
    new = [(now_s, routing_key, body) for routing_key, body in events]
    rows.insert(db, "events (recorded_at, routing_key, body)", new)
    first = db.execute("SELECT min(offset) FROM events").fetchone()[0]
    if first is None:
        return
    excess = _last_offset(db) - first + 1 - limit
    if excess <= 0:
        return
    last_dropped = first + excess - 1
    unread = min(excess, max(0, last_dropped - _acknowledged_by_all(db)))
    db.execute("DELETE FROM events WHERE offset <= ?", (last_dropped,))
    meta.add(db, LOST, unread)


def read(db: sqlite3.Connection, name: str, limit: int, after: int) -> list[LoggedEvent]:
    """The events after what the recorder has acknowledged, oldest first."""
    found = db.execute(
        """SELECT offset, recorded_at, routing_key, body FROM events
           WHERE offset > (SELECT max(acknowledged, ?) FROM recorders WHERE name = ?)
           ORDER BY offset LIMIT ?""",
        (after, name, limit),
    )
    return [LoggedEvent(*row) for row in found]


def acknowledge(db: sqlite3.Connection, name: str, offset: int) -> None:
    db.execute("UPDATE recorders SET acknowledged = max(acknowledged, ?) WHERE name = ?", (offset, name))


def drop_acknowledged(db: sqlite3.Connection, limit: int) -> int:
    """Remove what every recorder has acknowledged, oldest first: nobody can read it any more."""
    first: int | None = db.execute("SELECT min(offset) FROM events").fetchone()[0]
    if first is None:
        return 0
    last = min(first + limit - 1, _acknowledged_by_all(db))  # offsets have no gaps
    return db.execute("DELETE FROM events WHERE offset <= ?", (last,)).rowcount


def lost(db: sqlite3.Connection) -> int:
    return int(meta.number(db, LOST))


def state(db: sqlite3.Connection) -> EventLogState:
    acknowledged = dict(db.execute("SELECT name, acknowledged FROM recorders"))
    return EventLogState(_last_offset(db), acknowledged, lost(db))


def sweep(db: sqlite3.Connection, older_than: float, limit: int) -> int:
    """Remove events past their retention that every recorder has acknowledged."""
    return db.execute(
        """DELETE FROM events WHERE offset IN (
             SELECT offset FROM events WHERE offset <= ? AND recorded_at <= ? ORDER BY offset LIMIT ?)""",
        (_acknowledged_by_all(db), older_than, limit),
    ).rowcount


def _last_offset(db: sqlite3.Connection) -> int:
    row = db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'events'").fetchone()
    return 0 if row is None else row[0]


def _acknowledged_by_all(db: sqlite3.Connection) -> int:
    lowest: int | None = db.execute("SELECT min(acknowledged) FROM recorders").fetchone()[0]
    return _last_offset(db) if lowest is None else lowest
