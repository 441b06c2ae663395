"""Newcomers: runs of nodes that were heard of and are not members yet, because anybody can make up a name.

A run becomes a member when it gives a second sign of life: an event that was sent later, and that comes
at least half an interval after the first one. The broker may be quicker: it is asked at the first
sign, for ASKED_PER_S newcomers at most, and where it knows the node, by its mark or its mailbox, the run
is a member at once.

At NEWCOMERS_MAX the oldest goes first, and after KEPT_S any does. So a flood of names costs a table of
that size, takes no place from a member and is not announced. In a flood that replaces the whole table
within an interval, a node that starts becomes a member by the broker's word, or when the flood is over.
"""

from math import inf

from umbel.protocol.membership.events import Heard
from umbel.protocol.membership.suspicion import believable_freq_s

NEWCOMERS_MAX = 10_000
KEPT_S = 120.0  # twice what Celery takes for a node that does not say how often it beats
ASKED_PER_S = 50
APART = 0.5  # intervals


class Newcomers:
    def __init__(self, newcomers_max: int = NEWCOMERS_MAX) -> None:
        self._newcomers_max = newcomers_max
        self._first: dict[str, tuple[Heard, float]] = {}  # the first sign of each and when, the oldest first
        self._asked = 0
        self._asked_since_s = -inf

    def __len__(self) -> int:
        return len(self._first)

    def is_first(self, heard: Heard, now_s: float) -> bool:
        """Whether this is the first sign of that run; it is remembered then."""
        self._forget_old(now_s)
        known = self._first.get(heard.node)
        if known is not None and (_run(known[0]) == _run(heard) or heard.inc < known[0].inc):
            return False
        self._first.pop(heard.node, None)
        self._first[heard.node] = (heard, now_s)
        if len(self._first) > self._newcomers_max:
            del self._first[next(iter(self._first))]
        return True

    def is_proven(self, heard: Heard, now_s: float) -> bool:
        """Whether this is a second sign of a run."""
        known = self._first.get(heard.node)
        if known is None or _run(known[0]) != _run(heard):
            return False
        first, first_s = known
        later = heard.sent_at > first.sent_at or heard.clock > first.clock
        return later and now_s - first_s >= APART * believable_freq_s(heard.freq_s)

    def find(self, node: str, inc: int, pid: int) -> Heard | None:
        known = self._first.get(node)
        return known[0] if known is not None and _run(known[0]) == (inc, pid) else None

    def may_ask(self, now_s: float) -> bool:
        """Whether the broker may be asked after one more."""
        if now_s - self._asked_since_s >= 1.0:
            self._asked, self._asked_since_s = 0, now_s
        self._asked += 1
        return self._asked <= ASKED_PER_S

    def forget(self, node: str) -> None:
        self._first.pop(node, None)

    def _forget_old(self, now_s: float) -> None:
        while self._first:
            oldest = next(iter(self._first))
            if now_s - self._first[oldest][1] <= KEPT_S:
                return
            del self._first[oldest]


def _run(heard: Heard) -> tuple[int, int]:
    return heard.inc, heard.pid
