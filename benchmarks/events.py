"""How quick and how small is the cluster's state, beside the one that Celery's monitors use?

Both take in the same events, decoded, one at a time: some 500,000 of 120,000 tasks, told by nodes
of both kinds. Each keeps as many tasks as Celery does by default (10,000); then all of them, to see
what a task takes up in memory. Last, Umbel alone: what an event costs while 10,000 tasks are in
memory, and while a million are.

    scripts/setup bench
    .venv/bin/python benchmarks/events.py [--json] [--rounds N] [--tasks N] [--only umbel]
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._harness.benchmark import PEERS_PYTHON, Benchmark, clean_environment
from benchmarks._harness.measures import Measure, Target
from benchmarks._harness.processes import answer_of

TASKS = 120_000
CELERYS_TASKS_MAX = 10_000
TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Contender:
    """`in_memory`: how many tasks there are while the cost of an event is measured."""

    name: str
    python: Path
    module: str
    compares: bool = True
    in_memory: float | None = None

    @property
    def is_peer(self) -> bool:
        return self.python == PEERS_PYTHON

    def settings(self, home: Path) -> Mapping[str, str]:
        return {str(name): str(value) for name, value in self.ask(home, "describe").items()}

    def ask(self, home: Path, *arguments: object) -> dict[str, Any]:
        answer: dict[str, Any] = answer_of(
            self.name,
            [self.python, "-m", "benchmarks._events.side", self.module, *map(str, arguments)],
            environment=clean_environment(),
            directory=home,
            timeout_s=TIMEOUT_S,
        )
        return answer


def apply(contender: Contender, home: Path, tasks: int) -> Mapping[str, float]:
    if not contender.compares:
        return {}
    return {"apply": contender.ask(home, "apply", tasks, CELERYS_TASKS_MAX)["events_per_s"]}


def hold(contender: Contender, home: Path, tasks: int) -> Mapping[str, float]:
    if not contender.compares:
        return {}
    return {"memory": contender.ask(home, "hold", max(1, tasks // 4))["bytes_per_task"]}


def flow(contender: Contender, home: Path, tasks: int) -> Mapping[str, float]:
    if contender.in_memory is None:
        return {}
    in_memory = max(1, round(contender.in_memory * tasks / TASKS))
    return {"cost": contender.ask(home, "flow", in_memory, max(1, tasks // 4))["us_per_event"]}


UMBEL = Contender("umbel", Path(sys.executable), "benchmarks._events.umbel_side", in_memory=1_000_000)
UMBEL_10K = Contender(
    "umbel_10k", Path(sys.executable), "benchmarks._events.umbel_side", compares=False, in_memory=10_000
)
CELERY = Contender("celery", PEERS_PYTHON, "benchmarks._events.celery_side")

BENCHMARK = Benchmark(
    name="events",
    question="taking in the events of a cluster",
    contenders=(UMBEL, CELERY, UMBEL_10K),
    stages={"10,000 tasks kept": apply, "all tasks kept": hold, "tasks in memory": flow},
    measures=(
        Measure("apply", "events taken in", "events/CPU s"),
        Measure("memory", "memory of a task", "bytes", higher_is_better=False),
        Measure("cost", "one event, a million tasks in memory", "µs CPU", higher_is_better=False),
    ),
    targets=(
        Target("apply", "celery", at_least=3.0),
        Target("memory", "celery", at_least=2.0),
        Target("cost", "umbel_10k", at_least=0.7),
    ),
    tasks=TASKS,
    notes=(
        "apply: both keep 10,000 tasks, Celery's default; the later an event, the more have been dropped.",
        "memory: a quarter of the tasks, all kept; what Python has allocated when their events are gone.",
        "umbel_10k is Umbel with 10,000 tasks in memory instead of a million (fewer where --tasks is less):",
        "cost per event is flat if the two do not differ by more than what the processor's caches explain.",
    ),
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
