"""Limits for the whole cluster: which claimed messages may start now, and who waits for whom.

A slot is a row that names a claim; it counts while that claim stands. Who waits has its slip in `limited`,
and is called when it may start: its slip goes to `ready`, or to `delayed` until it is due, and a row of
`slots` without a ticket keeps its place for CALL_S. Nobody answers in a paused queue: what waits there goes
back to it without a call, and asks anew when that is resumed. The pace is decided by
`protocol/delivery/limits.py`.
"""

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from umbel.brokers.interface import Permit, Tag
from umbel.brokers.sqlite import messages
from umbel.protocol.delivery.limits import Pace, Terms

CALL_S = 30.0  # a call that is not answered (the message was purged, or revoked) is forgotten after so long
AHEAD_S, AHEAD_MAX = 1.0, 100  # so many of a bucket with a pace are called before they are due
PASSED_OVER_MAX = 1000  # of paused queues, at once; the rest of them wait
CALLED = 0  # the ticket of a slot whose message was called and is not claimed yet


@dataclass(slots=True)
class Permitted:
    """`refused`: those that may not start, and why; `slots`: the buckets that the others hold a slot of."""

    refused: dict[Tag, str | None] = field(default_factory=dict)
    slots: dict[Tag, str] = field(default_factory=dict)
    queues: set[str] = field(default_factory=set)  # that grew


def permit(
    db: sqlite3.Connection, asked: Sequence[Permit], standing: Mapping[Tag, int], now_s: float
) -> Permitted:
    made = Permitted()
    for one in asked:
        number = standing.get(one.tag)
        if number is None:
            made.refused[one.tag] = None
            continue
        if one.ends:
            if _end_call(db, one.bucket, number):
                made.queues |= call(db, one.bucket, now_s)
            continue
        _state(db, one.bucket, one.terms)
        if not _start(db, one, number, now_s):
            _wait(db, one.bucket, number)
            made.refused[one.tag] = ""
        elif one.terms.most:
            made.slots[one.tag] = one.bucket
        made.queues |= call(db, one.bucket, now_s)
    return made


def free(db: sqlite3.Connection, ended: Mapping[Tag, str], now_s: float) -> set[str]:
    """These claims have ended: others may start; the queues that grew."""
    for tag, bucket in ended.items():
        db.execute("DELETE FROM slots WHERE bucket = ? AND id = ?", (bucket, messages.number_of(tag)))
    return _call_all(db, set(ended.values()), now_s)


def sweep(db: sqlite3.Connection, now_s: float) -> set[str]:
    """Free the slots of claims that ended with their owner, and of calls that nobody answered."""
    gone = f"FROM slots WHERE NOT ({_STANDS})"
    buckets = {bucket for (bucket,) in db.execute(f"SELECT DISTINCT bucket {gone}", {"now": now_s})}
    if not buckets:
        return set()
    db.execute(f"DELETE {gone}", {"now": now_s})
    return _call_all(db, buckets, now_s)


def forget_unused(db: sqlite3.Connection, now_s: float, limit: int) -> int:
    """Remove buckets that nobody waits for, and that allow everything again."""
    return db.execute(
        """DELETE FROM limits WHERE bucket IN (
             SELECT bucket FROM limits WHERE waiting = 0 AND free_at <= ?
             AND NOT EXISTS (SELECT 1 FROM slots WHERE slots.bucket = limits.bucket) LIMIT ?)""",
        (now_s, limit),
    ).rowcount


def recount(db: sqlite3.Connection) -> None:
    """After messages that wait were removed."""
    db.execute(
        """UPDATE limits SET waiting = (SELECT count(*) FROM limited WHERE limited.bucket = limits.bucket)
           WHERE waiting > 0"""
    )


def call(db: sqlite3.Connection, bucket: str, now_s: float) -> set[str]:
    """Call those that may start now, or soon; the queues that grew."""
    found = db.execute(
        "SELECT most, interval_s, slack_s, free_at, waiting FROM limits WHERE bucket = ?", (bucket,)
    ).fetchone()
    if found is None or not found[4]:
        return set()
    most, interval_s, slack_s, free_at, _ = found
    taken, pace = _taken(db, bucket), Pace(interval_s, slack_s)
    room = (most or max(1, min(AHEAD_MAX, int(AHEAD_S / interval_s)))) - taken
    if room <= 0:
        return set()
    _pass_over_paused(db, bucket)
    first = db.execute(
        f"SELECT id, queue, priority FROM limited WHERE bucket = ? AND NOT {_IS_PAUSED} ORDER BY id LIMIT ?",
        (bucket, room),
    ).fetchall()
    for ahead, (number, queue, priority) in enumerate(first, taken):
        due = now_s if most else pace.due(free_at, now_s, ahead)
        db.execute("DELETE FROM limited WHERE bucket = ? AND id = ?", (bucket, number))
        db.execute("INSERT OR REPLACE INTO slots VALUES (?, ?, ?, ?)", (bucket, number, CALLED, due + CALL_S))
        if due > now_s:
            db.execute("INSERT INTO delayed VALUES (?, ?, ?, ?)", (due, number, queue, priority))
        else:
            db.execute("INSERT INTO ready VALUES (?, ?, ?)", (queue, priority, number))
    db.execute("UPDATE limits SET waiting = waiting - ? WHERE bucket = ?", (len(first), bucket))
    return {queue for _, queue, _ in first}


def _pass_over_paused(db: sqlite3.Connection, bucket: str) -> None:
    found = db.execute(
        f"SELECT id, queue, priority FROM limited WHERE bucket = ? AND {_IS_PAUSED} ORDER BY id LIMIT ?",
        (bucket, PASSED_OVER_MAX),
    ).fetchall()
    for number, queue, priority in found:
        db.execute("DELETE FROM limited WHERE bucket = ? AND id = ?", (bucket, number))
        db.execute("INSERT INTO ready VALUES (?, ?, ?)", (queue, priority, number))
    if found:
        db.execute("UPDATE limits SET waiting = waiting - ? WHERE bucket = ?", (len(found), bucket))


_IS_PAUSED = "(queue IN (SELECT queue FROM pauses))"


def _call_all(db: sqlite3.Connection, buckets: Iterable[str], now_s: float) -> set[str]:
    return {queue for bucket in buckets for queue in call(db, bucket, now_s)}


def _state(db: sqlite3.Connection, bucket: str, terms: Terms) -> None:
    """What holds from now on; the task may have been given another limit since."""
    pace = terms.pace or Pace(0.0, 0.0)
    db.execute(
        """INSERT INTO limits VALUES (?, ?, ?, ?, 0, 0) ON CONFLICT (bucket) DO UPDATE
           SET most = excluded.most, interval_s = excluded.interval_s, slack_s = excluded.slack_s""",
        (bucket, terms.most, pace.interval_s, pace.slack_s),
    )


def _start(db: sqlite3.Connection, one: Permit, number: int, now_s: float) -> bool:
    was_called = _end_call(db, one.bucket, number)
    if one.terms.most:
        return _take_slot(db, one, number, now_s)
    free_at, waiting = db.execute(
        "SELECT free_at, waiting FROM limits WHERE bucket = ?", (one.bucket,)
    ).fetchone()
    if not was_called and (waiting or _taken(db, one.bucket, now_s)):
        return False  # others came before
    assert one.terms.pace is not None
    taken = one.terms.pace.take(free_at, now_s)
    if taken is not None:
        db.execute("UPDATE limits SET free_at = ? WHERE bucket = ?", (taken, one.bucket))
    return taken is not None


def _take_slot(db: sqlite3.Connection, one: Permit, number: int, now_s: float) -> bool:
    if _taken(db, one.bucket) >= one.terms.most and _taken(db, one.bucket, now_s) >= one.terms.most:
        return False
    ticket = str(one.tag).partition(":")[0]
    db.execute("INSERT OR REPLACE INTO slots VALUES (?, ?, ?, 0)", (one.bucket, number, int(ticket)))
    return True


_STANDS = """CASE ticket WHEN 0 THEN until > :now ELSE EXISTS (
    SELECT 1 FROM claimed WHERE claimed.id = slots.id AND claimed.ticket = slots.ticket) END"""


def _taken(db: sqlite3.Connection, bucket: str, now_s: float | None = None) -> int:
    """How many slots there are; with a time, after those that stand no more are gone."""
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
