"""Messages: how they wait in a queue until they are due, leave it, and come back; pauses and revokes.

`publishing.py` puts messages into queues. All functions run inside a transaction of the caller.

Every claim reads the pauses and the revokes. Revokes are the durable record of tasks that must not start.
Each entry gets a growing cursor, and a claim returns the entries after the cursor that it was given. When
more entries wait than fit into one reply, that claim returns no messages, so no message overtakes the revoke
that names it. No entry is forgotten before it expires: at its limit the record refuses new entries.
"""

import sqlite3
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import msgspec

from umbel.brokers.interface import Delivery, Depth, Pause, Tag
from umbel.brokers.sqlite import rows
from umbel.brokers.sqlite.publishing import UNFILED, file
from umbel.errors import RevokesFull
from umbel.wire.message import Message, unreadable
from umbel.wire.records import Revoke
from umbel.wire.signing import HEADER

# ---- messages --------------------------------------------------------------------------------------

DUE_MAX = 1000  # delayed messages that one claim makes ready; the next claim continues

_decode = msgspec.msgpack.Decoder(Message).decode

_LAST_ID = 2**63 - 1
_LENGTH_BYTES = {0xC4: 1, 0xC5: 2, 0xC6: 4}  # of MessagePack's byte strings, by their type byte


def decode(data: Any) -> Message:
    """The message in a row. Bytes that are no message become a message that the worker buries."""
    try:
        return _decode(data)
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError):
        return unreadable(data if isinstance(data, bytes) else str(data).encode(errors="replace"))


def headers_of(beginning: Any) -> bytes:
    """The headers of a message of which only the beginning was read; b"" if it is no message."""
    if not isinstance(beginning, bytes) or len(beginning) < 2:
        return b""
    start = 2 + _LENGTH_BYTES.get(beginning[1], 0)  # after the array's type byte, and that of the headers
    return beginning[start : start + int.from_bytes(beginning[2:start])]


def tag(ticket: int, number: int) -> str:
    """The tag of one claim of one message."""
    return f"{ticket}:{number}"


def number_of(tag: Tag) -> int:
    """The message that a tag is about."""
    assert isinstance(tag, str), "tags are made by claim()"
    return int(tag[tag.index(":") + 1 :])


def lower_filed(db: sqlite3.Connection) -> None:
    """Lower the id `filed` in `meta` after messages were removed, because their ids may be given again."""
    db.execute(
        """UPDATE meta SET value = (SELECT coalesce(max(id), 0) FROM messages)
           WHERE name = 'filed' AND value > (SELECT coalesce(max(id), 0) FROM messages)"""
    )


def anything_due(db: sqlite3.Connection, queues: Iterable[str], now_s: float) -> bool:
    """Whether a claim on these queues is worth its transaction."""
    if db.execute("SELECT 1 FROM delayed WHERE not_before <= ? LIMIT 1", (now_s,)).fetchone():
        return True
    if db.execute(f"SELECT 1 FROM messages WHERE {UNFILED} LIMIT 1").fetchone():
        return True  # it may be in any queue, and the claim files it
    return any(
        db.execute("SELECT 1 FROM ready WHERE queue = ? LIMIT 1", (name,)).fetchone() for name in queues
    )


def next_due(db: sqlite3.Connection) -> float | None:
    """When the first delayed message is due, in Unix time; None if there is none."""
    found = rows.read_one(db.execute("SELECT min(not_before) FROM delayed"), tuple[float | None])
    return None if found is None else found[0]


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
    """Return claimed messages to their old places in their queues; returns the queues' names."""
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
    return {queue for (queue,) in rows.read(queues, tuple[str])}


def park(db: sqlite3.Connection, number: int, not_before: float) -> set[str]:
    """Delay a claimed message until it is due; returns the name of its queue."""
    db.execute("DELETE FROM claimed WHERE id = ?", (number,))
    found = db.execute("SELECT queue, priority FROM messages WHERE id = ?", (number,))
    row = rows.read_one(found, tuple[str, int])
    if row is None:
        raise rows.Malformed(f"message {number} is claimed and is not there")
    db.execute("INSERT INTO delayed VALUES (?, ?, ?, ?)", (not_before, number, *row))
    return {row[0]}


def remove(db: sqlite3.Connection, ids: Sequence[int]) -> None:
    """Delete claimed messages."""
    packed = rows.pack(ids)
    db.execute("DELETE FROM claimed WHERE id IN (SELECT value FROM json_each(?))", (packed,))
    db.execute("DELETE FROM messages WHERE id IN (SELECT value FROM json_each(?))", (packed,))
    lower_filed(db)


def mark(db: sqlite3.Connection, ids: Sequence[int], *, starts: int, redelivered: bool) -> None:
    """Add to the count of starts, and record whether the messages may have run."""
    if ids and (starts or redelivered):
        db.execute(
            """UPDATE messages SET starts = starts + ?, redelivered = redelivered OR ?
               WHERE id IN (SELECT value FROM json_each(?))""",
            (starts, redelivered, rows.pack(ids)),
        )


def peek(db: sqlite3.Connection, queue: str, limit: int) -> list[Delivery]:
    """The first messages in the order of claims; their tags name no claims."""
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
        for number, name, starts, redelivered, message in rows.read(found, tuple[rows.Id, str, int, int, Any])
    ]


def depths(db: sqlite3.Connection) -> dict[str, Depth]:
    """How many messages of each queue are ready, delayed, claimed, and waiting for a limit."""
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
    return {row[0]: Depth(*row[1:]) for row in rows.read(found, tuple[str, int, int, int, int])}


def ready_depths(db: sqlite3.Connection, queues: Iterable[str]) -> dict[str, Depth]:
    """How many messages of each of these queues are ready; a queue without any is left out."""
    found = db.execute(
        f"""SELECT queue, count(*) FROM (
              SELECT queue FROM ready WHERE queue IN (SELECT value FROM json_each(?1)) UNION ALL
              SELECT queue FROM messages WHERE {UNFILED} AND queue IN (SELECT value FROM json_each(?1)))
            GROUP BY queue ORDER BY queue""",
        (rows.pack(queues),),
    )
    return {queue: Depth(count, 0, 0) for queue, count in rows.read(found, tuple[str, int])}


# ---- pauses and moves ------------------------------------------------------------------------------


class WaitingRow(NamedTuple):
    """A waiting message with its place in its queue."""

    first: int | float  # its priority if it is ready, otherwise when it is due
    number: rows.Id
    message: Any


def read_pauses(db: sqlite3.Connection) -> dict[str, Pause]:
    """The paused queues, sorted by name."""
    found = db.execute("SELECT queue, since, told FROM pauses ORDER BY queue")
    return {
        queue: Pause(since, tuple(rows.strings(nodes)))
        for queue, since, nodes in rows.read(found, tuple[str, float, str])
    }


def not_paused(db: sqlite3.Connection, queues: Iterable[str]) -> list[str]:
    """The queues of these that are not paused, in their order."""
    paused = {queue for (queue,) in rows.read(db.execute("SELECT queue FROM pauses"), tuple[str])}
    return [queue for queue in queues if queue not in paused]


def move_to_queue(db: sqlite3.Connection, source: str, target: str, limit: int) -> tuple[int, bool]:
    """Move up to `limit` messages, ready ones before delayed ones: how many, and whether a signed message
    comes next.

    A message keeps its id, and so its place by age.
    """
    file(db)
    for table, first in (("ready", "priority"), ("delayed", "not_before")):
        found = db.execute(
            f"""SELECT first, id, message FROM messages JOIN (
                  SELECT id AS number, {first} AS first FROM {table}
                  WHERE queue = ? ORDER BY {first}, id LIMIT ?) ON id = number ORDER BY first, id""",
            (source, limit),
        )
        first_in_line = rows.read(found, WaitingRow)
        if first_in_line:
            chosen = list(takewhile(_is_unsigned, first_in_line))
            if chosen:
                _rename(db, table, chosen, source, target)
            return len(chosen), len(chosen) < len(first_in_line)
    return 0, False


def _is_unsigned(row: WaitingRow) -> bool:
    return HEADER.encode() not in decode(row.message).headers


def _rename(
    db: sqlite3.Connection, table: str, chosen: Sequence[WaitingRow], source: str, target: str
) -> None:
    packed, (first, number, _) = rows.pack(row.number for row in chosen), chosen[-1]
    db.execute("UPDATE messages SET queue = ? WHERE id IN (SELECT value FROM json_each(?))", (target, packed))
    if table == "delayed":
        db.execute(
            "UPDATE delayed SET queue = ? WHERE queue = ? AND (not_before, id) <= (?, ?)",
            (target, source, first, number),
        )
        return
    db.execute("DELETE FROM ready WHERE queue = ? AND (priority, id) <= (?, ?)", (source, first, number))
    db.execute(
        """INSERT INTO ready SELECT queue, priority, id FROM messages
           WHERE id IN (SELECT value FROM json_each(?))""",
        (packed,),
    )


# ---- revokes ---------------------------------------------------------------------------------------

PAGE_MAX = 10_000


def record_revokes(db: sqlite3.Connection, batch: Sequence[Revoke], limit: int, now_s: float) -> None:
    """Add entries; RevokesFull if that exceeds the limit."""
    db.executemany(
        """INSERT OR REPLACE INTO revokes (task_id, header, recorded_at, expires_at)
           VALUES (?, ?, ?, ?)""",
        [(entry.task_id, entry.header, entry.recorded_at, entry.expires_at) for entry in batch],
    )
    if not rows.may_exceed(db, "revokes", limit, "cursor"):
        return
    rows.sweep(db, "revokes", now_s, limit, key="cursor")
    if db.execute("SELECT count(*) FROM revokes").fetchone()[0] > limit:
        raise RevokesFull(
            f"the revoke record is at its limit of {limit:,} entries: {len(batch)} more were not recorded; "
            "raise `revokes_max`, shorten `revoke_retention_s`, or purge the queue instead"
        )


def revokes_after(db: sqlite3.Connection, cursor: int, now_s: float) -> tuple[list[Revoke], int, bool]:
    """The entries after a cursor, the cursor after them, and whether there are no more."""
    found = db.execute(
        """SELECT cursor, task_id, recorded_at, expires_at, header FROM revokes
           WHERE cursor > ? ORDER BY cursor LIMIT ?""",
        (cursor, PAGE_MAX),
    )
    page = rows.read(found, tuple[rows.Id, str, float, float, str])
    if not page:
        return [], cursor, True
    news = [revoke for entry in page if (revoke := Revoke(*entry[1:])).is_news(now_s)]
    return news, page[-1][0], len(page) < PAGE_MAX
