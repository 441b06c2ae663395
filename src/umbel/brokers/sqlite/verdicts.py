"""Verdicts: how claims end, with results, dead letters and retained failures.

`brokers/rules.py` sorts the verdicts of a batch. All of them are applied in one transaction, with the results
and follow-ups that they bring.

Results stay until their retention ends; the first SUCCESS of a task stays. Dead letters stay until a person
requeues or removes them; beyond the limit the oldest make room. Failures are messages of failed tasks,
retained for `failed_keep_s`; beyond `failed_keep` the oldest make room. They are stored in the transaction
that settles the failed task, and removed in the one that sends the retry, so no crash loses a failure or
sends it twice. `meta` counts the letters that made room.
"""

import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from umbel.brokers.interface import BrokerSettings, DeadLetter, Refused, Resend, Resent, Tag
from umbel.brokers.rules import DEAD_LETTERS_MAX, Judgement
from umbel.brokers.sqlite import messages, rows
from umbel.brokers.sqlite.publishing import insert, row
from umbel.protocol.delivery.states import SUCCESS
from umbel.wire.message import Outgoing, StoredResult
from umbel.wire.retried import requeued
from umbel.wire.signing import Signer

# ---- verdicts --------------------------------------------------------------------------------------


def standing_claims(db: sqlite3.Connection, tags: Sequence[Tag]) -> dict[Tag, int]:
    """The claims of these that stand, and the ids of their messages."""
    ids, tickets = db.execute(
        """SELECT json_group_array(id), json_group_array(ticket) FROM claimed
           WHERE id IN (SELECT value FROM json_each(?))""",
        (rows.pack(messages.number_of(tag) for tag in tags),),
    ).fetchone()
    return {
        messages.tag(ticket, number): number
        for number, ticket in zip(rows.ints(ids), rows.ints(tickets), strict=True)
    }


def apply_verdicts(db: sqlite3.Connection, judged: Judgement, now_s: float) -> set[str]:
    """Apply the verdicts, except for results and follow-ups; returns the queues of returned messages."""
    grown: set[str] = set()
    for number in judged.started:
        messages.mark(db, [number], starts=1, redelivered=False)
    for number, verdict in judged.returned:
        messages.mark(db, [number], starts=int(verdict.charged), redelivered=verdict.ran)
    at_once = [number for number, verdict in judged.returned if verdict.not_before <= now_s]
    if at_once:
        grown |= messages.put_back(db, at_once)
    for number, verdict in judged.returned:
        if verdict.not_before > now_s:
            grown |= messages.park(db, number, verdict.not_before)
    for number, burial in judged.buried:
        messages.mark(db, [number], starts=int(burial.charged), redelivered=False)
        judged.finished.append(number)
    if judged.buried:
        bury_claimed(db, {number: burial.reason for number, burial in judged.buried}, now_s)
    if judged.finished:
        messages.remove(db, judged.finished)
    return grown


# ---- results ---------------------------------------------------------------------------------------

_REPLACE = f"""
ON CONFLICT (task_id) DO UPDATE
SET status = excluded.status, payload = excluded.payload, expires_at = excluded.expires_at
WHERE results.status <> '{SUCCESS}' OR results.expires_at <= ?"""


def put_results(
    db: sqlite3.Connection, results: Sequence[StoredResult], now_s: float, expires_at: float
) -> None:
    """Store results; a stored SUCCESS is not replaced before it expires."""
    new = [(result.task_id, result.status, result.payload, expires_at) for result in results]
    rows.insert(db, "results", new, otherwise=_REPLACE, with_=[now_s])


# ---- dead letters and retained failures ------------------------------------------------------------

EXPIRED_MAX = 1000  # failures removed in one transaction; the next one continues
DEAD, FAILED = "dead_letters", "failed"
_COLUMNS = "queue, priority, starts, reason, buried_at, message"


class LetterRow(NamedTuple):
    """A row of a dead letter, or of a retained failure."""

    number: rows.Id
    queue: str
    message: Any
    reason: str
    starts: int
    buried_at: float

    def read(self, *, failed: bool = False) -> DeadLetter:
        """The letter; a message that was not read is empty."""
        message = messages.decode(b"" if self.message is None else self.message)
        return DeadLetter(
            self.number, self.queue, message, self.reason, self.starts, self.buried_at, failed=failed
        )


def bury_claimed(db: sqlite3.Connection, reasons: Mapping[int, str], now_s: float) -> None:
    """Copy messages to the dead letters, each with its reason; the caller removes them from their queues."""
    db.executemany(
        f"""INSERT INTO dead_letters ({_COLUMNS})
            SELECT queue, priority, starts, ?, ?, message FROM messages WHERE id = ?""",
        [(reason, now_s, number) for number, reason in reasons.items()],
    )
    _trim_dead(db)


def keep_failures(
    db: sqlite3.Connection, reasons: Mapping[int, str], settings: BrokerSettings, now_s: float
) -> None:
    """Copy messages to the failures, each with its reason; the caller removes them from their queues."""
    found = db.execute(
        """SELECT id, queue, priority, starts, message FROM messages
           WHERE id IN (SELECT value FROM json_each(?)) ORDER BY id""",
        (rows.pack(reasons),),
    )
    failures = [
        (messages.decode(message).correlation_id, queue, priority, starts, reasons[number], now_s, message)
        for number, queue, priority, starts, message in rows.read(found, tuple[rows.Id, str, int, int, Any])
    ]
    rows.insert(db, f"failed (task_id, {_COLUMNS})", failures)
    trim_failures(db, settings, now_s)


def bury_refused(db: sqlite3.Connection, refused: Sequence[Refused], now_s: float) -> None:
    """Put the messages among these into the dead letters, if they can be written at all."""
    _put_letters(db, DEAD, refused, now_s)
    _trim_dead(db)


def keep_sent_failures(
    db: sqlite3.Connection, failed: Sequence[Refused], settings: BrokerSettings, now_s: float
) -> None:
    """Retain messages that are in no queue any more, if they can be written at all."""
    _put_letters(db, FAILED, failed, now_s)
    trim_failures(db, settings, now_s)


def insert_or_bury(
    db: sqlite3.Connection, batch: Sequence[Outgoing], now_s: float
) -> tuple[set[str], list[Refused]]:
    """Insert each message by itself, or bury it if SQLite refuses it: the queues of the messages that were
    inserted, and the messages that were refused.
    """
    grown: set[str] = set()

    def put(outgoing: Outgoing) -> None:
        grown.update(insert(db, [outgoing], now_s))

    refused = [Refused(part, why) for part, why in rows.apply_each(db, batch, put)]
    if refused:
        bury_refused(db, refused, now_s)
    return grown, refused


def read_dead_letters(db: sqlite3.Connection, limit: int, most_bytes: int) -> list[DeadLetter]:
    """The newest dead letters, newest first. Those over `most_bytes` come without their message."""
    found = db.execute(
        """SELECT id, queue, CASE WHEN length(message) <= ? THEN message END, reason, starts, buried_at
           FROM dead_letters ORDER BY id DESC LIMIT ?""",
        (most_bytes, limit),
    )
    return [letter.read() for letter in rows.read(found, LetterRow)]


def read_failures(db: sqlite3.Connection, limit: int, task_id: str, after: float) -> list[DeadLetter]:
    """The failures after this time, newest first; only those of one task if its id is given."""
    found = db.execute(
        f"""SELECT id, queue, message, reason, starts, buried_at FROM failed
            WHERE buried_at > ? {"AND task_id = ?" if task_id else ""} ORDER BY id DESC LIMIT ?""",
        (after, *([task_id] if task_id else []), limit),
    )
    return [letter.read(failed=True) for letter in rows.read(found, LetterRow)]


def requeue_dead_letters(
    db: sqlite3.Connection,
    letter_ids: Sequence[int | str],
    now_s: float,
    signer: Signer | None,
    most_bytes: int,
    *,
    even_if_used: bool,
) -> tuple[int, set[str], dict[int, int]]:
    """Send the letters as new messages: how many there were, and their queues.

    The third part has the ids and sizes of letters over `most_bytes`, which stay.
    """
    packed = rows.pack(map(int, letter_ids))
    letters = db.execute(
        """DELETE FROM dead_letters WHERE id IN (SELECT value FROM json_each(?)) AND length(message) <= ?
           RETURNING id, queue, message, reason, starts, buried_at""",
        (packed, most_bytes),
    )
    found = sorted(rows.read(letters, LetterRow))
    large = db.execute(
        "SELECT id, length(message) FROM dead_letters WHERE id IN (SELECT value FROM json_each(?))", (packed,)
    )
    sizes = dict(rows.read(large, tuple[rows.Id, int]))
    batch = [
        requeued(
            letter.queue,
            messages.decode(letter.message),
            starts=letter.starts,
            stored=letter.reason,
            signer=signer,
            now=now_s,
            even_if_used=even_if_used,
        )
        for letter in found
    ]
    return len(batch), insert(db, batch, now_s), sizes


def resend_each(
    db: sqlite3.Connection, letters: Sequence[Resend], first: int, now_s: float
) -> tuple[Resent, set[str]]:
    """Send the retries whose letters are still there; also the queues of what was sent.

    `first` is the index of the first letter in the whole request.
    """
    sent: set[int] = set()
    refused: dict[int, str] = {}
    grown: set[str] = set()

    def put(place: int) -> None:
        retry = letters[place - first]
        table = FAILED if retry.letter.failed else DEAD
        gone = db.execute(f"DELETE FROM {table} WHERE id = ?", (int(retry.letter.letter_id),)).rowcount
        if gone and retry.outgoing is not None:
            grown.update(insert(db, [retry.outgoing], now_s))
            sent.add(place)

    for place, why in rows.apply_each(db, range(first, first + len(letters)), put):
        refused[place] = why
        sent.discard(place)
    return Resent(frozenset(sent), refused), grown


def trim_failures(db: sqlite3.Connection, settings: BrokerSettings, now_s: float) -> None:
    """Remove failures past their retention, and the oldest beyond the limit."""
    rows.sweep(db, FAILED, now_s - settings.failed_keep_s, EXPIRED_MAX, column="buried_at")
    rows.trim(db, FAILED, settings.failed_keep, rows.FAILED_DROPPED)


def _trim_dead(db: sqlite3.Connection) -> None:
    rows.trim(db, DEAD, DEAD_LETTERS_MAX, rows.DEAD_LETTERS_DROPPED)


def _put_letters(db: sqlite3.Connection, table: str, refused: Sequence[Refused], now_s: float) -> None:
    def put(refusal: Refused) -> None:
        if isinstance(refusal.part, Outgoing):
            queue, priority, message = row(refusal.part.as_letter())
            letter = queue, priority, 0, refusal.reason, now_s, message
            if table == FAILED:
                task_id = refusal.part.message.correlation_id
                rows.insert(db, f"failed (task_id, {_COLUMNS})", [(task_id, *letter)])
            else:
                rows.insert(db, f"dead_letters ({_COLUMNS})", [letter])

    rows.apply_each(db, refused, put)
