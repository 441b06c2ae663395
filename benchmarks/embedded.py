"""How quick is Umbel without any server, beside Huey with its SQLite storage?

No-op tasks, two children, one SQLite file in the temporary directory. Every round gives each
contender a new file: it enqueues all tasks one at a time from one client process, starts its
worker on the full queue and drains it, runs single tasks while the worker is idle, and then
fills and drains a second file with results kept.

    scripts/setup bench
    .venv/bin/python benchmarks/embedded.py [--json] [--rounds N] [--tasks N] [--only umbel]
    .venv/bin/python benchmarks/embedded.py --against COMMIT   # what a task costs now, and did; no peers
"""

import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._embedded.contenders import HUEY, HUEY_NOSYNC, UMBEL, Contender
from benchmarks._harness.benchmark import Benchmark
from benchmarks._harness.measures import Measure, Target
from benchmarks._harness.processes import BenchmarkFailed

TASKS = 20_000
PROBES_MAX = 40

MEASURES = (
    Measure("enqueue", "enqueue, one at a time", "tasks/s"),
    Measure("drain", "drain, no results", "tasks/s"),
    Measure("drain_kept", "drain, results kept", "tasks/s"),
    Measure("latency", "idle: sent until it runs, p50", "ms", higher_is_better=False),
    Measure("enqueue_cpu", "enqueue: CPU of the client", "µs/task", higher_is_better=False),
    Measure("drain_cpu", "drain, no results: CPU of all", "µs/task", higher_is_better=False),
    Measure("startup", "start-up until the first task", "ms", higher_is_better=False),
    Measure("memory", "worker and children, PSS", "MiB", higher_is_better=False),
)

NOTES = (
    "no results: Umbel's task has ignore_result=True; Huey stores no None by default.",
    "results kept: Umbel stores every result; Huey has store_none=True.",
    "huey is the peer of the targets: its default settings, two processes (two threads are slower), quiet.",
    "huey_nosync: fsync=False, which a power cut may punish, and 100 polls a second; for information.",
)


def without_results(contender: Contender, home: Path, tasks: int) -> Mapping[str, float]:
    enqueue = contender.enqueue(home, tasks)
    with contender.draining(home, tasks) as (worker, drain):
        memory_bytes = worker.pss_bytes()
        latency_ms = contender.probe(home, min(PROBES_MAX, tasks))
    return {
        "enqueue": enqueue.tasks_per_s,
        "enqueue_cpu": enqueue.cpu_us,
        "drain": drain.tasks_per_s,
        "drain_cpu": drain.cpu_us,
        "latency": latency_ms,
        "startup": drain.first_task_ms,
        "memory": memory_bytes / 2**20,
    }


def with_results(contender: Contender, home: Path, tasks: int) -> Mapping[str, float]:
    contender.enqueue(home, tasks, keep=True)
    with contender.draining(home, tasks, keep=True) as (_worker, drain):
        pass
    kept = contender.results_kept(home)
    if kept != tasks:
        raise BenchmarkFailed(f"{contender.name} kept {kept:,} results of {tasks:,} tasks")
    return {"drain_kept": drain.tasks_per_s}


BENCHMARK = Benchmark(
    name="embedded",
    question="no-op tasks, two children, SQLite",
    contenders=(UMBEL, HUEY, HUEY_NOSYNC),
    stages={"without results": without_results, "with results": with_results},
    measures=MEASURES,
    targets=(Target("drain", "huey", at_least=3.0), Target("enqueue", "huey", at_least=1.0)),
    tasks=TASKS,
    notes=NOTES,
    at_commit=Contender.at_commit,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
