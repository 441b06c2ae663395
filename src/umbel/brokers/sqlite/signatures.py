"""Signatures that were used: each by one row of `messages`, until that has ended and a copy would be too old.

A message that comes back is the same row, so it may use its signature again; a copy is another row. When a
message ends its id may be given to another, so its signature is then noted as nobody's.
"""

import sqlite3
from collections.abc import Iterable, Sequence

from umbel.brokers.interface import Spend, Tag
from umbel.brokers.sqlite import messages

NOBODYS = 0


def spend(db: sqlite3.Connection, signatures: Sequence[Spend]) -> frozenset[Tag]:
    """Use them; the tags of the messages that are copies."""
    return frozenset(one.tag for one in signatures if not _use(db, one))


def end(db: sqlite3.Connection, marks: Iterable[str]) -> None:
    db.executemany("UPDATE signatures SET message_id = ? WHERE mark = ?", [(NOBODYS, one) for one in marks])


def sweep(db: sqlite3.Connection, now_s: float, limit: int) -> int:
    return db.execute(
        "DELETE FROM signatures WHERE mark IN (SELECT mark FROM signatures WHERE expires_at <= ? LIMIT ?)",
        (now_s, limit),
    ).rowcount


def _use(db: sqlite3.Connection, one: Spend) -> bool:
    number = messages.number_of(one.tag)
    used = db.execute(
        """INSERT INTO signatures VALUES (?, ?, ?) ON CONFLICT (mark) DO UPDATE
           SET expires_at = excluded.expires_at WHERE message_id = excluded.message_id""",
        (one.mark, number, one.expires_at),
    )
    return used.rowcount > 0
