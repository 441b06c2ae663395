"""Claims: which messages a claimer gets, and how long they are its own.

Priority decides first, over all queues of the claim; within a priority every queue that has
messages gets an equal share, so that a full queue never starves another; within a queue the
oldest is first. The queues take turns, and the next claim begins after the one that was last.

An owner's lease is one row. While the row is there its claims stand, even when its time is over:
an owner that comes back late and finds the row has lost nothing. The process that returns the
messages of an expired owner removes the row in the same transaction.
"""

import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from umbel.brokers.interface import Delivery
from umbel.brokers.sqlite import messages, rows


@dataclass(frozen=True, slots=True)
class Heap:
    """Messages of one queue and one priority, oldest first."""

    queue: str
    priority: int
    ids: Sequence[int]


def share(heaps: Iterable[Heap], limit: int, queues: Sequence[str]) -> list[Heap]:
    """What a claim takes: the front of each heap, at most `limit` messages in all.

    `queues` are in the order of their turns; the last heap of the answer had the last turn.
    """
    by_priority: dict[int, list[Heap]] = {}
    for heap in sorted(heaps, key=lambda heap: queues.index(heap.queue)):
        by_priority.setdefault(heap.priority, []).append(heap)
    taken: list[Heap] = []
    for _, peers in sorted(by_priority.items()):
        counts, last = [0] * len(peers), 0
        while limit and any(count < len(heap.ids) for count, heap in zip(counts, peers, strict=True)):
            for place, heap in enumerate(peers):
                if limit and counts[place] < len(heap.ids):
                    counts[place] += 1
                    limit -= 1
                    last = place
        order = [*range(last + 1, len(peers)), *range(last + 1)]
        taken += [
            Heap(peers[place].queue, peers[place].priority, peers[place].ids[: counts[place]])
            for place in order
            if counts[place]
        ]
    return taken


def claim(
    db: sqlite3.Connection, owner: str, queues: Sequence[str], limit: int, ticket: int
) -> tuple[list[Delivery], str]:
    """Move up to `limit` messages to the owner; by priority, then oldest first.

    `queues` are in the order of their turns; the second part of the answer had the last turn.
    """
    heaps = [heap for queue in queues for heap in _heaps(db, queue, limit)]
    if len(queues) > 1:
        heaps = share(heaps, limit, queues)
    if not heaps:
        return [], queues[0]
    numbers = [number for heap in heaps for number in heap.ids]
    packed = rows.pack(numbers)
    for heap in heaps:
        db.execute(
            "DELETE FROM ready WHERE queue = ? AND priority = ? AND id <= ?",
            (heap.queue, heap.priority, heap.ids[-1]),
        )
    db.execute("INSERT INTO claimed SELECT value, ?, ? FROM json_each(?)", (ticket, owner, packed))
    found = _fetch(db, packed, ticket)
    if len(heaps) > 1:
        priority = {number: heap.priority for heap in heaps for number in heap.ids}
        numbers.sort(key=lambda number: (priority[number], number))
    return [found[number] for number in numbers], heaps[-1].queue


def lease(db: sqlite3.Connection, owner: str, expires_at: float) -> bool:
    """Prolong the owner's lease, or give it a new one; whether the old one still stood."""
    stood = db.execute("UPDATE owners SET expires_at = ? WHERE owner = ?", (expires_at, owner)).rowcount
    if not stood:
        db.execute("INSERT INTO owners VALUES (?, ?)", (owner, expires_at))
    return bool(stood)


def return_lost(db: sqlite3.Connection, now_boot_s: float) -> tuple[int, set[str]]:
    """Take the messages of owners whose time is over: how many, and their queues."""
    lost = db.execute("SELECT owner FROM owners WHERE expires_at <= ?", (now_boot_s,)).fetchall()
    count, queues = 0, set()
    for (owner,) in lost:
        returned, into = forget(db, owner)
        count += returned
        queues |= into
    return count, queues


def forget(db: sqlite3.Connection, owner: str) -> tuple[int, set[str]]:
    """End the owner's lease and return what it holds. That may have run: nobody can tell."""
    db.execute("DELETE FROM owners WHERE owner = ?", (owner,))
    numbers = [number for (number,) in db.execute("SELECT id FROM claimed WHERE owner = ?", (owner,))]
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
    return [Heap(queue, priority, rows.ints(ids)) for priority, ids in found]


def _fetch(db: sqlite3.Connection, packed: str, ticket: int) -> dict[int, Delivery]:
    """The deliveries by id. One row for all: their bytes end to end, cut apart by their lengths."""
    try:
        numbers, queues, starts, redelivered, lengths, joined = db.execute(
            """SELECT json_group_array(id), json_group_array(queue), json_group_array(starts),
                      json_group_array(redelivered), json_group_array(length(message)),
                      CAST(group_concat(message, '') AS BLOB)
               FROM messages WHERE id IN (SELECT value FROM json_each(?))""",
            (packed,),
        ).fetchone()
        cuts = rows.ints(lengths)
        columns = zip(*map(rows.ints, (numbers, starts, redelivered)), rows.strings(queues), strict=True)
    except (sqlite3.DataError, msgspec.DecodeError):  # too much for one row, or a row that is not ours
        return _fetch_each(db, packed, ticket)
    if sum(cuts) != len(joined):  # somebody wrote text where bytes belong
        return _fetch_each(db, packed, ticket)
    found: dict[int, Delivery] = {}
    view, end = memoryview(joined), 0
    for (number, started, again, queue), length in zip(columns, cuts, strict=True):
        message = messages.decode(bytes(view[end : end + length]))
        found[number] = Delivery(messages.tag(ticket, number), queue, message, started, bool(again))
        end += length
    return found


def _fetch_each(db: sqlite3.Connection, packed: str, ticket: int) -> dict[int, Delivery]:
    """The same row by row, whatever is in them."""
    found = db.execute(
        """SELECT id, queue, CASE typeof(starts) WHEN 'integer' THEN starts ELSE 0 END, redelivered, message
           FROM messages WHERE id IN (SELECT value FROM json_each(?))""",
        (packed,),
    )
    return {
        number: Delivery(messages.tag(ticket, number), queue, messages.decode(message), starts, bool(again))
        for number, queue, starts, again, message in found
    }
