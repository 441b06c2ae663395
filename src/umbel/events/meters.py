"""Counters and histograms of tasks and nodes for Prometheus, under Umbel's names and under Flower's.

Counters never decrease. The number of series is limited: names beyond the limit are counted as `other`, and
the series of a node are removed some time after the node is gone. `FlowerMeters` uses Flower's names, so that
dashboards and alerts made for Flower work unchanged.
"""

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence, Set

import msgspec

from umbel.events.merge import Registers, count
from umbel.events.types import TaskEvent, TaskReceived, TaskStarted, TaskSucceeded
from umbel.events.view import name_of

# ---- histogram -------------------------------------------------------------------------------------


class Histogram(msgspec.Struct):
    """Counts durations by upper bound, and sums them. Longer durations than the last bound are counted
    separately.
    """

    bounds_s: Sequence[float]
    counts: list[int]
    total_s: float = 0.0

    @classmethod
    def empty(cls, bounds_s: Sequence[float]) -> "Histogram":
        """Return a histogram with these bounds and no values."""
        return cls(bounds_s, [0] * (len(bounds_s) + 1))

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(self.bounds_s, seconds)] += 1
        self.total_s += seconds

    def cumulative(self) -> list[tuple[str, float]]:
        """Return each bound as text with the number of durations up to it, in Prometheus' form."""
        found, total = [], 0
        for bound, number in zip([*map(str, self.bounds_s), "+Inf"], self.counts, strict=True):
            total += number
            found.append((bound, float(total)))
        return found


# ---- flower meters ---------------------------------------------------------------------------------
#
# Flower adds and subtracts to count waiting messages, so an event that it missed makes its count wrong for
# good. Here each waiting message is tracked by its id. A task with an ETA waits on purpose, so it is not
# counted.

WAITING_MAX = 50_000
FLOWER_SERIES_MAX = 20_000
FLOWER_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
Key = tuple[str, str]  # worker, task


class FlowerMeters:
    """Run times, waiting messages and prefetch times, by worker and task name."""

    def __init__(self) -> None:
        self.runtime: dict[Key, Histogram] = {}
        self.prefetch_s: dict[Key, float] = {}  # the wait of the last task that started; 0 after it ended
        # by task id: the key, and when it was received
        self._waiting: OrderedDict[str, tuple[Key, float]] = OrderedDict()

    def take(self, event: TaskEvent, name: str) -> None:
        """Count one event of a task under this name."""
        key = (event.hostname, name)
        if isinstance(event, TaskReceived):
            self._waiting.pop(event.uuid, None)
            if event.eta is None:
                self._waiting[event.uuid] = (key, event.timestamp)
            if len(self._waiting) > WAITING_MAX:
                self._waiting.popitem(last=False)
        elif event.slot not in ("sent", "custom"):
            self._left(event, key)

    def prefetched(self) -> dict[Key, int]:
        """Return how many messages wait at each worker; 0 for a worker where messages waited before."""
        return dict.fromkeys(self.prefetch_s, 0) | Counter(key for key, _ in self._waiting.values())

    def forget(self, nodes: Set[str]) -> None:
        """Remove the series and the waiting messages of these nodes."""
        for series in (self.runtime, self.prefetch_s):
            for key in [key for key in series if key[0] in nodes]:
                del series[key]
        for uuid in [uuid for uuid, (key, _) in self._waiting.items() if key[0] in nodes]:
            del self._waiting[uuid]

    def _left(self, event: TaskEvent, key: Key) -> None:
        """Record that a message no longer waits, because its task started or ended."""
        waited = self._waiting.pop(event.uuid, None)
        if isinstance(event, TaskStarted) and waited is not None:
            self._put(key, max(0.0, event.timestamp - waited[1]))
        elif event.slot in ("succeeded", "failed"):
            self._put(key, 0.0)
        if isinstance(event, TaskSucceeded) and event.runtime is not None and self._has_room(key):
            self.runtime.setdefault(key, Histogram.empty(FLOWER_BOUNDS_S)).add(event.runtime)

    def _put(self, key: Key, seconds: float) -> None:
        if key in self.prefetch_s or len(self.prefetch_s) < FLOWER_SERIES_MAX:
            self.prefetch_s[key] = seconds

    def _has_room(self, key: Key) -> bool:
        return key in self.runtime or len(self.runtime) < FLOWER_SERIES_MAX


# ---- meters ----------------------------------------------------------------------------------------

NAMES_MAX = 500
SERIES_MAX = 20_000
ATTEMPTS_MAX = 10_000  # number of tasks whose last retry is remembered
OTHER = "other"
BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
ENDS = {
    "succeeded": "succeeded",
    "failed": "failed",
    "revoked": "revoked",
    "rejected": "rejected",
    "retried": "retried",
}


class Meters:
    """Counters and histograms of tasks by name and node, for `/metrics`."""

    def __init__(self) -> None:
        self.ended: dict[tuple[str, str], int] = {}  # by (name, outcome)
        self.repeats: dict[str, int] = {}
        self.wait: dict[str, Histogram] = {}
        self.run: dict[str, Histogram] = {}
        self.by_node: dict[tuple[str, str, str], int] = {}  # by (node, event type, task name)
        self.flower = FlowerMeters()
        self._names: set[str] = set()
        # The last attempt received, by task, for tasks that were retried.
        self._attempts: OrderedDict[str, int] = OrderedDict()

    def take(self, event: TaskEvent, known: Registers) -> str:
        """Count one event; return the name under which its task is counted."""
        name = self.name(name_of(known) or "unknown")
        end = ENDS.get(event.slot)
        if end is not None:
            self.note_end(name, end)
        elif event.slot == "received" and self._is_repeat(event, known):
            self.note_repeat(name)
        self.flower.take(event, name)
        key = (event.hostname, event.type_name, name)
        if key in self.by_node or len(self.by_node) < SERIES_MAX:
            self.by_node[key] = self.by_node.get(key, 0) + 1
        return name

    def note_repeat(self, name: str) -> None:
        """Count a repeated delivery of an attempt."""
        self.repeats[name] = self.repeats.get(name, 0) + 1

    def _is_repeat(self, event: TaskEvent, known: Registers) -> bool:
        """Return whether this attempt of the task was received before; a retry is not a repeat."""
        if not event.retries:
            return count(known, "received") > 1
        before = self._attempts.pop(event.uuid, None)
        self._attempts[event.uuid] = event.retries
        if len(self._attempts) > ATTEMPTS_MAX:
            self._attempts.popitem(last=False)
        return before == event.retries

    def note_end(self, name: str, end: str) -> None:
        """Count the outcome of an attempt."""
        self.ended[name, end] = self.ended.get((name, end), 0) + 1

    def waited(self, name: str, seconds: float) -> None:
        """Count how long a task waited for its start."""
        self.wait.setdefault(name, Histogram.empty(BOUNDS_S)).add(max(0.0, seconds))

    def ran(self, name: str, seconds: float) -> None:
        """Count how long a task ran."""
        self.run.setdefault(name, Histogram.empty(BOUNDS_S)).add(max(0.0, seconds))

    def forget(self, nodes: Iterable[str]) -> None:
        """Remove the series of these nodes."""
        gone = frozenset(nodes)
        for key in [key for key in self.by_node if key[0] in gone]:
            del self.by_node[key]
        self.flower.forget(gone)

    def name(self, name: str) -> str:
        """Return the name under which a task is counted: unchanged, or `other` beyond the limit."""
        if name in self._names:
            return name
        if len(self._names) >= NAMES_MAX:
            return OTHER
        self._names.add(name)
        return name
