"""Claims: how a worker takes messages, which claims this process has, and which signatures they use.

Claiming moves the state rows of messages to `claimed`; `brokers/rules.py` says which messages. An owner's
lease is one row. While the row exists its claims stand, even when its time is over: an owner that renews late
but finds the row has lost nothing. The process that returns the messages of an expired owner removes the row
in the same transaction.

Claims of this process. The file is the record of claims. If it was deleted, the claims are known only here.
If it was replaced by an older copy, the copy may hold claims of this process that were settled long ago and
that no worker would end.

Signatures. Each is used by one row of `messages`, until that message has ended and a copy would be too old. A
message that comes back is the same row, so it may use its signature again; a copy is another row. When a
message ends, its id may be given to another message, so its signature is then recorded as used by no message.
The id of the cluster, which signatures are bound to, is in `meta`.
"""

import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from umbel.brokers.interface import Delivery, SetAside, Spend, Started, Tag, Verdict
from umbel.brokers.rules import Heap, HeldByClaims, share
from umbel.brokers.sqlite import messages, rows
from umbel.protocol.delivery.trust import ClusterId, Doubt

# ---- claims ----------------------------------------------------------------------------------------


class _HeapRow(msgspec.Struct, array_like=True, gc=False):
    priority: int
    ids: str  # JSON


class _Fetched(msgspec.Struct, array_like=True, gc=False):
    """Columns of many messages as JSON arrays, and their bytes joined into one value."""

    ids: str
    queues: str
    starts: str
    redelivered: str
    lengths: str
    joined: bytes | None


def claim(
    db: sqlite3.Connection, owner: str, queues: Sequence[str], limit: int, ticket: int, most_bytes: int
) -> tuple[list[Delivery], dict[int, SetAside], str]:
    """Claim up to `limit` messages for the owner: the messages, those over `most_bytes`, and the queue that
    was served last.

    `queues` are in the order of their turns. Of messages over `most_bytes` only the size is read; the caller
    makes them dead letters.
    """
    heaps = [heap for queue in queues for heap in _heaps(db, queue, limit)]
    if len(queues) > 1:
        heaps = share(heaps, limit, queues)
    if not heaps:
        return [], {}, queues[0]
    numbers = [number for heap in heaps for number in heap.ids]
    packed = rows.pack(numbers)
    for heap in heaps:
        db.execute(
            "DELETE FROM ready WHERE queue = ? AND priority = ? AND id <= ?",
            (heap.queue, heap.priority, heap.ids[-1]),
        )
    db.execute("INSERT INTO claimed SELECT value, ?, ? FROM json_each(?)", (ticket, owner, packed))
    found, large = _fetch(db, packed, ticket, most_bytes)
    if len(heaps) > 1:
        priority = {number: heap.priority for heap in heaps for number in heap.ids}
        numbers.sort(key=lambda number: (priority[number], number))
    if large:
        numbers = [number for number in numbers if number not in large]
    return [found[number] for number in numbers], large, heaps[-1].queue


def lease(db: sqlite3.Connection, owner: str, expires_at: float) -> bool:
    """Renew the owner's lease, or give it a new one; whether the old one still stood."""
    stood = db.execute("UPDATE owners SET expires_at = ? WHERE owner = ?", (expires_at, owner)).rowcount
    if not stood:
        db.execute("INSERT INTO owners VALUES (?, ?)", (owner, expires_at))
    return bool(stood)


def return_lost(db: sqlite3.Connection, now_boot_s: float) -> tuple[int, set[str]]:
    """Return the messages of owners whose lease has ended; how many, and their queues."""
    lost = db.execute("SELECT owner FROM owners WHERE expires_at <= ?", (now_boot_s,))
    count, queues = 0, set()
    for (owner,) in rows.read(lost, tuple[str]):
        returned, into = forget(db, owner)
        count += returned
        queues |= into
    return count, queues


def forget(db: sqlite3.Connection, owner: str) -> tuple[int, set[str]]:
    """End the owner's lease and return its messages, marked redelivered because they may have run; how many,
    and their queues.
    """
    db.execute("DELETE FROM owners WHERE owner = ?", (owner,))
    found = db.execute("SELECT id FROM claimed WHERE owner = ?", (owner,))
    numbers = [number for (number,) in rows.read(found, tuple[rows.Id])]
    if not numbers:
        return 0, set()
    messages.mark(db, numbers, starts=0, redelivered=True)
    return len(numbers), messages.put_back(db, numbers)


def _heaps(db: sqlite3.Connection, queue: str, limit: int) -> list[Heap]:
    found = db.execute(
        """SELECT priority, json_group_array(id) FROM (
             SELECT priority, id FROM ready WHERE queue = ? ORDER BY priority, id LIMIT ?)
           GROUP BY priority ORDER BY priority""",
        (queue, limit),
    )
    return [Heap(queue, row.priority, rows.ints(row.ids)) for row in rows.read(found, _HeapRow)]


def _fetch(
    db: sqlite3.Connection, packed: str, ticket: int, most_bytes: int
) -> tuple[dict[int, Delivery], dict[int, SetAside]]:
    """The deliveries by id, and the messages that are too large.

    One row has all messages, joined, and their lengths. Reading a row for each message would release the
    interpreter lock for each.
    """
    try:
        found = db.execute(
            """SELECT json_group_array(id), json_group_array(queue), json_group_array(starts),
                      json_group_array(redelivered), json_group_array(length(message)),
                      CAST(group_concat(CASE WHEN length(message) <= ?2 THEN message ELSE '' END, '') AS BLOB)
               FROM messages WHERE id IN (SELECT value FROM json_each(?1))""",
            (packed, most_bytes),
        )
        row = rows.read_one(found, _Fetched)
    except sqlite3.DataError:  # too large for one row
        return _fetch_each(db, packed, ticket, most_bytes)
    assert row is not None, "an aggregate has one row"
    cuts, joined = rows.ints(row.lengths), row.joined
    columns = zip(
        *map(rows.ints, (row.ids, row.starts, row.redelivered)), rows.strings(row.queues), strict=True
    )
    if len(cuts) != packed.count(",") + 1:
        raise rows.Malformed("a queue names messages that are not there")
    # A message is too large, or another program wrote text where bytes belong.
    if joined is None or max(cuts) > most_bytes or sum(cuts) != len(joined):
        return _fetch_each(db, packed, ticket, most_bytes)
    deliveries: dict[int, Delivery] = {}
    view, end = memoryview(joined), 0
    for (number, started, again, queue), length in zip(columns, cuts, strict=True):
        message = messages.decode(bytes(view[end : end + length]))
        deliveries[number] = Delivery(messages.tag(ticket, number), queue, message, started, bool(again))
        end += length
    return deliveries, {}


def _fetch_each(
    db: sqlite3.Connection, packed: str, ticket: int, most_bytes: int
) -> tuple[dict[int, Delivery], dict[int, SetAside]]:
    """Fetch the messages row by row, whatever the rows contain."""
    found = db.execute(
        """SELECT id, queue, starts, redelivered, length(message),
                  CASE WHEN length(message) <= ?2 THEN message END
           FROM messages WHERE id IN (SELECT value FROM json_each(?1))""",
        (packed, most_bytes),
    )
    deliveries: dict[int, Delivery] = {}
    large: dict[int, SetAside] = {}
    for number, queue, starts, again, length, message in rows.read(
        found, tuple[rows.Id, str, int, int, int, Any]
    ):
        if length > most_bytes:
            large[number] = SetAside(queue, length)
        else:
            read = messages.decode(message)
            deliveries[number] = Delivery(messages.tag(ticket, number), queue, read, starts, bool(again))
    return deliveries, large


# ---- claims of this process ------------------------------------------------------------------------


class Holding(HeldByClaims):
    """The claims of this process, with their owners, signatures and slots."""

    def __init__(self) -> None:
        super().__init__()
        self.owners: set[str] = set()
        self.unknown: set[Tag] = set()  # claimed in a file that is gone, and not settled
        self._held: dict[Tag, str] = {}

    def take(self, owner: str, deliveries: Iterable[Delivery]) -> None:
        """Note the claims of an owner."""
        for delivery in deliveries:
            self._held[delivery.tag] = owner

    def settle(self, verdicts: Iterable[Verdict]) -> frozenset[Tag]:
        """Forget the claims that these verdicts end; returns those that the file does not know."""
        ended = [verdict.tag for verdict in verdicts if not isinstance(verdict, Started)]
        self.let_go(ended)
        if not self.unknown:
            return frozenset()
        gone = self.unknown.intersection(ended)
        self.unknown -= gone
        return frozenset(gone)

    def let_go(self, tags: Sequence[Tag]) -> None:
        """Forget claims: they were settled, or their messages wait in the broker."""
        for tag in tags:
            self._held.pop(tag, None)
        self.forget(tags)

    def forget_owner(self, owner: str) -> None:
        """Forget an owner and its claims."""
        self.owners.discard(owner)
        self.let_go([tag for tag, holder in self._held.items() if holder == owner])

    def reconcile(self, db: sqlite3.Connection, expires_at: float) -> None:
        """Compare the claims with another file: its claims of our owners that this process does not hold go
        back to their queues.
        """
        missing = set(self._held)
        for owner in self.owners:
            found = db.execute("SELECT id, ticket FROM claimed WHERE owner = ?", (owner,))
            claimed = rows.read(found, tuple[rows.Id, int])
            standing = {messages.tag(ticket, number): number for number, ticket in claimed}
            missing -= standing.keys()
            strays = [number for tag, number in standing.items() if tag not in self._held]
            messages.mark(db, strays, starts=0, redelivered=True)
            messages.put_back(db, strays)
            lease(db, owner, expires_at)
        for tag in missing:
            del self._held[tag]
        self.unknown |= missing


# ---- signatures ------------------------------------------------------------------------------------

NO_MESSAGE = 0  # stands for the message of a signature whose message has ended


def stored_cluster_id(db: sqlite3.Connection) -> ClusterId | None:
    """The id stored in this file, if any."""
    found = rows.meta_text(db, rows.CLUSTER)
    return ClusterId(found, rows.meta_number(db, rows.CLUSTER_SINCE)) if found else None


def store_cluster_id(db: sqlite3.Connection, made: ClusterId) -> ClusterId:
    """Store the id unless there is one; returns the stored one."""
    found = stored_cluster_id(db)
    if found is not None:
        return found
    rows.put_meta(db, rows.CLUSTER, made.id)
    rows.put_meta(db, rows.CLUSTER_SINCE, made.since)
    return made


def use_signatures(db: sqlite3.Connection, signatures: Sequence[Spend]) -> dict[Tag, Doubt]:
    """Use these signatures; returns the messages that are copies."""
    return {use.tag: Doubt.REPLAYED for use in signatures if not _use(db, use)}


def end_signatures(db: sqlite3.Connection, marks: Iterable[str]) -> None:
    """Record that the messages with these signatures have ended: any other message is a copy."""
    db.executemany(
        "UPDATE signatures SET message_id = ? WHERE mark = ?", [(NO_MESSAGE, mark) for mark in marks]
    )


def _use(db: sqlite3.Connection, use: Spend) -> bool:
    number = messages.number_of(use.tag)
    used = db.execute(
        """INSERT INTO signatures VALUES (?, ?, ?) ON CONFLICT (mark) DO UPDATE
           SET expires_at = excluded.expires_at WHERE message_id = excluded.message_id AND message_id != ?""",
        (use.mark, number, use.expires_at, NO_MESSAGE),
    )
    return used.rowcount > 0
