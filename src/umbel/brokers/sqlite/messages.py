"""Messages: how they wait in a queue until they are due, leave it, and come back to it.

How they enter it is in `publishing.py`. Functions here and in `claims.py` and `verdicts.py` run inside a
transaction of the caller.
"""

import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from umbel.brokers.interface import Delivery, Tag
from umbel.brokers.sqlite import rows
from umbel.brokers.sqlite.publishing import UNFILED, file
from umbel.wire.message import Message, unreadable

DUE_MAX = 1000  # delayed messages that one claim makes ready; the next claim goes on

_decode = msgspec.msgpack.Decoder(Message).decode

_LAST_ID = 2**63 - 1


def decode(data: Any) -> Message:
    """What is no message, because somebody else wrote into the file, is handed on to be buried."""
    try:
        return _decode(data)
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError):
        return unreadable(data if isinstance(data, bytes) else str(data).encode(errors="replace"))


def tag(ticket: int, number: int) -> str:
    """Names one claim of one message."""
    return f"{ticket}:{number}"


def number_of(tag: Tag) -> int:
    """The message that a tag is about."""
    assert isinstance(tag, str), "tags are made by claim()"
    return int(tag[tag.index(":") + 1 :])


def _lower_mark(db: sqlite3.Connection) -> None:
    """After messages were removed: the next one gets an id that may have been theirs."""
    db.execute(
        """UPDATE meta SET value = (SELECT coalesce(max(id), 0) FROM messages)
           WHERE name = 'filed' AND value > (SELECT coalesce(max(id), 0) FROM messages)"""
    )


def anything_due(db: sqlite3.Connection, queues: Iterable[str], now_s: float) -> bool:
    """Whether a claim on these queues is worth its transaction."""
    if db.execute("SELECT 1 FROM delayed WHERE not_before <= ? LIMIT 1", (now_s,)).fetchone():
        return True
    if db.execute(f"SELECT 1 FROM messages WHERE {UNFILED} LIMIT 1").fetchone():
        return True  # of whichever queue: the claim files it
    return any(
        db.execute("SELECT 1 FROM ready WHERE queue = ? LIMIT 1", (name,)).fetchone() for name in queues
    )


def next_due(db: sqlite3.Connection) -> float | None:
    due: float | None = db.execute("SELECT min(not_before) FROM delayed").fetchone()[0]
    return due


def release_due(db: sqlite3.Connection, now_s: float) -> None:
    """Move delayed messages whose time has come into their queues, at most DUE_MAX of them."""
    last = db.execute(
        "SELECT not_before, id FROM delayed WHERE not_before <= ? ORDER BY not_before, id LIMIT 1 OFFSET ?",
        (now_s, DUE_MAX - 1),
    ).fetchone() or (now_s, _LAST_ID)
    moved = db.execute(
        "INSERT INTO ready SELECT queue, priority, id FROM delayed WHERE (not_before, id) <= (?, ?)", last
    )
    if moved.rowcount:
        db.execute("DELETE FROM delayed WHERE (not_before, id) <= (?, ?)", last)


def put_back(db: sqlite3.Connection, ids: Sequence[int]) -> set[str]:
    """Claimed messages stand in their queues again, at their old places; the queues' names."""
    packed = rows.pack(ids)
    db.execute("DELETE FROM claimed WHERE id IN (SELECT value FROM json_each(?))", (packed,))
    db.execute(
        """INSERT INTO ready SELECT queue, priority, id FROM messages
           WHERE id IN (SELECT value FROM json_each(?))""",
        (packed,),
    )
    queues = db.execute(
        "SELECT DISTINCT queue FROM messages WHERE id IN (SELECT value FROM json_each(?))", (packed,)
    )
    return {queue for (queue,) in queues}


def park(db: sqlite3.Connection, number: int, not_before: float) -> set[str]:
    """A claimed message waits until it is due; the name of its queue."""
    db.execute("DELETE FROM claimed WHERE id = ?", (number,))
    queue, priority = db.execute("SELECT queue, priority FROM messages WHERE id = ?", (number,)).fetchone()
    db.execute("INSERT INTO delayed VALUES (?, ?, ?, ?)", (not_before, number, queue, priority))
    return {queue}


def remove(db: sqlite3.Connection, ids: Sequence[int]) -> None:
    """Claimed messages are done with."""
    packed = rows.pack(ids)
    db.execute("DELETE FROM claimed WHERE id IN (SELECT value FROM json_each(?))", (packed,))
    db.execute("DELETE FROM messages WHERE id IN (SELECT value FROM json_each(?))", (packed,))
    _lower_mark(db)


def mark(db: sqlite3.Connection, ids: Sequence[int], *, starts: int, redelivered: bool) -> None:
    """Count so many starts more, and remember that the messages may have run."""
    if ids and (starts or redelivered):
        db.execute(
            """UPDATE messages SET starts = starts + ?, redelivered = redelivered OR ?
               WHERE id IN (SELECT value FROM json_each(?))""",
            (starts, redelivered, rows.pack(ids)),
        )


def peek(db: sqlite3.Connection, queue: str, limit: int) -> list[Delivery]:
    """The first messages in line, in the order of claims; their tags claim nothing."""
    found = db.execute(
        f"""SELECT id, queue, starts, redelivered, message FROM (
              SELECT * FROM (
                SELECT id AS number, priority AS first FROM ready WHERE queue = ?1
                ORDER BY priority, id LIMIT ?2)
              UNION ALL
              SELECT id, priority FROM messages WHERE queue = ?1 AND {UNFILED})
            JOIN messages ON id = number ORDER BY first, id LIMIT ?2""",
        (queue, limit),
    )
    return [
        Delivery(tag(0, number), name, decode(message), starts, bool(redelivered))
        for number, name, starts, redelivered, message in found
    ]


def depths(db: sqlite3.Connection) -> dict[str, tuple[int, int, int, int]]:
    """Of every queue that holds a message: how many are ready, delayed, claimed, waiting for a limit."""
    found = db.execute(
        f"""SELECT queue, sum(ready), sum(delayed), sum(claimed), sum(limited) FROM (
             SELECT queue, count(*) AS ready, 0 AS delayed, 0 AS claimed, 0 AS limited
             FROM ready GROUP BY queue UNION ALL
             SELECT queue, count(*), 0, 0, 0 FROM messages WHERE {UNFILED} GROUP BY queue UNION ALL
             SELECT queue, 0, count(*), 0, 0 FROM delayed GROUP BY queue UNION ALL
             SELECT queue, 0, 0, count(*), 0 FROM claimed JOIN messages USING (id) GROUP BY queue UNION ALL
             SELECT queue, 0, 0, 0, count(*) FROM limited GROUP BY queue)
           GROUP BY queue ORDER BY queue"""
    )
    return {queue: (ready, delayed, claimed, limited) for queue, ready, delayed, claimed, limited in found}


_SLIPS = (("ready", "queue, priority, id"), ("delayed", "not_before, id"), ("limited", "bucket, id"))


def purge(db: sqlite3.Connection, queue: str, limit: int) -> int:
    """Remove up to `limit` messages that wait, due or not; what is claimed stays with its owner."""
    file(db)
    for table, key in _SLIPS:
        some = f"FROM {table} WHERE queue = ? ORDER BY {key} LIMIT ?"
        db.execute(f"DELETE FROM messages WHERE id IN (SELECT id {some})", (queue, limit))
        removed = db.execute(f"DELETE FROM {table} WHERE ({key}) IN (SELECT {key} {some})", (queue, limit))
        if removed.rowcount:
            _lower_mark(db)
            return removed.rowcount
    return 0
