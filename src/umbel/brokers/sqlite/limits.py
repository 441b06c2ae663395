"""Limits for the whole cluster, and purges: what claims and waiting messages hold, and how it is freed.

A slot of a limit is a row that names a claim; it counts while that claim stands. A message that waits for a
limit has its state row in `limited`. It is called when it may start: its state row goes to `ready`, or to
`delayed` until it is due, and a row of `slots` without a ticket reserves its turn for CALL_S. No worker
answers a call in a paused queue. So messages of paused queues go back to their queues without a call, and ask
again when the queue is resumed. `protocol/delivery/limits.py` decides about the pace.

A waiting message can hold two things: the key of a unique task, and a turn under a limit, from its call until
it is claimed. A purge frees both in the transaction that removes the message. Mostly nothing in the file
holds either, and a purge then reads no message.
"""

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from umbel.brokers.interface import Permit, Tag
from umbel.brokers.rules import PASSED_OVER_MAX, room_of
from umbel.brokers.sqlite import messages, publishing, rows
from umbel.brokers.sqlite.publishing import file
from umbel.protocol.delivery.limits import Pace, Terms
from umbel.wire.call import holding_of
from umbel.wire.message import HEADERS_MAX_BYTES, Message

# ---- limits for the whole cluster ------------------------------------------------------------------

CALL_S = 30.0  # a call that no worker answers is forgotten after this time
CALLED = 0  # the ticket of a slot whose message is called and not claimed yet


@dataclass(slots=True)
class PermitOutcome:
    """The messages that may not start, and why; the slots that others have got, with their buckets; and the
    queues of messages that were called.
    """

    refused: dict[Tag, str | None] = field(default_factory=dict)
    slots: dict[Tag, str] = field(default_factory=dict)
    queues: set[str] = field(default_factory=set)


def permit_each(
    db: sqlite3.Connection, asked: Sequence[Permit], standing: Mapping[Tag, int], now_s: float
) -> PermitOutcome:
    """Decide which claimed messages may start; the others wait for their limit.

    `standing`: the claims of these that stand.
    """
    made = PermitOutcome()
    for question in asked:
        number = standing.get(question.tag)
        if number is None:
            made.refused[question.tag] = None
            continue
        if question.ends:
            if _end_call(db, question.bucket, number):
                made.queues |= call_waiting(db, question.bucket, now_s)
            continue
        _state(db, question.bucket, question.terms)
        if not _start(db, question, number, now_s):
            _wait(db, question.bucket, number)
            made.refused[question.tag] = ""
        elif question.terms.most:
            made.slots[question.tag] = question.bucket
        made.queues |= call_waiting(db, question.bucket, now_s)
    return made


def free_slots(db: sqlite3.Connection, ended: Mapping[Tag, str], now_s: float) -> set[str]:
    """Free the slots of claims that have ended, and call the next messages; returns their queues."""
    for tag, bucket in ended.items():
        db.execute("DELETE FROM slots WHERE bucket = ? AND id = ?", (bucket, messages.number_of(tag)))
    return call_waiting_in(db, set(ended.values()), now_s)


def end_calls(db: sqlite3.Connection, ids: str, args: Sequence[Any]) -> set[str]:
    """End the calls of messages that are removed; returns the buckets in which the next may be called.

    `ids`: a query of their ids, with its arguments.
    """
    if db.execute("SELECT 1 FROM slots WHERE ticket = ? LIMIT 1", (CALLED,)).fetchone() is None:
        return set()
    ended = db.execute(f"DELETE FROM slots WHERE ticket = {CALLED} AND id IN ({ids}) RETURNING bucket", args)
    return {bucket for (bucket,) in rows.read(ended, tuple[str])}


def sweep_slots(db: sqlite3.Connection, now_s: float) -> set[str]:
    """Free the slots of claims that ended with their owner, and of calls that no worker answered; returns the
    queues of messages that were called.
    """
    gone = f"FROM slots WHERE NOT ({_STANDS})"
    found = db.execute(f"SELECT DISTINCT bucket {gone}", {"now": now_s})
    buckets = {bucket for (bucket,) in rows.read(found, tuple[str])}
    if not buckets:
        return set()
    db.execute(f"DELETE {gone}", {"now": now_s})
    return call_waiting_in(db, buckets, now_s)


def forget_unused(db: sqlite3.Connection, now_s: float, limit: int) -> int:
    """Remove up to `limit` buckets that no message waits for and that allow everything again; how many."""
    return db.execute(
        """DELETE FROM limits WHERE bucket IN (
             SELECT bucket FROM limits WHERE waiting = 0 AND free_at <= ?
             AND NOT EXISTS (SELECT 1 FROM slots WHERE slots.bucket = limits.bucket) LIMIT ?)""",
        (now_s, limit),
    ).rowcount


def recount_waiting(db: sqlite3.Connection) -> None:
    """Count the waiting messages of each bucket again, after messages were removed."""
    db.execute(
        """UPDATE limits SET waiting = (SELECT count(*) FROM limited WHERE limited.bucket = limits.bucket)
           WHERE waiting > 0"""
    )


def call_waiting(db: sqlite3.Connection, bucket: str, now_s: float) -> set[str]:
    """Call the messages of a bucket that may start now, or soon; returns their queues."""
    found = db.execute(
        "SELECT most, interval_s, slack_s, free_at, waiting FROM limits WHERE bucket = ?", (bucket,)
    )
    row = rows.read_one(found, tuple[int, float, float, float, int])
    if row is None or not row[4]:
        return set()
    most, interval_s, slack_s, free_at, _ = row
    taken, pace = _taken(db, bucket), Pace(interval_s, slack_s)
    room = room_of(most, interval_s) - taken
    if room <= 0:
        return set()
    _pass_over_paused(db, bucket)
    in_line = db.execute(
        f"SELECT id, queue, priority FROM limited WHERE bucket = ? AND NOT {_IS_PAUSED} ORDER BY id LIMIT ?",
        (bucket, room),
    )
    called = []
    for ahead, message in enumerate(rows.read(in_line, tuple[rows.Id, str, int]), taken):
        due = now_s if most else pace.due(free_at, now_s, ahead)
        slot = (bucket, message[0], CALLED, due + CALL_S)
        db.execute("INSERT OR REPLACE INTO slots VALUES (?, ?, ?, ?)", slot)
        called.append((*message, due))
    _leave(db, bucket, called, now_s)
    return {queue for _, queue, _, _ in called}


def call_waiting_in(db: sqlite3.Connection, buckets: Iterable[str], now_s: float) -> set[str]:
    """Call the messages of several buckets; returns their queues."""
    return {queue for bucket in buckets for queue in call_waiting(db, bucket, now_s)}


def _pass_over_paused(db: sqlite3.Connection, bucket: str) -> None:
    """Return messages to their paused queues; an index finds them, however many wait in other queues."""
    for (queue,) in rows.read(db.execute("SELECT queue FROM pauses"), tuple[str]):
        found = db.execute(
            "SELECT id, priority FROM limited WHERE queue = ? AND bucket = ? ORDER BY id LIMIT ?",
            (queue, bucket, PASSED_OVER_MAX),
        )
        waiting = rows.read(found, tuple[rows.Id, int])
        _leave(db, bucket, [(number, queue, priority, 0.0) for number, priority in waiting], 0.0)


def _leave(
    db: sqlite3.Connection, bucket: str, leaving: Sequence[tuple[int, str, int, float]], now_s: float
) -> None:
    """(id, queue, priority, when it is due): move waiting messages to their queues."""
    for number, queue, priority, due in leaving:
        db.execute("DELETE FROM limited WHERE bucket = ? AND id = ?", (bucket, number))
        if due > now_s:
            db.execute("INSERT INTO delayed VALUES (?, ?, ?, ?)", (due, number, queue, priority))
        else:
            db.execute("INSERT INTO ready VALUES (?, ?, ?)", (queue, priority, number))
    if leaving:
        db.execute("UPDATE limits SET waiting = waiting - ? WHERE bucket = ?", (len(leaving), bucket))


_IS_PAUSED = "(queue IN (SELECT queue FROM pauses))"


def _state(db: sqlite3.Connection, bucket: str, terms: Terms) -> None:
    """Store the terms of the limit, which may have changed since the last message."""
    pace = terms.pace or Pace(0.0, 0.0)
    db.execute(
        """INSERT INTO limits VALUES (?, ?, ?, ?, 0, 0) ON CONFLICT (bucket) DO UPDATE
           SET most = excluded.most, interval_s = excluded.interval_s, slack_s = excluded.slack_s""",
        (bucket, terms.most, pace.interval_s, pace.slack_s),
    )


def _start(db: sqlite3.Connection, question: Permit, number: int, now_s: float) -> bool:
    was_called = _end_call(db, question.bucket, number)
    if question.terms.most:
        return _take_slot(db, question, number, now_s)
    found = db.execute("SELECT free_at, waiting FROM limits WHERE bucket = ?", (question.bucket,))
    row = rows.read_one(found, tuple[float, int])
    assert row is not None, "its state was written just before"
    free_at, waiting = row
    if not was_called and (waiting or _taken(db, question.bucket, now_s)):
        return False  # other messages wait before this one
    assert question.terms.pace is not None
    taken = question.terms.pace.take(free_at, now_s)
    if taken is not None:
        db.execute("UPDATE limits SET free_at = ? WHERE bucket = ?", (taken, question.bucket))
    return taken is not None


def _take_slot(db: sqlite3.Connection, question: Permit, number: int, now_s: float) -> bool:
    if (
        _taken(db, question.bucket) >= question.terms.most
        and _taken(db, question.bucket, now_s) >= question.terms.most
    ):
        return False
    ticket = str(question.tag).partition(":")[0]
    db.execute("INSERT OR REPLACE INTO slots VALUES (?, ?, ?, 0)", (question.bucket, number, int(ticket)))
    return True


_STANDS = """CASE ticket WHEN 0 THEN until > :now ELSE EXISTS (
    SELECT 1 FROM claimed WHERE claimed.id = slots.id AND claimed.ticket = slots.ticket) END"""


def _taken(db: sqlite3.Connection, bucket: str, now_s: float | None = None) -> int:
    """How many slots are taken; with a time, after removing the slots of claims that no longer stand."""
    if now_s is not None:
        db.execute(
            f"DELETE FROM slots WHERE bucket = :bucket AND NOT ({_STANDS})", {"bucket": bucket, "now": now_s}
        )
    taken: int = db.execute("SELECT count(*) FROM slots WHERE bucket = ?", (bucket,)).fetchone()[0]
    return taken


def _end_call(db: sqlite3.Connection, bucket: str, number: int) -> bool:
    ended = db.execute(
        "DELETE FROM slots WHERE bucket = ? AND id = ? AND ticket = ?", (bucket, number, CALLED)
    )
    return ended.rowcount > 0


def _wait(db: sqlite3.Connection, bucket: str, number: int) -> None:
    db.execute("DELETE FROM claimed WHERE id = ?", (number,))
    db.execute(
        "INSERT INTO limited SELECT ?, id, queue, priority FROM messages WHERE id = ?", (bucket, number)
    )
    db.execute("UPDATE limits SET waiting = waiting + 1 WHERE bucket = ?", (bucket,))


# ---- purges ----------------------------------------------------------------------------------------

# Messages that wait for a limit are removed first, or removing a called message would call them.
_WAITING = (("limited", "bucket, id"), ("ready", "queue, priority, id"), ("delayed", "not_before, id"))
_HEADERS_END = HEADERS_MAX_BYTES + 16  # the first field of a message, with its length prefix


def purge_queue(db: sqlite3.Connection, queue: str, limit: int, now_s: float) -> tuple[int, set[str]]:
    """Remove up to `limit` messages, due or not; claimed messages stay with their owner.

    Returns how many there were, and the queues of messages that a limit has called instead.
    """
    file(db)
    for table, key in _WAITING:
        first, args = f"FROM {table} WHERE queue = ? ORDER BY {key} LIMIT ?", (queue, limit)
        turns = release_held(db, f"SELECT id {first}", args)
        db.execute(f"DELETE FROM messages WHERE id IN (SELECT id {first})", args)
        removed = db.execute(f"DELETE FROM {table} WHERE ({key}) IN (SELECT {key} {first})", args)
        if removed.rowcount:
            messages.lower_filed(db)
            recount_waiting(db)
            return removed.rowcount, call_waiting_in(db, turns, now_s)
    return 0, set()


def release_held(db: sqlite3.Connection, ids: str, args: Sequence[Any]) -> set[str]:
    """Free what messages hold that will be removed; returns the buckets in which the next may be called.

    `ids`: a query of their ids, with its arguments.
    """
    release_keys(db, ids, args)
    return end_calls(db, ids, args)


def release_keys(db: sqlite3.Connection, ids: str, args: Sequence[Any] = ()) -> None:
    """Free the unique keys of these messages. SQLite searches the headers; no message is read as a whole."""
    if not publishing.any_key_held(db):
        return
    found = db.execute(
        f"""SELECT beginning FROM (
              SELECT CAST(substr(message, 1, {_HEADERS_END}) AS BLOB) AS beginning FROM messages
              WHERE id IN ({ids}))
            WHERE instr(beginning, ?) > 0""",
        (*args, b'"umbel_unique"'),
    )
    holding = (holding_of(Message(messages.headers_of(beginning), b"")) for (beginning,) in found)
    publishing.release_unique_keys(
        db, [(held.umbel_unique, held.id) for held in holding if held and held.umbel_unique]
    )
