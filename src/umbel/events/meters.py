"""Meters: counts that only grow, by task name and by node, for who scrapes them.

The number of series is bounded: names beyond NAMES_MAX are counted as `other`, and what a node counted goes
when it has been gone for a while.
"""

from collections import OrderedDict
from collections.abc import Iterable

from umbel.events.flower_meters import FlowerMeters
from umbel.events.histogram import Histogram
from umbel.events.merge import Registers, count
from umbel.events.types import TaskEvent
from umbel.events.view import name_of

NAMES_MAX = 500
SERIES_MAX = 20_000
ATTEMPTS_MAX = 10_000  # tasks of which the last further attempt is remembered
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
    def __init__(self) -> None:
        self.ended: dict[tuple[str, str], int] = {}  # (name, end)
        self.repeats: dict[str, int] = {}
        self.wait: dict[str, Histogram] = {}
        self.run: dict[str, Histogram] = {}
        self.by_node: dict[tuple[str, str, str], int] = {}  # (node, type, name)
        self.flower = FlowerMeters()
        self._names: set[str] = set()
        self._attempts: OrderedDict[str, int] = OrderedDict()  # the last one received, of tasks that retried

    def take(self, event: TaskEvent, known: Registers) -> str:
        """Count one event; the name under which its task is counted."""
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
        self.repeats[name] = self.repeats.get(name, 0) + 1

    def _is_repeat(self, event: TaskEvent, known: Registers) -> bool:
        """Whether this attempt of the task was received before; a retry is no repeat."""
        if not event.retries:
            return count(known, "received") > 1
        before = self._attempts.pop(event.uuid, None)
        self._attempts[event.uuid] = event.retries
        if len(self._attempts) > ATTEMPTS_MAX:
            self._attempts.popitem(last=False)
        return before == event.retries

    def note_end(self, name: str, end: str) -> None:
        self.ended[name, end] = self.ended.get((name, end), 0) + 1

    def waited(self, name: str, seconds: float) -> None:
        self.wait.setdefault(name, Histogram.empty(BOUNDS_S)).add(max(0.0, seconds))

    def ran(self, name: str, seconds: float) -> None:
        self.run.setdefault(name, Histogram.empty(BOUNDS_S)).add(max(0.0, seconds))

    def forget(self, nodes: Iterable[str]) -> None:
        gone = frozenset(nodes)
        for key in [key for key in self.by_node if key[0] in gone]:
            del self.by_node[key]
        self.flower.forget(gone)

    def name(self, name: str) -> str:
        """Under which a task is counted."""
        if name in self._names:
            return name
        if len(self._names) >= NAMES_MAX:
            return OTHER
        self._names.add(name)
        return name
