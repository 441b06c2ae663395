"""Dead letters: messages that were given up, with the reason, until somebody requeues them.

At the limit the oldest makes room, and `dead_letters_dropped` in `meta` counts it.
"""

import sqlite3
from collections.abc import Mapping, Sequence

from umbel.brokers.interface import DeadLetter, Refused
from umbel.brokers.sqlite import messages, meta, refusals, rows
from umbel.brokers.sqlite.publishing import insert, row
from umbel.wire.message import Outgoing, outgoing_of_letter
from umbel.wire.signing import Keyring

DEAD_LETTERS_MAX = 100_000
DROPPED = "dead_letters_dropped"


def bury(db: sqlite3.Connection, reasons: Mapping[int, str], now_s: float) -> None:
    """Copy messages to the dead letters, each with its reason; the caller removes them from their queues."""
    db.executemany(
        """INSERT INTO dead_letters (queue, priority, starts, reason, buried_at, message)
           SELECT queue, priority, starts, ?, ?, message FROM messages WHERE id = ?""",
        [(reason, now_s, number) for number, reason in reasons.items()],
    )
    _make_room(db)


def bury_refused(db: sqlite3.Connection, refused: Sequence[Refused], now_s: float) -> None:
    """Make dead letters of the messages among these that can be written at all."""

    def put(one: Refused) -> None:
        if isinstance(one.part, Outgoing):
            queue, priority, message = row(one.part.as_letter())
            db.execute(
                """INSERT INTO dead_letters (queue, priority, starts, reason, buried_at, message)
                   VALUES (?, ?, 0, ?, ?, ?)""",
                (queue, priority, one.reason, now_s, message),
            )

    refusals.apply_each(db, refused, put)
    _make_room(db)


def insert_or_bury(
    db: sqlite3.Connection, batch: Sequence[Outgoing], now_s: float
) -> tuple[set[str], list[Refused]]:
    """As `insert`, one by one; what SQLite refuses goes to the dead letters."""
    grown: set[str] = set()

    def put(one: Outgoing) -> None:
        grown.update(insert(db, [one], now_s))

    refused = [Refused(part, why) for part, why in refusals.apply_each(db, batch, put)]
    if refused:
        bury_refused(db, refused, now_s)
    return grown, refused


def read(db: sqlite3.Connection, limit: int) -> list[DeadLetter]:
    """The newest letters, newest first."""
    found = db.execute(
        "SELECT id, queue, message, reason, starts, buried_at FROM dead_letters ORDER BY id DESC LIMIT ?",
        (limit,),
    )
    return [
        DeadLetter(number, queue, messages.decode(message), reason, starts, buried_at)
        for number, queue, message, reason, starts, buried_at in found
    ]


def requeue(
    db: sqlite3.Connection, letter_ids: Sequence[int | str], now_s: float, keyring: Keyring | None
) -> tuple[int, set[str]]:
    """Send the letters as new messages: how many there were, and their queues."""
    packed = rows.pack(map(int, letter_ids))
    letters = db.execute(
        """DELETE FROM dead_letters WHERE id IN (SELECT value FROM json_each(?))
           RETURNING id, queue, message, reason""",
        (packed,),
    ).fetchall()
    batch: list[Outgoing] = []
    for _, queue, message, reason in sorted(letters):
        outgoing = outgoing_of_letter(queue, messages.decode(message))
        if keyring is not None:
            outgoing = keyring.requeued(outgoing, reason, now_s)
        batch.append(outgoing)
    return len(batch), insert(db, batch, now_s)


def drop(db: sqlite3.Connection, letter_ids: Sequence[int | str]) -> int:
    packed = rows.pack(map(int, letter_ids))
    removed = db.execute("DELETE FROM dead_letters WHERE id IN (SELECT value FROM json_each(?))", (packed,))
    return removed.rowcount


def _make_room(db: sqlite3.Connection) -> None:
    # Letters are requeued from the middle too, so the span of ids is only the most there can be.
    # Each is asked for by itself: for both in one question SQLite reads the whole table.
    low, high = db.execute(
        "SELECT (SELECT min(id) FROM dead_letters), (SELECT max(id) FROM dead_letters)"
    ).fetchone()
    if low is None or high - low < DEAD_LETTERS_MAX:
        return
    excess = db.execute("SELECT count(*) FROM dead_letters").fetchone()[0] - DEAD_LETTERS_MAX
    if excess > 0:
        db.execute(
            "DELETE FROM dead_letters WHERE id IN (SELECT id FROM dead_letters ORDER BY id LIMIT ?)",
            (excess,),
        )
        meta.add(db, DROPPED, excess)
