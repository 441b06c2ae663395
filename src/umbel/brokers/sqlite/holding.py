"""Holding: which claims this process has, for the case that the file is replaced under it.

The file is the record of claims. If it was deleted, the claims are known only here; if it was replaced
by an older copy, that may also hold claims of ours that were settled long ago, which nobody would end.
"""

import sqlite3
from collections.abc import Container, Iterable

from umbel.brokers.interface import Ack, Bury, Delivery, Started, Tag, Verdict
from umbel.brokers.sqlite import claims, messages


class Holding:
    def __init__(self) -> None:
        self.owners: set[str] = set()
        self.unknown: set[Tag] = set()  # claimed in a file that is gone, and not settled
        self.marks: dict[Tag, str] = {}  # of the signatures that claimed messages have used
        self.slots: dict[Tag, str] = {}  # by claim: the bucket that it holds a slot of
        self._held: dict[Tag, str] = {}

    def take(self, owner: str, deliveries: Iterable[Delivery]) -> None:
        for delivery in deliveries:
            self._held[delivery.tag] = owner

    def settle(self, verdicts: Iterable[Verdict]) -> frozenset[Tag]:
        """These have ended; those of them that are unknown to the file."""
        ended = [verdict.tag for verdict in verdicts if not isinstance(verdict, Started)]
        for tag in ended:
            self._held.pop(tag, None)
            if self.marks:
                self.marks.pop(tag, None)
            if self.slots:
                self.slots.pop(tag, None)
        if not self.unknown:
            return frozenset()
        gone = self.unknown.intersection(ended)
        self.unknown -= gone
        return frozenset(gone)

    def marks_ended(self, verdicts: Iterable[Verdict], conflicts: Container[Tag]) -> list[str]:
        """The signatures of the messages that these verdicts end."""
        tags = (one.tag for one in verdicts if isinstance(one, Ack | Bury) and one.tag not in conflicts)
        return [self.marks[tag] for tag in tags if tag in self.marks]

    def let_go(self, tags: Iterable[Tag]) -> None:
        """They wait in the broker, or others have them."""
        for tag in tags:
            self._held.pop(tag, None)
            self.marks.pop(tag, None)

    def slots_ended(self, verdicts: Iterable[Verdict], conflicts: Container[Tag]) -> dict[Tag, str]:
        """The slots of the claims that these verdicts end, with their buckets."""
        ended = [one.tag for one in verdicts if not isinstance(one, Started) and one.tag in self.slots]
        return {tag: self.slots[tag] for tag in ended if tag not in conflicts}

    def forget(self, owner: str) -> None:
        self.owners.discard(owner)
        self.marks.clear()
        self.slots.clear()
        self._held = {tag: holder for tag, holder in self._held.items() if holder != owner}

    def reconcile(self, db: sqlite3.Connection, expires_at: float) -> None:
        """Compare with another file: what it has as ours and we do not hold goes back to its queue."""
        missing = set(self._held)
        for owner in self.owners:
            found = db.execute("SELECT id, ticket FROM claimed WHERE owner = ?", (owner,)).fetchall()
            standing = {messages.tag(ticket, number): number for number, ticket in found}
            missing -= standing.keys()
            strays = [number for tag, number in standing.items() if tag not in self._held]
            messages.mark(db, strays, starts=0, redelivered=True)
            messages.put_back(db, strays)
            claims.lease(db, owner, expires_at)
        for tag in missing:
            del self._held[tag]
        self.unknown |= missing
