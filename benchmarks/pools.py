"""What does a task cost in each pool, beside the pools of others?

Workers on Redis with two children or threads, Umbel's and Celery's: no-op tasks from a full queue, then
tasks of 10 ms at half of what two children can do, then all children are killed at once. Coroutines that
wait for 10 ms, a thousand at once in one process, beside Taskiq and SAQ. And the prefork pool alone,
without a broker, beside the standard library's two.

    scripts/setup bench; scripts/setup servers
    .venv/bin/python benchmarks/pools.py [--json] [--rounds N] [--tasks N] [--only umbel]
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._harness.benchmark import Benchmark, Stage
from benchmarks._harness.measures import Measure, Target
from benchmarks._pools import alone
from benchmarks._pools.contenders import (
    CELERY,
    CHUNKS,
    EXECUTOR,
    SAQ,
    TASKIQ,
    UMBEL,
    PoolContender,
    measure,
    naps,
)
from benchmarks._throughput.servers import stop_servers

TASKS = 20_000
TASKS_MIN = 20
PEERS_SHARE = 0.1  # of the tasks, so that each takes about as long
LOAD_TASKS_MAX = 500


def measures_of(pool: str) -> list[Measure]:
    on = f"{pool}: "
    return [
        Measure(f"{pool}_drain", f"{on}no-op tasks", "tasks/s"),
        Measure(f"{pool}_cpu", f"{on}CPU of worker and children", "µs/task", False),
        Measure(f"{pool}_p50", f"{on}at 50 % load: sent until it runs, p50", "ms", False),
        Measure(f"{pool}_p99", f"{on}at 50 % load: sent until it runs, p99", "ms", False),
        Measure(f"{pool}_main_memory", f"{on}main process, PSS", "MiB", False),
        Measure(f"{pool}_startup", f"{on}start-up until the first task", "ms", False),
    ]


MEASURES = (
    *measures_of("prefork"),
    Measure("prefork_child_memory", "prefork: a child, PSS", "MiB", False),
    Measure("prefork_replace", "prefork: all children killed until a task runs", "ms", False),
    *measures_of("threads"),
    Measure("asyncio_naps", "asyncio: naps of 10 ms, 1,000 at once", "tasks/s"),
    Measure("asyncio_cpu", "asyncio: CPU of the worker", "µs/task", False),
    Measure("asyncio_memory", "asyncio: worker, PSS", "MiB", False),
    *alone.MEASURES,
)


def on(pool: str) -> Stage[Any]:
    def stage(contender: Any, home: Path, tasks: int) -> Mapping[str, float]:
        if not isinstance(contender, PoolContender) or pool not in contender.pools:
            return {}
        count = max(TASKS_MIN, round(tasks * PEERS_SHARE)) if contender.is_peer else tasks
        if pool == "asyncio":
            found = naps(contender.on(pool), home, count)
        else:
            load_tasks = max(TASKS_MIN, min(LOAD_TASKS_MAX, tasks))
            found = measure(contender.on(pool), home, count, load_tasks=load_tasks)
        return {f"{pool}_{name}": value for name, value in found.items()}

    return stage


def without_a_broker(contender: Any, _home: Path, tasks: int) -> Mapping[str, float]:
    through = {
        UMBEL.name: alone.through_umbel,
        EXECUTOR.name: alone.through_executor,
        CHUNKS.name: alone.through_chunks,
    }
    return through[contender.name](tasks) if contender.name in through else {}


BENCHMARK: Benchmark[Any] = Benchmark(
    name="pools",
    question="what a task costs in each pool",
    contenders=(UMBEL, CELERY, TASKIQ, SAQ, EXECUTOR, CHUNKS),
    stages={**{pool: on(pool) for pool in ("prefork", "threads", "asyncio")}, "alone": without_a_broker},
    measures=MEASURES,
    targets=(
        *(
            Target(f"{pool}_{what}", CELERY.name, 1.0)
            for pool in ("prefork", "threads")
            for what in ("drain", "cpu", "p50", "p99", "main_memory", "startup")
        ),
        Target("prefork_child_memory", CELERY.name, 1.0),
        Target("prefork_replace", CELERY.name, 1.0),
        Target("asyncio_naps", TASKIQ.name, 1.0),
        Target("asyncio_naps", SAQ.name, 1.0),
    ),
    tasks=TASKS,
    notes=(
        "two children or threads; the peers drain a tenth of the tasks, so that each takes as long.",
        "half load is 100 tasks of 10 ms a second on two children; CPU counts the whole worker's.",
        "replace includes starting a client that sends one task, the same for both.",
        "without a broker: umbel's jobs are messages, decoded; chunks carries one number and None.",
    ),
)

if __name__ == "__main__":
    try:
        status = BENCHMARK.main()
    finally:
        stop_servers()
    sys.exit(status)
