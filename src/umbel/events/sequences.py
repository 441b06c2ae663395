"""Sequences: which numbers of whose events are missing.

Every node numbers its events without gaps (`stamp.py`), so a number that does not come is an event
that was lost: not appended to the log, or dropped there. Events may come twice or late, so a hole
is kept open for a while before it counts as a gap.

The first number of a sender is where watching it begins, unless the sender is younger than the
recording: then its events count from 1. What is remembered is bounded: of SENDERS_MAX senders the one
that was met first is forgotten, and starts over when it is heard again; of one sender's holes those
beyond HOLES_MAX are gaps at once. A sender's last events, lost together with it, leave no hole.
"""

from collections.abc import Iterable

import msgspec

SENDERS_MAX = 10_000
HOLES_MAX = 100
SETTLED_AFTER_S = 10.0
YOUNGER_BY_US = 60_000_000
"""A sender counts as younger than the recording from here on: clocks of two machines differ."""

Sender = tuple[str, int, int]
"""Hostname, pid, incarnation."""


class Gap(msgspec.Struct, frozen=True):
    """These numbers did not come. `at_us`: when the event after them happened."""

    hostname: str
    pid: int
    inc: int
    first: int
    last: int
    at_us: int

    @property
    def missing(self) -> int:
        return self.last - self.first + 1


class Hole(msgspec.Struct, array_like=True):
    first: int
    last: int
    at_us: int
    since_s: float


class Known(msgspec.Struct, array_like=True):
    """One sender: the highest number seen, and the holes below it."""

    hostname: str
    pid: int
    inc: int
    highest: int
    holes: list[Hole] = []


class Sequences:
    """`began_us`: since when events are recorded; 0 where nobody knows."""

    def __init__(
        self, *, began_us: int = 0, known: Iterable[Known] = (), senders_max: int = SENDERS_MAX
    ) -> None:
        self.holes_open = 0
        self._began_us = began_us
        self._senders_max = senders_max
        self._known: dict[Sender, Known] = {}
        for one in known:
            self._known[one.hostname, one.pid, one.inc] = one
            self.holes_open += len(one.holes)
        self._full: list[Gap] = []

    def saw(self, stamped: Iterable[tuple[str, int, int, int, int]], now: float) -> None:
        """Hostname, pid, incarnation, number and time of each event, as they came."""
        senders = self._known
        for hostname, pid, inc, seq, at_us in stamped:
            known = senders.get((hostname, pid, inc))
            if known is None:
                known = self._meet(hostname, pid, inc, seq)
            if seq == known.highest + 1:
                known.highest = seq
            elif seq > known.highest:
                self._open(known, Hole(known.highest + 1, seq - 1, at_us, now))
                known.highest = seq
            elif known.holes:
                self._fill(known, seq)

    def saw_run(self, sender: Sender, first: int, last: int) -> bool:
        """All numbers from first to last came, if they go on from what was known.

        Otherwise False, and nothing of it counts: tell them one by one.
        """
        known = self._known.get(sender)
        if known is None:
            known = self._meet(*sender, first)
        if first != known.highest + 1:
            return False
        known.highest = last
        return True

    def settled(self, now: float) -> list[Gap]:
        """The holes that were not filled in time. Each is reported once."""
        gaps, self._full = self._full, []
        if not self.holes_open:
            return gaps
        for known in self._known.values():
            if not known.holes:
                continue
            due = [hole for hole in known.holes if now - hole.since_s >= SETTLED_AFTER_S]
            gaps += [_gap(known, hole) for hole in due]
            known.holes = [hole for hole in known.holes if hole not in due]
            self.holes_open -= len(due)
        return gaps

    def known(self) -> list[Known]:
        """What to remember across a restart."""
        return list(self._known.values())

    def _meet(self, hostname: str, pid: int, inc: int, seq: int) -> Known:
        if len(self._known) >= self._senders_max:
            oldest = self._known.pop(next(iter(self._known)))
            self._full += [_gap(oldest, hole) for hole in oldest.holes]
            self.holes_open -= len(oldest.holes)
        is_young = bool(self._began_us) and inc > self._began_us + YOUNGER_BY_US
        known = self._known[hostname, pid, inc] = Known(hostname, pid, inc, 0 if is_young else seq - 1)
        return known

    def _open(self, known: Known, hole: Hole) -> None:
        known.holes.append(hole)
        self.holes_open += 1
        if len(known.holes) > HOLES_MAX:
            self._full.append(_gap(known, known.holes.pop(0)))
            self.holes_open -= 1

    def _fill(self, known: Known, seq: int) -> None:
        for place, hole in enumerate(known.holes):
            if hole.first <= seq <= hole.last:
                parts = [
                    Hole(hole.first, seq - 1, hole.at_us, hole.since_s),
                    Hole(seq + 1, hole.last, hole.at_us, hole.since_s),
                ]
                known.holes[place : place + 1] = left = [part for part in parts if part.first <= part.last]
                self.holes_open += len(left) - 1
                return


def _gap(known: Known, hole: Hole) -> Gap:
    return Gap(known.hostname, known.pid, known.inc, hole.first, hole.last, hole.at_us)
