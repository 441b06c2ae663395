"""Fan-out: broadcasts for everyone who subscribed before they were sent, until their TTL ends.

A broadcast is written only while its exchange has a live subscription. Each subscriber keeps
its own place in the table, so a slow one loses nothing but what outlived its TTL, and costs the
others nothing. At BROADCASTS_MAX the oldest go, whatever their TTL.
"""

import sqlite3
from collections.abc import Sequence

from umbel.brokers.interface import Broadcast
from umbel.brokers.sqlite import rows

BROADCASTS_MAX = 200_000
SWEEP_MAX = 1000  # expired ones that one broadcast clears away


def subscribe(db: sqlite3.Connection, exchange: str, expires_at: float) -> tuple[int, int]:
    """A new subscription: its number, and the offset after which its broadcasts come."""
    number = db.execute(
        "INSERT INTO subscriptions (exchange, expires_at) VALUES (?, ?)", (exchange, expires_at)
    ).lastrowid
    assert number is not None
    row = db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'broadcasts'").fetchone()
    return number, 0 if row is None else row[0]


def prolong(db: sqlite3.Connection, number: int, exchange: str, expires_at: float) -> None:
    db.execute("INSERT OR REPLACE INTO subscriptions VALUES (?, ?, ?)", (number, exchange, expires_at))


def unsubscribe(db: sqlite3.Connection, number: int) -> None:
    db.execute("DELETE FROM subscriptions WHERE id = ?", (number,))


def heard(db: sqlite3.Connection, batch: Sequence[Broadcast], now_boot_s: float) -> list[Broadcast]:
    """Those of the batch that somebody listens to."""
    found = db.execute("SELECT DISTINCT exchange FROM subscriptions WHERE expires_at > ?", (now_boot_s,))
    exchanges = {exchange for (exchange,) in found}
    return [broadcast for broadcast in batch if broadcast.exchange in exchanges]


def send(db: sqlite3.Connection, batch: Sequence[Broadcast], now_boot_s: float, ttl_s: float) -> None:
    new = [(item.exchange, item.routing_key, item.body, item.headers, now_boot_s + ttl_s) for item in batch]
    rows.insert(db, "broadcasts (exchange, routing_key, body, headers, expires_at)", new)
    sweep(db, now_boot_s, SWEEP_MAX)
    db.execute(
        "DELETE FROM broadcasts WHERE offset <= (SELECT max(offset) FROM broadcasts) - ?", (BROADCASTS_MAX,)
    )


def read(
    db: sqlite3.Connection, exchange: str, after: int, limit: int, now_boot_s: float
) -> tuple[list[Broadcast], int]:
    """Broadcasts after an offset, and the offset to go on from."""
    found = db.execute(
        """SELECT offset, exchange, routing_key, body, headers, expires_at FROM broadcasts
           WHERE offset > ? AND exchange = ? ORDER BY offset LIMIT ?""",
        (after, exchange, limit),
    ).fetchall()
    if not found:
        return [], after
    return [Broadcast(*row[1:5]) for row in found if row[5] > now_boot_s], found[-1][0]


def sweep(db: sqlite3.Connection, now_boot_s: float, limit: int) -> int:
    return db.execute(
        """DELETE FROM broadcasts WHERE offset IN (
             SELECT offset FROM broadcasts WHERE expires_at <= ? ORDER BY expires_at LIMIT ?)""",
        (now_boot_s, limit),
    ).rowcount


def sweep_subscriptions(db: sqlite3.Connection, now_boot_s: float) -> None:
    db.execute("DELETE FROM subscriptions WHERE expires_at <= ?", (now_boot_s,))
