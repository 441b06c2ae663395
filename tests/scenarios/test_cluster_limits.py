"""Limits that hold for the whole cluster: never above them, no key stuck after a kill, nobody else held up.

The ledger that the tasks write is the judge. With UMBEL_SOAK=1 eight workers and a large backlog:
SOAK_MESSAGES says how large.
"""

import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

import pytest

from tests.cluster import Cluster
from tests.scenarios.cluster_limit_tasks import AT_ONCE, PER_MINUTE, STUCK
from tests.scenarios.places import place
from tests.waiting import wait_until
from umbel.errors import NotSupported

SOAK = bool(os.environ.get("UMBEL_SOAK"))
MESSAGES = int(os.environ.get("SOAK_MESSAGES", "1000000")) if SOAK else 240
KEYS, WORKERS, KILLS = (1000, 8, 6) if SOAK else (24, 3, 1)
PACED_KEYS, PACED_EACH, PLAIN = 4, 30, 40
WAIT_S = 3600.0 if SOAK else 90.0
BATCH = 5000
LEASE_S = 2.0
TASKS_FILE = Path(__file__).with_name("cluster_limit_tasks.py")
pytestmark = [pytest.mark.scenario, pytest.mark.timeout(7200 if SOAK else 240)]

Run = tuple[str, str, int]  # task, key, number


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


def test_the_judge_sees_what_is_too_much() -> None:
    assert most_at_once([(0, 2), (1, 3), (2, 4)]) == 2
    assert most_at_once([(0, 2), (1, 3), (1.5, 4)]) == 3
    assert most_within([(0, 0), (59, 0), (60, 0)], 60) == 2


def calls(cluster: Cluster) -> Iterator[tuple[str, tuple[object, ...]]]:
    for number in range(MESSAGES // KEYS):
        for key in range(KEYS):
            yield "few", (f"k{key}", number)
    for number in range(PACED_EACH):
        for key in range(PACED_KEYS):
            yield "paced", (f"k{key}", number)
    for number in range(2 * AT_ONCE + 1):
        yield "few", (STUCK, number)
    for number in range(PLAIN):
        yield "plain", (number,)


def wait_for_some(ledger: Ledger, count: int) -> None:
    wait_until(lambda: ledger.read().ended_of("few") >= count, deadline_s=WAIT_S, what=f"{count} runs")


def send_all(cluster: Cluster) -> None:
    tasks = cluster.app.tasks
    waiting = [tasks[f"cluster_limit_tasks.{name}"].s(*args) for name, args in calls(cluster)]
    for first in range(0, len(waiting), BATCH):
        cluster.app.send_many(waiting[first : first + BATCH])


@pytest.mark.parametrize("broker", ["redis"] if SOAK else ["sqlite", "redis"])
def test_limits_hold_for_the_cluster_and_outlive_its_workers(broker: str, tmp_path: Path) -> None:
    with (
        place(broker, tmp_path, durable=False) as where,
        Cluster(tmp_path, TASKS_FILE, broker=where.broker, backend=where.backend, lease_s=LEASE_S) as cluster,
    ):
        ledger = Ledger(tmp_path / "ledger.txt")
        send_all(cluster)
        names = [f"w{number}" for number in range(WORKERS)]
        for name in names:
            cluster.start_worker(name, "-c", "2", wait=False)
        wanted = MESSAGES // KEYS * KEYS
        for kill in range(1, KILLS + 1):
            wait_for_some(ledger, wanted * kill // (KILLS + 2))
            name = names[kill % WORKERS]
            cluster.kill_worker(name)
            ledger.kills[name] = monotonic()
            names[kill % WORKERS] = again = f"{name}x{kill}"
            cluster.start_worker(again, "-c", "2", wait=False)
        # While two of one key do not end, all others do.
        wait_until(
            lambda: ledger.read().ended_of("few") == wanted and ledger.ended_of("plain") == PLAIN,
            deadline_s=WAIT_S,
            what="the end of all other keys and tasks",
        )
        (queue,) = cluster.umbel_json("queues", "ls")
        assert queue["limited"] >= 2 * AT_ONCE + 1 - AT_ONCE - 1
        (tmp_path / "gate").touch()
        wait_until(
            lambda: ledger.read().ended_of("few", stuck=True) == 2 * AT_ONCE + 1,
            deadline_s=WAIT_S,
            what="the end of those that waited",
        )
        few, paced = ledger.times("few"), ledger.times("paced")
        assert max(map(most_at_once, few.values())) == AT_ONCE
        assert all(1 <= most_within(times, 60.0) <= PER_MINUTE for times in paced.values())
        assert len(paced) == PACED_KEYS


@pytest.mark.parametrize("name", ["few", "paced"])
def test_rabbitmq_refuses_limits_in_one_line_that_names_the_remedy(name: str, tmp_path: Path) -> None:
    broker = "amqp://guest:guest@127.0.0.1:1//"  # nobody is there: it is refused before that matters
    with Cluster(tmp_path, TASKS_FILE, broker=broker, backend="rpc://") as cluster:
        with pytest.raises(
            NotSupported, match=rf"limit_tasks\.{name}'.*RabbitMQ has no.*use Redis"
        ) as refused:
            cluster.app.tasks[f"cluster_limit_tasks.{name}"].delay("k", 1)
        assert "\n" not in str(refused.value)
        process = cluster.start_worker("w", wait=False)
        assert process.wait(60) != 0
        assert "RabbitMQ has no value that can be compared" in cluster.log("w")
