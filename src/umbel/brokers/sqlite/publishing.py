"""Publishing: how messages enter their queues, one by one or many at once, durable on return.

A message is a row that is appended. It gets its slip, the place in its queue, when it is filed: by the
next claim, or by who appended so many that the claim would have to file too much. One that is not due yet
gets its slip at once. After the commit those who wait for the queue are woken.
"""

import sqlite3
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from umbel.brokers.sqlite import meta, refusals, rows, uniques, wakeup
from umbel.brokers.sqlite.clock import Clock
from umbel.brokers.sqlite.database import Database
from umbel.errors import BrokerError, BrokerRefused
from umbel.wire.message import Outgoing

PRIORITY_MAX = 9
FILE_EVERY = 1024

encode = msgspec.msgpack.Encoder().encode

UNFILED = "id > (SELECT value FROM meta WHERE name = 'filed')"
APPEND = "INSERT INTO messages (queue, priority, message) VALUES (?, ?, ?)"


class Publisher:
    """From any thread, before or after a fork."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self.database = database
        self.clock = clock

    def publish(self, batch: Sequence[Outgoing]) -> None:
        try:
            self._publish(batch)
        except (BrokerRefused, ValueError, OverflowError) as error:
            raise _not_sent(batch, error) from error

    def publish_once(self, batch: Sequence[Outgoing], *, remembered_s: float) -> None:
        """The same without the messages whose ids were published this way within the time."""
        try:
            with self.database.write(durable=True) as db:
                now_s = self.clock.wall_s()
                until = now_s + remembered_s
                new = [one for one in batch if uniques.take(db, *_sent(one), now_s, until)]
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

    def _append(self, one: Outgoing) -> None:
        """Publish one message that is due, as most are, by the shortest way."""
        channel = wakeup.queue(one.queue)
        number, awake = self.database.append(APPEND, row(one), wakeup.WAITING_ON, (channel,))
        if _many_unfiled(number, number):
            # It is sent, whatever comes of this; what cannot be filed now is filed by the next claim.
            with suppress(BrokerError), self.database.write() as db:
                file(db)
        if awake:
            self.poke({address for (address,) in awake})

    def poke(self, awake: set[bytes]) -> None:
        """Wake those who wait at these addresses, and forget the ones where nobody is."""
        if awake and (gone := wakeup.poke(awake)):
            with self.database.write() as db:
                wakeup.unregister(db, gone)


def _sent(outgoing: Outgoing) -> tuple[str, str]:
    """The key under which it is remembered that this was sent, and its task."""
    task_id = outgoing.message.correlation_id
    return f"sent/{task_id}", task_id


def _not_sent(batch: Sequence[Outgoing], error: Exception) -> BrokerRefused:
    queues = ", ".join(sorted({repr(one.queue) for one in batch}))
    return BrokerRefused(f"not sent to {queues}: {refusals.reason(error)}")


def row(one: Outgoing) -> tuple[str, int, bytes]:
    """The values of a new row."""
    if one.exchange:
        raise ValueError(f"the embedded broker has no exchanges: name a queue instead of {one.exchange!r}")
    return one.queue, _in_range(one.message.priority), encode(one.message)


def _in_range(priority: int) -> int:
    return priority if 0 <= priority <= PRIORITY_MAX else min(max(priority, 0), PRIORITY_MAX)


def insert(db: sqlite3.Connection, batch: Sequence[Outgoing], now_s: float) -> set[str]:
    """Put the batch into its queues; the names of those."""
    if not batch:
        return set()
    some_wait = any(one.not_before > now_s for one in batch)
    if some_wait:
        file(db)
    new = [row(one) for one in batch]
    # SQLite gives each row the highest id so far and one more, and nobody else writes meanwhile.
    last = rows.insert(db, "messages (queue, priority, message)", new)
    first = last - len(new) + 1
    again = [number for number, one in enumerate(batch, first) if one.redelivered]
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
    for number, (one, (queue, priority, _)) in enumerate(zip(batch, new, strict=True), first):
        if one.not_before > now_s:
            delayed.append((one.not_before, number, queue, priority))
        else:
            ready.append((queue, priority, number))
    rows.insert(db, "ready", ready)
    rows.insert(db, "delayed", delayed)
    meta.put(db, meta.FILED, first + len(new) - 1)


def _many_unfiled(first: int, last: int) -> bool:
    """Whether who sent the messages from `first` to `last` should file: one sender in every so many.

    So that no claim ever finds more than a few thousand to file, whatever waits in the queue.
    """
    return last // FILE_EVERY > (first - 1) // FILE_EVERY


def file(db: sqlite3.Connection) -> None:
    """Give the messages that have no slip yet theirs."""
    filed = db.execute(f"INSERT INTO ready SELECT queue, priority, id FROM messages WHERE {UNFILED}")
    if filed.rowcount:
        db.execute("UPDATE meta SET value = (SELECT max(id) FROM messages) WHERE name = 'filed'")
