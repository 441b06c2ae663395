"""The contenders: how each is started, and how its queue is watched from outside.

A drain begins when the first task runs, as that task says itself, and ends when the queue's table
is empty, as seen by a look every few milliseconds from this process: one row, the same for all.
For Umbel a message leaves the table when its task is done and acknowledged, for Huey when it is
handed out, before the task runs; so the last moment is counted against Umbel. Start-up is not
part of a drain. The first and the last task must have run, or there is no result.
"""

import signal
import sqlite3
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks._embedded.places import (
    DATABASE,
    FSYNC_VARIABLE,
    HOME_VARIABLE,
    KEEP_VARIABLE,
    LAST_VARIABLE,
    mark_file,
)
from benchmarks._harness import probing
from benchmarks._harness.benchmark import PEERS_PYTHON, SOURCE, clean_environment
from benchmarks._harness.processes import CPU_TICK_S, Running, answer_of, running, wait_for

CHILDREN = 2
CLIENT_TIMEOUT_S = 600.0
OUR_PYTHON = Path(sys.executable)


@dataclass(frozen=True, slots=True)
class Enqueue:
    tasks_per_s: float
    cpu_us: float  # of the client, per task


@dataclass(frozen=True, slots=True)
class Drain:
    tasks_per_s: float
    cpu_us: float  # of the worker and its children, per task
    first_task_ms: float  # from the start of the worker's process


@dataclass(frozen=True)
class Contender:
    name: str
    python: Path
    module: str
    worker: str  # the command line, as a reader would type it in that environment
    stop_signal: signal.Signals
    waiting: str  # a query that finds a message while any is not done with
    results: str  # a query for the number of results kept
    variables: Mapping[str, str] = field(default_factory=dict)
    source: Path = SOURCE  # of our package

    def at_commit(self, name: str, source: Path) -> "Contender":
        return replace(self, name=name, source=source)

    @property
    def is_peer(self) -> bool:
        return self.python == PEERS_PYTHON

    def settings(self, home: Path) -> Mapping[str, str]:
        return {**self._ask(home, "describe"), "worker": self.worker}

    def enqueue(self, home: Path, count: int, *, keep: bool = False) -> Enqueue:
        """Send so many tasks, one at a time."""
        return Enqueue(**self._ask(home, "enqueue", str(count), keep=keep))

    def probe(self, home: Path, count: int) -> float:
        """The median time in milliseconds from sending a task to an idle worker until it runs."""
        probing.prepare(home)
        answer = self._ask(home, "probe", str(count))
        return float(answer["p50_ms"])

    @contextmanager
    def draining(self, home: Path, count: int, *, keep: bool = False) -> Iterator[tuple[Running, Drain]]:
        """A worker started on a full queue; the block begins when the queue is empty."""
        command, *arguments = self.worker.split()
        began_ns = time.monotonic_ns()
        with running(
            f"{self.name}-worker",
            [self.python.parent / command, *arguments],
            environment=self._environment(home, keep=keep, last=count - 1),
            directory=home,
            stop_signal=self.stop_signal,
        ) as worker:
            yield worker, self._watch(home, worker, began_ns, count)

    def results_kept(self, home: Path) -> int:
        with _reading(home) as database:
            found: int = database.execute(self.results).fetchone()[0]
            return found

    def _watch(self, home: Path, worker: Running, began_ns: int, count: int) -> Drain:
        first_ns = _time_of(worker, mark_file(home, 0))
        cpu_before_s = worker.cpu_s()
        with _reading(home) as database:
            wait_for(lambda: database.execute(self.waiting).fetchone() is None, "empty its queue", worker)
        ended_ns = time.monotonic_ns()
        # A short drain may use less than the kernel's clock can tell.
        cpu_s = max(worker.cpu_s() - cpu_before_s, CPU_TICK_S)
        _time_of(worker, mark_file(home, count - 1))
        return Drain(
            tasks_per_s=count / (ended_ns - first_ns) * 1e9,
            cpu_us=cpu_s / count * 1e6,
            first_task_ms=(first_ns - began_ns) / 1e6,
        )

    def _ask(self, home: Path, *arguments: str, keep: bool = False) -> dict[str, Any]:
        answer: dict[str, Any] = answer_of(
            f"{self.name}-client",
            [self.python, "-m", "benchmarks._embedded.client", self.module, *arguments],
            environment=self._environment(home, keep=keep),
            directory=home,
            timeout_s=CLIENT_TIMEOUT_S,
        )
        return answer

    def _environment(self, home: Path, *, keep: bool, last: int = 0) -> dict[str, str]:
        ours = {HOME_VARIABLE: str(home), LAST_VARIABLE: str(last), KEEP_VARIABLE: "1" if keep else "0"}
        return clean_environment(source=self.source, UMBEL_RUN_DIR=home / "run", **ours, **self.variables)


UMBEL = Contender(
    name="umbel",
    python=OUR_PYTHON,
    module="benchmarks._embedded.umbel_side",
    worker=f"umbel worker -A benchmarks._embedded.umbel_side:app -c {CHILDREN} -l warning",
    stop_signal=signal.SIGTERM,
    waiting="SELECT 1 FROM messages LIMIT 1",
    results="SELECT count(*) FROM results",
)

HUEY = Contender(
    name="huey",
    python=PEERS_PYTHON,
    module="benchmarks._embedded.huey_side",
    worker=f"huey_consumer benchmarks._embedded.huey_side.huey -k process -w {CHILDREN} -q",
    stop_signal=signal.SIGINT,
    waiting="SELECT 1 FROM task LIMIT 1",
    results="SELECT count(*) FROM kv",
)

HUEY_NOSYNC = Contender(
    name="huey_nosync",
    python=PEERS_PYTHON,
    module=HUEY.module,
    worker=f"{HUEY.worker} -d 0.01 -m 0.01",
    stop_signal=HUEY.stop_signal,
    waiting=HUEY.waiting,
    results=HUEY.results,
    variables={FSYNC_VARIABLE: "0"},
)


@contextmanager
def _reading(home: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(f"file:{home / DATABASE}?mode=ro", uri=True, timeout=10.0)) as database:
        yield database


def _time_of(worker: Running, mark: Path) -> int:
    wait_for(mark.exists, f"run the task of {mark.name}", worker)
    return int(mark.read_text())
