"""What limited tasks wrote when they began and ended, and what that says about their limits.

Also how such a cluster is filled, and how its workers are killed: who was killed when belongs to the ledger.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from time import monotonic

from tests.cluster import Cluster
from tests.scenarios.cluster_limit_tasks import STUCK
from tests.waiting import wait_until

BATCH = 5000

Run = tuple[str, str, int]  # task, key, number
Call = tuple[str, tuple[object, ...]]


@dataclass
class Ledger:
    """What the tasks wrote, read as far as it goes."""

    file: Path
    begun: list[tuple[Run, str, float]] = field(default_factory=list)
    ended: dict[Run, list[float]] = field(default_factory=lambda: defaultdict(list))
    kills: dict[str, float] = field(default_factory=dict)
    _counts: Counter[tuple[str, bool]] = field(default_factory=Counter)
    _read: int = 0

    def read(self) -> "Ledger":
        if self.file.exists():
            with self.file.open("rb") as lines:
                lines.seek(self._read)
                text = lines.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._read += len(whole)
            for line in whole.decode().splitlines():
                what, task, key, number, worker, at = line.split()
                run = (task, key, int(number))
                if what == "end":
                    self._counts[task, key == STUCK] += run not in self.ended
                    self.ended[run].append(float(at))
                else:
                    self.begun.append((run, worker, float(at)))
        return self

    def ended_of(self, task: str, *, stuck: bool = False) -> int:
        return self._counts[task, stuck]

    def running_of(self, task: str, key: str) -> int:
        """How many of these have begun on a worker that was not killed, and have not ended."""
        begun = {run for run, worker, _ in self.begun if run[:2] == (task, key) and worker not in self.kills}
        return len(begun - self.ended.keys())

    def wait_for(self, task: str, count: int, *, deadline_s: float) -> None:
        wait_until(
            lambda: self.read().ended_of(task) >= count, deadline_s=deadline_s, what=f"{count} runs of {task}"
        )

    def times(self, task: str) -> dict[str, list[tuple[float, float]]]:
        """By key: from when to when each ran. One that was killed ran until then."""
        found: dict[str, list[tuple[float, float]]] = defaultdict(list)
        left = {run: sorted(times) for run, times in self.ended.items()}
        for run, worker, began in sorted(self.begun, key=lambda entry: -entry[2]):
            if run[0] == task:
                ends = left.get(run, [])
                is_over = ends and ends[-1] >= began
                found[run[1]].append((began, ends.pop() if is_over else self.killed_after(worker, began)))
        return found

    def killed_after(self, worker: str, began: float) -> float:
        assert self.kills[worker] >= began - 1.0, f"{worker} began and never ended"
        return self.kills[worker]


def most_at_once(times: list[tuple[float, float]]) -> int:
    changes = sorted(change for began, ended in times for change in ((began, 1), (ended, -1)))
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def most_within(times: list[tuple[float, float]], period_s: float) -> int:
    starts, first, most = sorted(began for began, _ in times), 0, 0
    for place_, at in enumerate(starts):
        while at - starts[first] >= period_s:
            first += 1
        most = max(most, place_ - first + 1)
    return most


def longest_rest_s(starts: Sequence[float]) -> float:
    return max(after - before for before, after in pairwise(starts))


def late_s(starts: Sequence[float], interval_s: float) -> float:
    """How much later the last of these started than it would have at that pace."""
    return starts[-1] - starts[0] - (len(starts) - 1) * interval_s


def send_all(cluster: Cluster, calls: Iterable[Call]) -> None:
    tasks = cluster.app.tasks
    waiting = [tasks[f"cluster_limit_tasks.{name}"].s(*args) for name, args in calls]
    for first in range(0, len(waiting), BATCH):
        cluster.app.send_many(waiting[first : first + BATCH])


@dataclass
class Workers:
    """So many at any time; one that is killed is replaced by one with another name."""

    cluster: Cluster
    ledger: Ledger
    count: int
    children: int = 2
    names: list[str] = field(default_factory=list)

    def start(self) -> None:
        self.names = [f"w{number}" for number in range(self.count)]
        for name in self.names:
            self.cluster.start_worker(name, "-c", str(self.children), wait=False)

    def kill(self, turn: int) -> None:
        name = self.names[turn % self.count]
        self.cluster.kill_worker(name)
        self.ledger.kills[name] = monotonic()
        self.names[turn % self.count] = again = f"{name}x{turn}"
        self.cluster.start_worker(again, "-c", str(self.children), wait=False)
