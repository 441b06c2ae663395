"""Publishing: how messages get into their queues, and the keys of unique tasks.

Sending a message appends one row. Its state row, which gives it a place in its queue, is added by the next
claim, or by a sender of so many messages that this would be too much for a claim. A message that is not due
yet gets its state row at once.

A unique task holds a key until it releases the key or the key expires. The same table remembers which
messages an asynchronous client has sent. All functions run inside a transaction of the caller.
"""

import sqlite3
from collections.abc import Sequence

import msgspec

from umbel.brokers.sqlite import rows
from umbel.errors import BrokerRefused
from umbel.wire.message import Outgoing

# ---- unique keys -----------------------------------------------------------------------------------

SENT = "sent/"
"""Before the id of a task: the key under which a client's message is remembered as sent."""

_TAKE = """INSERT INTO uniques VALUES (?, ?, ?) ON CONFLICT (key) DO UPDATE
           SET task_id = excluded.task_id, expires_at = excluded.expires_at WHERE expires_at <= ?"""


def hold_key(db: sqlite3.Connection, key: str, task_id: str, now_s: float, expires_at: float) -> str:
    """Take the key if it is free; returns the id of the task that holds it now."""
    take_key(db, key, task_id, now_s, expires_at)
    row = rows.read_one(db.execute("SELECT task_id FROM uniques WHERE key = ?", (key,)), tuple[str])
    assert row is not None, "it was taken above, or before"
    return row[0]


def take_key(db: sqlite3.Connection, key: str, task_id: str, now_s: float, expires_at: float) -> bool:
    """Take the key for the task; whether it was free."""
    return bool(db.execute(_TAKE, (key, task_id, expires_at, now_s)).rowcount)


def any_key_held(db: sqlite3.Connection) -> bool:
    """Whether a unique task may hold a key. Most rows are about sent messages, and lie between the two ranges
    that this reads.
    """
    return bool(
        db.execute(
            f"""SELECT EXISTS (SELECT 1 FROM uniques WHERE key < '{SENT}')
                OR EXISTS (SELECT 1 FROM uniques WHERE key >= '{SENT}\uffff')"""
        ).fetchone()[0]
    )


def release_unique_keys(db: sqlite3.Connection, held: Sequence[tuple[str, str]]) -> None:
    """(key, task id): free each key that this task holds."""
    db.executemany("DELETE FROM uniques WHERE key = ? AND task_id = ?", held)


# ---- messages --------------------------------------------------------------------------------------

PRIORITY_MAX = 9
FILE_EVERY = 1024

encode = msgspec.msgpack.Encoder().encode

UNFILED = "id > (SELECT value FROM meta WHERE name = 'filed' AND value >= 0)"
"""The condition of messages that have no state row yet."""

APPEND = "INSERT INTO messages (queue, priority, message) VALUES (?, ?, ?)"


def row(outgoing: Outgoing) -> tuple[str, int, bytes]:
    """The values of a new row; ValueError for a message that names an exchange."""
    if outgoing.exchange:
        raise ValueError(
            f"the embedded broker has no exchanges: name a queue instead of {outgoing.exchange!r}"
        )
    priority = outgoing.message.priority
    if not 0 <= priority <= PRIORITY_MAX:
        priority = min(max(priority, 0), PRIORITY_MAX)
    return outgoing.queue, priority, encode(outgoing.message)


def insert(db: sqlite3.Connection, batch: Sequence[Outgoing], now_s: float) -> set[str]:
    """Put the batch into its queues; returns their names."""
    if not batch:
        return set()
    some_wait = any(outgoing.not_before > now_s for outgoing in batch)
    if some_wait:
        file(db)
    new = [row(outgoing) for outgoing in batch]
    # SQLite gives each row the highest id so far plus one, and no other process writes meanwhile.
    last = rows.insert(db, "messages (queue, priority, message)", new)
    first = last - len(new) + 1
    again = [number for number, outgoing in enumerate(batch, first) if outgoing.redelivered]
    if again:
        db.execute(
            "UPDATE messages SET redelivered = 1 WHERE id IN (SELECT value FROM json_each(?))",
            (rows.pack(again),),
        )
    if some_wait:
        ready, delayed = [], []
        for number, (outgoing, (queue, priority, _)) in enumerate(zip(batch, new, strict=True), first):
            if outgoing.not_before > now_s:
                delayed.append((outgoing.not_before, number, queue, priority))
            else:
                ready.append((queue, priority, number))
        rows.insert(db, "ready", ready)
        rows.insert(db, "delayed", delayed)
        rows.put_meta(db, rows.FILED, last)
    elif many_unfiled(first, last):
        file(db)
    return {queue for queue, _, _ in new}


def not_yet_sent(
    db: sqlite3.Connection, batch: Sequence[Outgoing], now_s: float, until: float
) -> list[Outgoing]:
    """The messages of the batch that are not remembered as sent; they are remembered until this time."""
    new: list[Outgoing] = []
    for outgoing in batch:
        task_id = outgoing.message.correlation_id
        if take_key(db, f"{SENT}{task_id}", task_id, now_s, until):
            new.append(outgoing)
    return new


def many_unfiled(first: int, last: int) -> bool:
    """Whether the sender of the messages from `first` to `last` should file: one sender in every so many.

    So no claim ever finds more than a few thousand messages to file, however many wait in the queue.
    """
    return last // FILE_EVERY > (first - 1) // FILE_EVERY


def file(db: sqlite3.Connection) -> None:
    """Add the state rows of messages that have none yet."""
    filed = db.execute(f"INSERT INTO ready SELECT queue, priority, id FROM messages WHERE {UNFILED}")
    if filed.rowcount:
        db.execute("UPDATE meta SET value = (SELECT max(id) FROM messages) WHERE name = 'filed'")


def not_sent(batch: Sequence[Outgoing], error: Exception) -> BrokerRefused:
    """The error for a batch that SQLite refuses."""
    queues = ", ".join(sorted({repr(outgoing.queue) for outgoing in batch}))
    return BrokerRefused(f"not sent to {queues}: {rows.refusal_reason(error)}")
