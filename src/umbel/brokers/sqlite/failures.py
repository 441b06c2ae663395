"""Failures: messages of failed tasks, kept for `failed_keep_s`; beyond `failed_keep` the oldest make room.

They are moved here in the transaction that settles the failed task, and leave in the one that sends the
retry, so no crash loses one or sends it twice.
"""

import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

from umbel.brokers.interface import BrokerSettings, DeadLetter, Refused, Resend, Resent
from umbel.brokers.sqlite import messages, meta, publishing, refusals, rows
from umbel.wire.message import Outgoing

DROPPED = "failed_dropped"
EXPIRED_MAX = 1000  # that one transaction removes; the next goes on
_COLUMNS = "task_id, queue, priority, starts, reason, buried_at, message"


def keep(db: sqlite3.Connection, reasons: Mapping[int, str], settings: BrokerSettings, now_s: float) -> None:
    """Copy claimed messages; the caller removes them from their queues."""
    found = db.execute(
        """SELECT id, queue, priority, starts, message FROM messages
           WHERE id IN (SELECT value FROM json_each(?)) ORDER BY id""",
        (rows.pack(reasons),),
    )
    kept = [
        (messages.decode(message).correlation_id, queue, priority, starts, reasons[number], now_s, message)
        for number, queue, priority, starts, message in found
    ]
    _add(db, kept)
    make_room(db, settings, now_s)


def keep_sent(
    db: sqlite3.Connection, failed: Sequence[Refused], settings: BrokerSettings, now_s: float
) -> None:
    """Keep messages that are in no queue any more, if they can be written at all."""

    def put(one: Refused) -> None:
        if isinstance(one.part, Outgoing):
            queue, priority, message = publishing.row(one.part.as_letter())
            _add(db, [(one.part.message.correlation_id, queue, priority, 0, one.reason, now_s, message)])

    refusals.apply_each(db, failed, put)
    make_room(db, settings, now_s)


def read(
    db: sqlite3.Connection, limit: int, task_id: str, settings: BrokerSettings, now_s: float
) -> list[DeadLetter]:
    found = db.execute(
        f"""SELECT id, queue, message, reason, starts, buried_at FROM failed
            WHERE buried_at > ? {"AND task_id = ?" if task_id else ""} ORDER BY id DESC LIMIT ?""",
        (now_s - settings.failed_keep_s, *([task_id] if task_id else []), limit),
    )
    return [
        DeadLetter(number, queue, messages.decode(message), reason, starts, buried_at, failed=True)
        for number, queue, message, reason, starts, buried_at in found
    ]


def resend(
    db: sqlite3.Connection, letters: Sequence[Resend], first: int, now_s: float
) -> tuple[Resent, set[str]]:
    """Send what still has its letter; `first`: the place of the first of these. And the queues that grew."""
    sent: set[int] = set()
    refused: dict[int, str] = {}
    grown: set[str] = set()

    def put(place: int) -> None:
        one = letters[place - first]
        table = "failed" if one.letter.failed else "dead_letters"
        gone = db.execute(f"DELETE FROM {table} WHERE id = ?", (int(one.letter.letter_id),)).rowcount
        if gone and one.outgoing is not None:
            grown.update(publishing.insert(db, [one.outgoing], now_s))
            sent.add(place)

    for place, why in refusals.apply_each(db, range(first, first + len(letters)), put):
        refused[place] = why
        sent.discard(place)
    return Resent(frozenset(sent), refused), grown


def make_room(db: sqlite3.Connection, settings: BrokerSettings, now_s: float) -> None:
    db.execute(
        """DELETE FROM failed WHERE id IN
           (SELECT id FROM failed WHERE buried_at <= ? ORDER BY buried_at LIMIT ?)""",
        (now_s - settings.failed_keep_s, EXPIRED_MAX),
    )
    # Ids only grow, so their span is the most there can be; each end is asked for by itself (an index).
    low, high = db.execute("SELECT (SELECT min(id) FROM failed), (SELECT max(id) FROM failed)").fetchone()
    if low is None or high - low < settings.failed_keep:
        return
    excess = db.execute("SELECT count(*) FROM failed").fetchone()[0] - settings.failed_keep
    if excess > 0:
        db.execute("DELETE FROM failed WHERE id IN (SELECT id FROM failed ORDER BY id LIMIT ?)", (excess,))
        meta.add(db, DROPPED, excess)


def _add(db: sqlite3.Connection, kept: Sequence[Sequence[Any]]) -> None:
    rows.insert(db, f"failed ({_COLUMNS})", kept)
