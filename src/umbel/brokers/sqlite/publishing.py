"""Publishing: how messages enter their queues, one by one or many at once, durable on return; unique keys.

A message is a row that is appended. Its slip, the place in its queue, is added when it is filed: by the next
claim, or by a sender of so many messages that the claim would have to file too much. A message that is not
due yet gets its slip at once. After the commit those that wait for the queue are woken.

A unique task holds a key until it releases it or the key expires. The same table remembers which messages an
asynchronous client has sent.
"""

import sqlite3
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from umbel.brokers.sqlite import rows, wakeup
from umbel.brokers.sqlite.coordination import Clock
from umbel.brokers.sqlite.database import Database
from umbel.errors import BrokerError, BrokerRefused
from umbel.wire.message import Outgoing

# ---- unique keys -----------------------------------------------------------------------------------
#
# Which task holds a key, until it releases it or the key expires.

SENT = "sent/"
"""Before the id of a task: the key under which it is remembered that its message was sent."""

_TAKE = """INSERT INTO uniques VALUES (?, ?, ?) ON CONFLICT (key) DO UPDATE
           SET task_id = excluded.task_id, expires_at = excluded.expires_at WHERE expires_at <= ?"""


def hold_key(db: sqlite3.Connection, key: str, task_id: str, now_s: float, expires_at: float) -> str:
    """Take a key that is free; the task that holds it now."""
    db.execute(_TAKE, (key, task_id, expires_at, now_s))
    row = rows.read_one(db.execute("SELECT task_id FROM uniques WHERE key = ?", (key,)), tuple[str])
    assert row is not None, "it was taken above, or before"
    return row[0]


def take_key(db: sqlite3.Connection, key: str, task_id: str, now_s: float, expires_at: float) -> bool:
    """Take a key for a task; whether it was free."""
    return bool(db.execute(_TAKE, (key, task_id, expires_at, now_s)).rowcount)


def any_key_held(db: sqlite3.Connection) -> bool:
    """Whether a unique task may hold a key. Most rows are about sent messages, and lie between those two
    ranges.
    """
    return bool(
        db.execute(
            f"""SELECT EXISTS (SELECT 1 FROM uniques WHERE key < '{SENT}')
                OR EXISTS (SELECT 1 FROM uniques WHERE key >= '{SENT}\uffff')"""
        ).fetchone()[0]
    )


def release_unique_keys(db: sqlite3.Connection, held: Sequence[tuple[str, str]]) -> None:
    """Free each key that its task holds."""
    db.executemany("DELETE FROM uniques WHERE key = ? AND task_id = ?", held)


def sweep_unique_keys(db: sqlite3.Connection, now_s: float, limit: int) -> int:
    """Remove up to `limit` expired keys; how many."""
    return db.execute(
        "DELETE FROM uniques WHERE key IN (SELECT key FROM uniques WHERE expires_at <= ? LIMIT ?)",
        (now_s, limit),
    ).rowcount


# ---- publishing ------------------------------------------------------------------------------------
#
# How messages enter their queues, one by one or many at once, durable on return.
#
# A message is a row that is appended. Its slip, the place in its queue, is added when it is filed: by the
# next claim, or by a sender of so many messages that the claim would have to file too much. A message that
# is not due yet gets its slip at once. After the commit those that wait for the queue are woken.

PRIORITY_MAX = 9
FILE_EVERY = 1024

encode = msgspec.msgpack.Encoder().encode

UNFILED = "id > (SELECT value FROM meta WHERE name = 'filed' AND value >= 0)"
APPEND = "INSERT INTO messages (queue, priority, message) VALUES (?, ?, ?)"


class Publisher:
    """Publishes to one database, from any thread, before or after a fork."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self.database = database
        self.clock = clock

    def publish(self, batch: Sequence[Outgoing]) -> None:
        """Publish the batch as a whole; BrokerRefused if SQLite cannot store a value."""
        try:
            self._publish(batch)
        except (BrokerRefused, ValueError, OverflowError) as error:
            raise _not_sent(batch, error) from error

    def publish_once(self, batch: Sequence[Outgoing], *, remembered_s: float) -> None:
        """The same without messages whose ids were published this way within the time."""
        try:
            with self.database.write(durable=True) as db:
                now_s = self.clock.wall_s()
                until = now_s + remembered_s
                new = [outgoing for outgoing in batch if take_key(db, *_sent(outgoing), now_s, until)]
                queues = insert(db, new, now_s)
                awake = wakeup.addresses(db, map(wakeup.queue, queues))
        except (BrokerRefused, ValueError, OverflowError) as error:
            raise _not_sent(batch, error) from error
        self.poke(awake)

    def _publish(self, batch: Sequence[Outgoing]) -> None:
        if len(batch) == 1 and not batch[0].not_before and not batch[0].redelivered:
            self._append(batch[0])
            return
        with self.database.write(durable=True) as db:
            queues = insert(db, batch, self.clock.wall_s())
            awake = wakeup.addresses(db, map(wakeup.queue, queues))
        self.poke(awake)

    def _append(self, outgoing: Outgoing) -> None:
        """Publish one message that is due, as most are, by the shortest way."""
        channel = wakeup.queue(outgoing.queue)
        number, awake = self.database.append(APPEND, row(outgoing), wakeup.WAITING_ON, (channel,))
        if _many_unfiled(number, number):
            # It is sent even if this fails; what cannot be filed now is filed by the next claim.
            with suppress(BrokerError), self.database.write() as db:
                file(db)
        if awake:  # other values are set aside when the rows are checked; the message is sent
            self.poke({address: () for (address,) in awake if isinstance(address, bytes)})

    def poke(self, awake: wakeup.Awake) -> None:
        """Wake the waiters at these addresses, and forget addresses where no process listens."""
        if awake and (gone := wakeup.poke(awake)):
            with self.database.write() as db:
                wakeup.unregister(db, gone)


def _sent(outgoing: Outgoing) -> tuple[str, str]:
    """The key under which a sent message is remembered, and its task."""
    task_id = outgoing.message.correlation_id
    return f"{SENT}{task_id}", task_id


def _not_sent(batch: Sequence[Outgoing], error: Exception) -> BrokerRefused:
    queues = ", ".join(sorted({repr(outgoing.queue) for outgoing in batch}))
    return BrokerRefused(f"not sent to {queues}: {rows.refusal_reason(error)}")


def row(outgoing: Outgoing) -> tuple[str, int, bytes]:
    """The values of a new row; ValueError for a message that names an exchange."""
    if outgoing.exchange:
        raise ValueError(
            f"the embedded broker has no exchanges: name a queue instead of {outgoing.exchange!r}"
        )
    return outgoing.queue, _in_range(outgoing.message.priority), encode(outgoing.message)


def _in_range(priority: int) -> int:
    return priority if 0 <= priority <= PRIORITY_MAX else min(max(priority, 0), PRIORITY_MAX)


def insert(db: sqlite3.Connection, batch: Sequence[Outgoing], now_s: float) -> set[str]:
    """Put the batch into its queues; the names of those."""
    if not batch:
        return set()
    some_wait = any(outgoing.not_before > now_s for outgoing in batch)
    if some_wait:
        file(db)
    new = [row(outgoing) for outgoing in batch]
    # SQLite gives each row the highest id so far and one more, and no other process writes meanwhile.
    last = rows.insert(db, "messages (queue, priority, message)", new)
    first = last - len(new) + 1
    again = [number for number, outgoing in enumerate(batch, first) if outgoing.redelivered]
    if again:
        db.execute(
            "UPDATE messages SET redelivered = 1 WHERE id IN (SELECT value FROM json_each(?))",
            (rows.pack(again),),
        )
    if some_wait:
        _insert_slips(db, batch, new, first, now_s)
    elif _many_unfiled(first, last):
        file(db)
    return {queue for queue, _, _ in new}


def _insert_slips(
    db: sqlite3.Connection,
    batch: Sequence[Outgoing],
    new: Sequence[tuple[str, int, bytes]],
    first: int,
    now_s: float,
) -> None:
    ready, delayed = [], []
    for number, (outgoing, (queue, priority, _)) in enumerate(zip(batch, new, strict=True), first):
        if outgoing.not_before > now_s:
            delayed.append((outgoing.not_before, number, queue, priority))
        else:
            ready.append((queue, priority, number))
    rows.insert(db, "ready", ready)
    rows.insert(db, "delayed", delayed)
    rows.put_meta(db, rows.FILED, first + len(new) - 1)


def _many_unfiled(first: int, last: int) -> bool:
    """Whether the sender of the messages from `first` to `last` should file: one sender in every so many.

    So no claim ever finds more than a few thousand to file, whatever waits in the queue.
    """
    return last // FILE_EVERY > (first - 1) // FILE_EVERY


def file(db: sqlite3.Connection) -> None:
    """Add the slips of messages that have none yet."""
    filed = db.execute(f"INSERT INTO ready SELECT queue, priority, id FROM messages WHERE {UNFILED}")
    if filed.rowcount:
        db.execute("UPDATE meta SET value = (SELECT max(id) FROM messages) WHERE name = 'filed'")
