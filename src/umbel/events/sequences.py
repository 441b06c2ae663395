"""Sequences: which numbers of whose events are missing.

Every node numbers its events without gaps (`stamp.py`), so a number that does not come is an event
that was lost: not appended to the log, or dropped there. Events may come twice or late, so a hole
is kept open for a while before it counts as a gap.

The first number of a sender is where watching it begins, unless the sender is younger than the
recording: then its events count from 1. What is remembered is bounded: of SENDERS_MAX senders the one
that was met first is forgotten, and starts over when it is heard again; of one sender's holes those
beyond HOLES_MAX are gaps at once. A sender's last events, lost together with it, leave no hole.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from operator import attrgetter

import msgspec

SENDERS_MAX = 10_000
HOLES_MAX = 5000  # a worker logs 2,000 events at once, by type, and a reader may get half of them first
SETTLED_AFTER_S = 10.0
YOUNGER_BY_US = 60_000_000
"""A sender counts as younger than the recording from here on: clocks of two machines differ."""

Sender = tuple[str, int, int]
"""Hostname, pid, incarnation."""

Run = tuple[int, int, int]
"""Numbers that came, from the first to the last; and when the first happened, in microseconds."""


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
    """One sender: the highest number seen, and the holes below it, in their order."""

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

    def saw(self, sender: Sender, runs: Iterable[Run], now: float) -> None:
        """These numbers of the sender came."""
        known = self._known.get(sender)
        for first, last, at_us in runs:
            if known is None:
                known = self._meet(*sender, first)
            if first <= known.highest:
                self._fill(known, first, last)
            elif first > known.highest + 1:
                self._open(known, Hole(known.highest + 1, first - 1, at_us, now))
            known.highest = max(known.highest, last)

    def goes_on(self, sender: Sender, first: int) -> bool:
        """Whether this is the sender's next number."""
        known = self._known.get(sender)
        return known is not None and known.highest + 1 == first

    def settled(self, now: float) -> list[Gap]:
        """The holes that were not filled in time. Each is reported once."""
        gaps, self._full = self._full, []
        if not self.holes_open:
            return gaps
        for known in self._known.values():
            if not known.holes:
                continue
            open_still = [hole for hole in known.holes if now - hole.since_s < SETTLED_AFTER_S]
            gaps += [_gap(known, hole) for hole in known.holes if now - hole.since_s >= SETTLED_AFTER_S]
            self.holes_open -= len(known.holes) - len(open_still)
            known.holes = open_still
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

    def _fill(self, known: Known, first: int, last: int) -> None:
        begin = bisect_left(known.holes, first, key=attrgetter("last"))
        end = bisect_right(known.holes, last, key=attrgetter("first"))
        left = [
            part
            for hole in known.holes[begin:end]
            for part in (
                Hole(hole.first, first - 1, hole.at_us, hole.since_s),
                Hole(last + 1, hole.last, hole.at_us, hole.since_s),
            )
            if part.first <= part.last
        ]
        known.holes[begin:end] = left
        self.holes_open += len(left) - (end - begin)


def _gap(known: Known, hole: Hole) -> Gap:
    return Gap(known.hostname, known.pid, known.inc, hole.first, hole.last, hole.at_us)
