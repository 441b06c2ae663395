"""Verdicts: how claims end, each as a whole or not at all; results, dead letters and retained failures.

A verdict names its claim by the tag "ticket:id". It is applied only while that very claim stands; otherwise
it is refused, and neither its result nor its follow-ups are stored.

Results stay until their retention ends; the first SUCCESS of a task stays. Dead letters stay until somebody
requeues them; at the limit the oldest makes room, and `dead_letters_dropped` in `meta` counts it. Failures
are messages of failed tasks, retained for `failed_keep_s`; beyond `failed_keep` the oldest make room. They
are moved there in the transaction that settles the failed task, and leave in the one that sends the retry, so
no crash loses one or sends it twice.
"""

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, assert_never

from umbel.brokers.interface import (
    Ack,
    BrokerSettings,
    Bury,
    DeadLetter,
    Refused,
    Resend,
    Resent,
    Return,
    Settled,
    Started,
    Tag,
    Verdict,
)
from umbel.brokers.sqlite import messages, publishing, rows
from umbel.brokers.sqlite.publishing import insert, row
from umbel.protocol.delivery.states import SUCCESS
from umbel.wire.message import Outgoing, StoredResult
from umbel.wire.retried import requeued
from umbel.wire.signing import Signer

# ---- results ---------------------------------------------------------------------------------------
#
# What tasks returned, until their retention ends. The first SUCCESS of a task stays.

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


def select_results(db: sqlite3.Connection, task_ids: Iterable[str], now_s: float) -> dict[str, StoredResult]:
    """The results of these tasks that have not expired, by task id."""
    found = db.execute(
        """SELECT task_id, status, payload FROM results
           WHERE task_id IN (SELECT value FROM json_each(?)) AND expires_at > ?""",
        (rows.pack(task_ids), now_s),
    )
    return {row[0]: StoredResult(*row) for row in rows.read(found, tuple[str, str, bytes])}


def delete_results(db: sqlite3.Connection, task_ids: Iterable[str]) -> None:
    """Delete the results of these tasks."""
    db.execute(
        "DELETE FROM results WHERE task_id IN (SELECT value FROM json_each(?))",
        (rows.pack(task_ids),),
    )


def sweep_results(db: sqlite3.Connection, now_s: float, limit: int) -> int:
    """Remove up to `limit` expired results; how many."""
    return db.execute(
        "DELETE FROM results WHERE task_id IN (SELECT task_id FROM results WHERE expires_at <= ? LIMIT ?)",
        (now_s, limit),
    ).rowcount


# ---- dead letters ----------------------------------------------------------------------------------
#
# Messages that were given up, with the reason, until they are requeued.
#
# At the limit the oldest makes room, and `dead_letters_dropped` in `meta` counts it.

DEAD_LETTERS_MAX = 100_000
DEAD_LETTERS_DROPPED = "dead_letters_dropped"


class StoredLetter(NamedTuple):
    """A row of a dead letter, or of a retained failure."""

    number: rows.Id
    queue: str
    message: Any
    reason: str
    starts: int
    buried_at: float

    def read(self, *, failed: bool = False) -> DeadLetter:
        """The letter; an unread message is empty."""
        message = messages.decode(b"" if self.message is None else self.message)
        return DeadLetter(
            self.number, self.queue, message, self.reason, self.starts, self.buried_at, failed=failed
        )


def bury_claimed(db: sqlite3.Connection, reasons: Mapping[int, str], now_s: float) -> None:
    """Copy messages to the dead letters, each with its reason; the caller removes them from their queues."""
    db.executemany(
        """INSERT INTO dead_letters (queue, priority, starts, reason, buried_at, message)
           SELECT queue, priority, starts, ?, ?, message FROM messages WHERE id = ?""",
        [(reason, now_s, number) for number, reason in reasons.items()],
    )
    _make_room(db)


def bury_refused(db: sqlite3.Connection, refused: Sequence[Refused], now_s: float) -> None:
    """Put the messages among these into the dead letters, if they can be written at all."""

    def put(refusal: Refused) -> None:
        if isinstance(refusal.part, Outgoing):
            queue, priority, message = row(refusal.part.as_letter())
            db.execute(
                """INSERT INTO dead_letters (queue, priority, starts, reason, buried_at, message)
                   VALUES (?, ?, 0, ?, ?, ?)""",
                (queue, priority, refusal.reason, now_s, message),
            )

    rows.apply_each(db, refused, put)
    _make_room(db)


def insert_or_bury(
    db: sqlite3.Connection, batch: Sequence[Outgoing], now_s: float
) -> tuple[set[str], list[Refused]]:
    """Insert each message by itself; what SQLite refuses goes to the dead letters. Returns the queues that
    grew.
    """
    grown: set[str] = set()

    def put(outgoing: Outgoing) -> None:
        grown.update(insert(db, [outgoing], now_s))

    refused = [Refused(part, why) for part, why in rows.apply_each(db, batch, put)]
    if refused:
        bury_refused(db, refused, now_s)
    return grown, refused


def read_dead_letters(db: sqlite3.Connection, limit: int, most_bytes: int) -> list[DeadLetter]:
    """The newest letters, newest first. Those over `most_bytes` come without their message."""
    found = db.execute(
        """SELECT id, queue, CASE WHEN length(message) <= ? THEN message END, reason, starts, buried_at
           FROM dead_letters ORDER BY id DESC LIMIT ?""",
        (most_bytes, limit),
    )
    return [letter.read() for letter in rows.read(found, StoredLetter)]


def count_dead_letters(db: sqlite3.Connection, limit: int) -> int:
    """How many there are, counted up to the limit."""
    found = db.execute("SELECT count(*) FROM (SELECT 1 FROM dead_letters LIMIT ?)", (limit,))
    return int(found.fetchone()[0])


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

    The third part has the sizes of letters over `most_bytes`, which stay.
    """
    packed = rows.pack(map(int, letter_ids))
    letters = db.execute(
        """DELETE FROM dead_letters WHERE id IN (SELECT value FROM json_each(?)) AND length(message) <= ?
           RETURNING id, queue, message, reason, starts, buried_at""",
        (packed, most_bytes),
    )
    found = sorted(rows.read(letters, StoredLetter))
    large = db.execute(
        """SELECT id, length(message) FROM dead_letters
           WHERE id IN (SELECT value FROM json_each(?)) AND length(message) > ?""",
        (packed, most_bytes),
    )
    sizes = dict(rows.read(large, tuple[rows.Id, int]))
    again = partial(requeued, signer=signer, now=now_s, even_if_used=even_if_used)
    batch = [
        again(letter.queue, messages.decode(letter.message), starts=letter.starts, stored=letter.reason)
        for letter in found
    ]
    return len(batch), insert(db, batch, now_s), sizes


def drop_dead_letters(db: sqlite3.Connection, letter_ids: Sequence[int | str]) -> int:
    """Remove letters for good; how many there were."""
    packed = rows.pack(map(int, letter_ids))
    removed = db.execute("DELETE FROM dead_letters WHERE id IN (SELECT value FROM json_each(?))", (packed,))
    return removed.rowcount


def _make_room(db: sqlite3.Connection) -> None:
    # Letters are requeued from the middle too, so the span of ids is only the most there can be.
    # Each end is a separate subquery: for both in one, SQLite reads the whole table.
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
        rows.add_to_meta(db, DEAD_LETTERS_DROPPED, excess)


# ---- verdicts --------------------------------------------------------------------------------------
#
# How claims end, each as a whole or not at all.
#
# A verdict names its claim by the tag "ticket:id". It is applied only while that very claim stands;
# otherwise it is refused, and neither its result nor its follow-ups are stored.


@dataclass(slots=True)
class Judgement:
    """What a batch of verdicts requires, sorted by kind."""

    conflicts: set[Tag] = field(default_factory=set)
    finished: list[int] = field(default_factory=list)
    returned: list[tuple[int, Return]] = field(default_factory=list)
    buried: list[tuple[int, Bury]] = field(default_factory=list)
    kept: dict[int, str] = field(default_factory=dict)  # failures, and why
    started: list[int] = field(default_factory=list)
    results: list[StoredResult] = field(default_factory=list)
    follow_ups: list[Outgoing] = field(default_factory=list)
    applied: int = 0


def sort_verdicts(verdicts: Sequence[Verdict], standing: dict[Tag, int]) -> Judgement:
    """Sort the verdicts, given the claims that stand and the ids of their messages.

    A verdict that ends a claim removes it from `standing`, so that a second one is refused.
    """
    judged = Judgement()
    for verdict in verdicts:
        number = standing.get(verdict.tag)
        if number is None:
            judged.conflicts.add(verdict.tag)
            continue
        judged.applied += 1
        if isinstance(verdict, Started):
            judged.started.append(number)
            continue
        del standing[verdict.tag]
        match verdict:
            case Ack():
                judged.finished.append(number)
                if verdict.keep:
                    judged.kept[number] = verdict.keep
            case Return():
                judged.returned.append((number, verdict))
                continue
            case Bury():
                judged.buried.append((number, verdict))
            case _:
                assert_never(verdict)
        judged.results.extend(verdict.results)
        judged.follow_ups.extend(verdict.follow_ups)
    return judged


def standing_claims(db: sqlite3.Connection, tags: Sequence[Tag]) -> dict[Tag, int]:
    """Those of these claims that stand, and the ids of their messages."""
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
    """Apply the verdicts, except for results and follow-ups; the queues that grew."""
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


def as_settled(judged: Judgement, refused: Sequence[Refused]) -> Settled:
    """The reply to the worker."""
    return Settled(judged.applied, frozenset(judged.conflicts), tuple(refused))


# ---- failures --------------------------------------------------------------------------------------
#
# Messages of failed tasks, retained for `failed_keep_s`; beyond `failed_keep` the oldest make room.
#
# They are moved here in the transaction that settles the failed task, and leave in the one that sends the
# retry, so no crash loses one or sends it twice.

FAILED_DROPPED = "failed_dropped"
EXPIRED_MAX = 1000  # removed in one transaction; the next continues
_COLUMNS = "task_id, queue, priority, starts, reason, buried_at, message"


def keep_failures(
    db: sqlite3.Connection, reasons: Mapping[int, str], settings: BrokerSettings, now_s: float
) -> None:
    """Copy claimed messages; the caller removes them from their queues."""
    found = db.execute(
        """SELECT id, queue, priority, starts, message FROM messages
           WHERE id IN (SELECT value FROM json_each(?)) ORDER BY id""",
        (rows.pack(reasons),),
    )
    failures = [
        (messages.decode(message).correlation_id, queue, priority, starts, reasons[number], now_s, message)
        for number, queue, priority, starts, message in rows.read(found, tuple[rows.Id, str, int, int, Any])
    ]
    _add(db, failures)
    make_room_for_failures(db, settings, now_s)


def keep_sent_failures(
    db: sqlite3.Connection, failed: Sequence[Refused], settings: BrokerSettings, now_s: float
) -> None:
    """Retain messages that are in no queue any more, if they can be written at all."""

    def put(failure: Refused) -> None:
        if isinstance(failure.part, Outgoing):
            queue, priority, message = publishing.row(failure.part.as_letter())
            _add(
                db,
                [(failure.part.message.correlation_id, queue, priority, 0, failure.reason, now_s, message)],
            )

    rows.apply_each(db, failed, put)
    make_room_for_failures(db, settings, now_s)


def read_failures(
    db: sqlite3.Connection, limit: int, task_id: str, settings: BrokerSettings, now_s: float
) -> list[DeadLetter]:
    """Failures within their retention, newest first; those of one task if its id is given."""
    found = db.execute(
        f"""SELECT id, queue, message, reason, starts, buried_at FROM failed
            WHERE buried_at > ? {"AND task_id = ?" if task_id else ""} ORDER BY id DESC LIMIT ?""",
        (now_s - settings.failed_keep_s, *([task_id] if task_id else []), limit),
    )
    return [letter.read(failed=True) for letter in rows.read(found, StoredLetter)]


def resend_each(
    db: sqlite3.Connection, letters: Sequence[Resend], first: int, now_s: float
) -> tuple[Resent, set[str]]:
    """Send what still has its letter; `first` is the index of the first letter in the whole request. Also the
    queues that grew.
    """
    sent: set[int] = set()
    refused: dict[int, str] = {}
    grown: set[str] = set()

    def put(place: int) -> None:
        retry = letters[place - first]
        table = "failed" if retry.letter.failed else "dead_letters"
        gone = db.execute(f"DELETE FROM {table} WHERE id = ?", (int(retry.letter.letter_id),)).rowcount
        if gone and retry.outgoing is not None:
            grown.update(publishing.insert(db, [retry.outgoing], now_s))
            sent.add(place)

    for place, why in rows.apply_each(db, range(first, first + len(letters)), put):
        refused[place] = why
        sent.discard(place)
    return Resent(frozenset(sent), refused), grown


def make_room_for_failures(db: sqlite3.Connection, settings: BrokerSettings, now_s: float) -> None:
    """Remove failures past their retention, and the oldest beyond the limit."""
    db.execute(
        """DELETE FROM failed WHERE id IN
           (SELECT id FROM failed WHERE buried_at <= ? ORDER BY buried_at LIMIT ?)""",
        (now_s - settings.failed_keep_s, EXPIRED_MAX),
    )
    # Ids only grow, so their span is the most there can be; each end is a separate subquery (an index).
    low, high = db.execute("SELECT (SELECT min(id) FROM failed), (SELECT max(id) FROM failed)").fetchone()
    if low is None or high - low < settings.failed_keep:
        return
    excess = db.execute("SELECT count(*) FROM failed").fetchone()[0] - settings.failed_keep
    if excess > 0:
        db.execute("DELETE FROM failed WHERE id IN (SELECT id FROM failed ORDER BY id LIMIT ?)", (excess,))
        rows.add_to_meta(db, FAILED_DROPPED, excess)


def _add(db: sqlite3.Connection, failures: Sequence[Sequence[Any]]) -> None:
    rows.insert(db, f"failed ({_COLUMNS})", failures)
