"""Broadcasts, and the event log that recorders read.

A broadcast is for every subscriber that subscribed before it was sent, until its TTL ends. It is written only
while its exchange has a live subscription. Each subscriber has its own offset in the table, so a slow one
loses only what outlives its TTL, and costs the others nothing. Beyond BROADCASTS_MAX the oldest are removed,
whatever their TTL.

The event log is written only while a recorder is registered, and retains events until all recorders have read
them. An entry holds one event or several; offsets count events, and an entry has the offset of its last
event. Offsets are never given twice, so a reader sees by them which events it missed. Beyond the limit the
oldest entries are removed; events in them that a recorder had not acknowledged are counted as lost.

All functions run inside a transaction of the caller.
"""

import sqlite3
from collections.abc import Sequence
from itertools import accumulate

from umbel.brokers.interface import Broadcast, EventLogState, LoggedEvent
from umbel.brokers.sqlite import rows

# ---- fan-out ---------------------------------------------------------------------------------------

BROADCASTS_MAX = 200_000
SWEEP_MAX = 1000  # expired broadcasts that one new broadcast removes


def add_subscription(db: sqlite3.Connection, exchange: str, expires_at: float) -> tuple[int, int]:
    """Add a subscription; returns its number, and the offset after which its broadcasts come."""
    number = db.execute(
        "INSERT INTO subscriptions (exchange, expires_at) VALUES (?, ?)", (exchange, expires_at)
    ).lastrowid
    assert number is not None
    return number, rows.last_of_sequence(db, "broadcasts")


def prolong_subscription(db: sqlite3.Connection, number: int, exchange: str, expires_at: float) -> None:
    """Extend a subscription, or create it again if it had expired."""
    db.execute("INSERT OR REPLACE INTO subscriptions VALUES (?, ?, ?)", (number, exchange, expires_at))


def with_listeners(db: sqlite3.Connection, batch: Sequence[Broadcast], now_boot_s: float) -> list[Broadcast]:
    """The broadcasts of the batch whose exchange has a live subscription."""
    found = db.execute("SELECT DISTINCT exchange FROM subscriptions WHERE expires_at > ?", (now_boot_s,))
    exchanges = {exchange for (exchange,) in rows.read(found, tuple[str])}
    return [broadcast for broadcast in batch if broadcast.exchange in exchanges]


def send_broadcasts(
    db: sqlite3.Connection, batch: Sequence[Broadcast], now_boot_s: float, ttl_s: float
) -> None:
    """Write broadcasts, and remove some expired ones, and the oldest beyond the limit."""
    new = [(item.exchange, item.routing_key, item.body, item.headers, now_boot_s + ttl_s) for item in batch]
    rows.insert(db, "broadcasts (exchange, routing_key, body, headers, expires_at)", new)
    rows.sweep(db, "broadcasts", now_boot_s, SWEEP_MAX, key="offset")
    db.execute(
        "DELETE FROM broadcasts WHERE offset <= (SELECT max(offset) FROM broadcasts) - ?", (BROADCASTS_MAX,)
    )


def read_broadcasts(
    db: sqlite3.Connection, exchange: str, after: int, limit: int, now_boot_s: float
) -> tuple[list[Broadcast], int]:
    """Broadcasts after an offset, and the offset to continue from."""
    found = db.execute(
        """SELECT offset, exchange, routing_key, body, headers, expires_at FROM broadcasts
           WHERE offset > ? AND exchange = ? ORDER BY offset LIMIT ?""",
        (after, exchange, limit),
    )
    page = rows.read(found, tuple[rows.Id, str, str, bytes, bytes, float])
    if not page:
        return [], after
    return [Broadcast(*row[1:5]) for row in page if row[5] > now_boot_s], page[-1][0]


# ---- event log -------------------------------------------------------------------------------------


def put_recorder(db: sqlite3.Connection, name: str) -> int:
    """Log events for this recorder, too; returns the offset that it has acknowledged."""
    db.execute("INSERT OR IGNORE INTO recorders VALUES (?, ?)", (name, _last_offset(db)))
    found = db.execute("SELECT acknowledged FROM recorders WHERE name = ?", (name,))
    row = rows.read_one(found, tuple[rows.Id])
    assert row is not None, "it was inserted above"
    return row[0]


def recorder_names(db: sqlite3.Connection) -> list[str]:
    """The names of the registered recorders, sorted."""
    return [name for (name,) in rows.read(db.execute("SELECT name FROM recorders ORDER BY name"), tuple[str])]


def append_entries(
    db: sqlite3.Connection,
    entries: Sequence[tuple[str, bytes]],
    counts: Sequence[int],
    limit: int,
    now_s: float,
) -> None:
    """Add entries at the end, and drop the oldest beyond the limit."""
    offsets = accumulate(counts or [1] * len(entries), initial=_last_offset(db))
    next(offsets)
    new = [(offset, now_s, *entry) for offset, entry in zip(offsets, entries, strict=True)]
    rows.insert(db, "events (offset, recorded_at, routing_key, body)", new)
    _make_room(db, new[-1][0] - limit)


def _make_room(db: sqlite3.Connection, last: int) -> None:
    """Drop the entries up to this offset."""
    found = db.execute("SELECT offset FROM events WHERE offset <= ? ORDER BY offset DESC LIMIT 1", (last,))
    row = rows.read_one(found, tuple[rows.Id])
    if row is None:
        return
    known = max(_acknowledged_by_all(db), rows.meta_count(db, rows.EVENTS_DROPPED))
    db.execute("DELETE FROM events WHERE offset <= ?", (row[0],))
    rows.add_to_meta(db, rows.EVENTS_LOST, max(0, row[0] - known))
    rows.put_meta(db, rows.EVENTS_DROPPED, row[0])


def read_entries(db: sqlite3.Connection, name: str, limit: int, after: int) -> list[LoggedEvent]:
    """The entries after what the recorder has acknowledged, oldest first."""
    place = db.execute("SELECT max(acknowledged, ?) FROM recorders WHERE name = ?", (after, name))
    row = rows.read_one(place, tuple[rows.Id])
    if row is None:
        return []
    select = "SELECT offset, recorded_at, routing_key, body FROM events WHERE offset > ?"
    some = db.execute(f"{select} AND offset <= ? ORDER BY offset", (row[0], row[0] + limit))
    found = rows.read(some, tuple[rows.Id, float, str, bytes])
    if not found:  # the next entry may be longer than that, or those before it are gone
        following = db.execute(f"{select} ORDER BY offset LIMIT 1", (row[0],))
        found = rows.read(following, tuple[rows.Id, float, str, bytes])
    return [LoggedEvent(*entry) for entry in found]


def drop_acknowledged(db: sqlite3.Connection, limit: int, *, before: float | None = None) -> int:
    """Remove entries that all recorders have acknowledged, oldest first; only those logged until `before`, if
    that is given.

    At most `limit` events are removed. Returns how many offsets this looked at; fewer than `limit` means that
    there are no more.
    """
    first: int | None = db.execute("SELECT min(offset) FROM events").fetchone()[0]
    if first is None:
        return 0
    last = min(first + limit - 1, _acknowledged_by_all(db))
    old, args = ("", (last,)) if before is None else ("AND recorded_at <= ?", (last, before))
    dropped = db.execute(f"DELETE FROM events WHERE offset <= ? {old}", args)
    return last - first + 1 if dropped.rowcount else 0


def event_log_state(db: sqlite3.Connection) -> EventLogState:
    """The last offset, what each recorder has acknowledged, and how many events were lost."""
    found = db.execute("SELECT name, acknowledged FROM recorders")
    acknowledged = dict(rows.read(found, tuple[str, rows.Id]))
    return EventLogState(_last_offset(db), acknowledged, rows.meta_count(db, rows.EVENTS_LOST))


def _last_offset(db: sqlite3.Connection) -> int:
    return rows.last_of_sequence(db, "events")


def _acknowledged_by_all(db: sqlite3.Connection) -> int:
    found = rows.read_one(db.execute("SELECT min(acknowledged) FROM recorders"), tuple[rows.Id | None])
    return _last_offset(db) if found is None or found[0] is None else found[0]
