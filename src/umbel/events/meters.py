"""Meters: counts that only grow, by task name and by node, for who scrapes them.

The number of series is bounded: names beyond NAMES_MAX are counted as `other`, and what a node counted goes
when it has been gone for a while.
"""

from bisect import bisect_left
from collections.abc import Iterable

import msgspec

from umbel.events.merge import Registers, count
from umbel.events.types import TaskEvent
from umbel.events.view import name_of

NAMES_MAX = 500
SERIES_MAX = 20_000
OTHER = "other"
BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
ENDS = {
    "succeeded": "succeeded",
    "failed": "failed",
    "revoked": "revoked",
    "rejected": "rejected",
    "retried": "retried",
}


class Histogram(msgspec.Struct):
    """How many were at most so long, for each of BOUNDS_S and beyond; and how long all were."""

    counts: list[int]
    total_s: float = 0.0

    @classmethod
    def empty(cls) -> "Histogram":
        return cls([0] * (len(BOUNDS_S) + 1))

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.total_s += seconds

    def cumulative(self) -> list[tuple[str, float]]:
        found, total = [], 0
        for bound, one in zip([*map(str, BOUNDS_S), "+Inf"], self.counts, strict=True):
            total += one
            found.append((bound, float(total)))
        return found


class Meters:
    def __init__(self) -> None:
        self.ended: dict[tuple[str, str], int] = {}  # (name, end)
        self.repeats: dict[str, int] = {}
        self.wait: dict[str, Histogram] = {}
        self.run: dict[str, Histogram] = {}
        self.by_node: dict[tuple[str, str, str], int] = {}  # (node, type, name)
        self._names: set[str] = set()

    def take(self, event: TaskEvent, known: Registers) -> str:
        """Count one event; the name under which its task is counted."""
        name = self.name(name_of(known) or "unknown")
        end = ENDS.get(event.slot)
        if end is not None:
            self.note_end(name, end)
        elif event.slot == "received" and count(known, "received") > 1:
            self.repeats[name] = self.repeats.get(name, 0) + 1
        key = (event.hostname, event.type_name, name)
        if key in self.by_node or len(self.by_node) < SERIES_MAX:
            self.by_node[key] = self.by_node.get(key, 0) + 1
        return name

    def note_end(self, name: str, end: str) -> None:
        self.ended[name, end] = self.ended.get((name, end), 0) + 1

    def waited(self, name: str, seconds: float) -> None:
        self.wait.setdefault(name, Histogram.empty()).add(max(0.0, seconds))

    def ran(self, name: str, seconds: float) -> None:
        self.run.setdefault(name, Histogram.empty()).add(max(0.0, seconds))

    def forget(self, nodes: Iterable[str]) -> None:
        gone = frozenset(nodes)
        for key in [key for key in self.by_node if key[0] in gone]:
            del self.by_node[key]

    def name(self, name: str) -> str:
        """Under which a task is counted."""
        if name in self._names:
            return name
        if len(self._names) >= NAMES_MAX:
            return OTHER
        self._names.add(name)
        return name
