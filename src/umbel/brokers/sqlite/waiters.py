"""Waiters: who wants to be poked when something happens on a channel.

A waiter registers and then looks again before it sleeps; a writer looks for waiters inside the
transaction that makes the change, or after it. Whichever comes first, the change or the registering,
the other one sees it, so no wake-up is lost between the two.
"""

import sqlite3
from collections.abc import Iterable

from umbel.brokers.sqlite import rows

ANYBODY = "SELECT 1 FROM waiters LIMIT 1"


def queue(name: str) -> str:
    return f"queue:{name}"


def topic(exchange: str) -> str:
    return f"topic:{exchange}"


def result(task_id: str) -> str:
    return f"result:{task_id}"


def register(db: sqlite3.Connection, channels: Iterable[str], address: bytes) -> None:
    new = [(channel, address) for channel in channels]
    rows.insert(db, "waiters", new, otherwise="ON CONFLICT DO NOTHING")


def is_registered(db: sqlite3.Connection, channels: Iterable[str], address: bytes) -> bool:
    return all(
        db.execute("SELECT 1 FROM waiters WHERE channel = ? AND address = ?", (channel, address)).fetchone()
        for channel in channels
    )


def unregister(db: sqlite3.Connection, addresses: Iterable[bytes]) -> None:
    db.executemany("DELETE FROM waiters WHERE address = ?", [(address,) for address in addresses])


def addresses(db: sqlite3.Connection, channels: Iterable[str] | None = None) -> set[bytes]:
    """Who waits on one of the channels, or on any. Mostly nobody does, and that is quickly seen."""
    if channels is None:
        return {address for (address,) in db.execute("SELECT DISTINCT address FROM waiters")}
    if db.execute(ANYBODY).fetchone() is None:
        return set()
    found = db.execute(
        "SELECT DISTINCT address FROM waiters WHERE channel IN (SELECT value FROM json_each(?))",
        (rows.pack(channels),),
    )
    return {address for (address,) in found}
