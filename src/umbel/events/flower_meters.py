"""FlowerMeters: what Flower measures of tasks at each worker, under its names, for its dashboards and alerts.

Runtimes, and how long and how many messages wait at a worker that has received them. Messages that wait are
known one by one: Flower adds and subtracts, and an event that it missed puts its count off for good. A task
with an ETA waits because it must; that is not measured.
"""

from collections import Counter, OrderedDict
from collections.abc import Set

from umbel.events.histogram import Histogram
from umbel.events.types import TaskEvent, TaskReceived, TaskStarted, TaskSucceeded

WAITING_MAX = 50_000
SERIES_MAX = 20_000
BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
Key = tuple[str, str]  # worker, task


class FlowerMeters:
    def __init__(self) -> None:
        self.runtime: dict[Key, Histogram] = {}
        self.prefetch_s: dict[Key, float] = {}  # of the last task that began; 0 when it has ended
        self._waiting: OrderedDict[str, tuple[Key, float]] = OrderedDict()  # by id: where, and since when

    def take(self, event: TaskEvent, name: str) -> None:
        """Count one event of a task that is counted under this name."""
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
        """How many wait at a worker; 0 where some did."""
        return dict.fromkeys(self.prefetch_s, 0) | Counter(key for key, _ in self._waiting.values())

    def forget(self, nodes: Set[str]) -> None:
        for series in (self.runtime, self.prefetch_s):
            for key in [key for key in series if key[0] in nodes]:
                del series[key]
        for uuid in [uuid for uuid, (key, _) in self._waiting.items() if key[0] in nodes]:
            del self._waiting[uuid]

    def _left(self, event: TaskEvent, key: Key) -> None:
        """It waits no longer: it has begun, or ended."""
        waited = self._waiting.pop(event.uuid, None)
        if isinstance(event, TaskStarted) and waited is not None:
            self._put(key, max(0.0, event.timestamp - waited[1]))
        elif event.slot in ("succeeded", "failed"):
            self._put(key, 0.0)
        if isinstance(event, TaskSucceeded) and event.runtime is not None and self._has_room(key):
            self.runtime.setdefault(key, Histogram.empty(BOUNDS_S)).add(event.runtime)

    def _put(self, key: Key, seconds: float) -> None:
        if key in self.prefetch_s or len(self.prefetch_s) < SERIES_MAX:
            self.prefetch_s[key] = seconds

    def _has_room(self, key: Key) -> bool:
        return key in self.runtime or len(self.runtime) < SERIES_MAX
