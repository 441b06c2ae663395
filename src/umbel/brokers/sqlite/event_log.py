"""Event log: what happened, kept for recorders until they have read it.

It is written only while a recorder is registered. An entry holds one event or several; offsets count
events, and an entry has that of its last one. They never come back, so a reader sees by them what it
missed. At the limit the oldest entries go; events in them that a recorder had not acknowledged are
counted as lost.
"""

import sqlite3
from collections.abc import Sequence
from itertools import accumulate

from umbel.brokers.interface import EventLogState, LoggedEvent
from umbel.brokers.sqlite import meta, rows

LOST = "events_lost"
DROPPED = "events_dropped"  # the last offset that had to make room


def register(db: sqlite3.Connection, name: str) -> int:
    """Log for this reader too, from now on if it is new; the offset it has acknowledged."""
    db.execute("INSERT OR IGNORE INTO recorders VALUES (?, ?)", (name, _last_offset(db)))
    acknowledged: int = db.execute("SELECT acknowledged FROM recorders WHERE name = ?", (name,)).fetchone()[0]
    return acknowledged


def forget(db: sqlite3.Connection, name: str) -> None:
    db.execute("DELETE FROM recorders WHERE name = ?", (name,))


def recorders(db: sqlite3.Connection) -> list[str]:
    return [name for (name,) in db.execute("SELECT name FROM recorders ORDER BY name")]


def append(
    db: sqlite3.Connection,
    entries: Sequence[tuple[str, bytes]],
    counts: Sequence[int],
    limit: int,
    now_s: float,
) -> None:
    offsets = accumulate(counts or [1] * len(entries), initial=_last_offset(db))
    next(offsets)
    new = [(offset, now_s, *entry) for offset, entry in zip(offsets, entries, strict=True)]
    rows.insert(db, "events (offset, recorded_at, routing_key, body)", new)
    _make_room(db, new[-1][0] - limit)


def _make_room(db: sqlite3.Connection, last: int) -> None:
    """Drop the entries up to this offset."""
    found = db.execute("SELECT offset FROM events WHERE offset <= ? ORDER BY offset DESC LIMIT 1", (last,))
    row = found.fetchone()
    if row is None:
        return
    known = max(_acknowledged_by_all(db), int(meta.number(db, DROPPED)))
    db.execute("DELETE FROM events WHERE offset <= ?", (row[0],))
    meta.add(db, LOST, max(0, row[0] - known))
    meta.put(db, DROPPED, row[0])


def read(db: sqlite3.Connection, name: str, limit: int, after: int) -> list[LoggedEvent]:
    """The events after what the recorder has acknowledged, oldest first."""
    row = db.execute("SELECT max(acknowledged, ?) FROM recorders WHERE name = ?", (after, name)).fetchone()
    if row is None:
        return []
    select = "SELECT offset, recorded_at, routing_key, body FROM events WHERE offset > ?"
    found = db.execute(f"{select} AND offset <= ? ORDER BY offset", (row[0], row[0] + limit)).fetchall()
    if not found:  # the next entry may be longer than that, or those before it are gone
        found = db.execute(f"{select} ORDER BY offset LIMIT 1", (row[0],)).fetchall()
    return [LoggedEvent(*one) for one in found]


def acknowledge(db: sqlite3.Connection, name: str, offset: int) -> None:
    db.execute("UPDATE recorders SET acknowledged = max(acknowledged, ?) WHERE name = ?", (offset, name))


def drop_acknowledged(db: sqlite3.Connection, limit: int) -> int:
    """Remove what every recorder has acknowledged, oldest first: nobody can read it any more.

    So many events at once. Of how many offsets it is done; less than asked for: that was all.
    """
    first: int | None = db.execute("SELECT min(offset) FROM events").fetchone()[0]
    if first is None:
        return 0
    last = min(first + limit - 1, _acknowledged_by_all(db))
    db.execute("DELETE FROM events WHERE offset <= ?", (last,))
    return last - first + 1


def lost(db: sqlite3.Connection) -> int:
    return int(meta.number(db, LOST))


def state(db: sqlite3.Connection) -> EventLogState:
    acknowledged = dict(db.execute("SELECT name, acknowledged FROM recorders"))
    return EventLogState(_last_offset(db), acknowledged, lost(db))


def sweep(db: sqlite3.Connection, older_than: float, limit: int) -> int:
    """Remove events past their retention that every recorder has acknowledged; as `drop_acknowledged`."""
    first: int | None = db.execute("SELECT min(offset) FROM events").fetchone()[0]
    if first is None:
        return 0
    last = min(first + limit - 1, _acknowledged_by_all(db))
    swept = db.execute("DELETE FROM events WHERE offset <= ? AND recorded_at <= ?", (last, older_than))
    return last - first + 1 if swept.rowcount else 0


def _last_offset(db: sqlite3.Connection) -> int:
    row = db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'events'").fetchone()
    return 0 if row is None else row[0]


def _acknowledged_by_all(db: sqlite3.Connection) -> int:
    lowest: int | None = db.execute("SELECT min(acknowledged) FROM recorders").fetchone()[0]
    return _last_offset(db) if lowest is None else lowest
