"""What does a Celery project gain by `umbel worker -A proj` alone, with no line of it changed?

The same unmodified Celery app (benchmarks/_throughput/celery_side.py), the same client, the same Python:
under `celery worker` and under `umbel worker`, and beside them the native app, which shows what Celery's
own tracer costs. No-op tasks, two children, as in throughput.py.

    scripts/setup interop; scripts/setup servers
    .venv/bin/python benchmarks/celery_apps.py [--json] [--rounds N] [--tasks N]
"""

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._harness.benchmark import Benchmark
from benchmarks._harness.measures import Target
from benchmarks._throughput.contenders import CELERY, UMBEL
from benchmarks._throughput.places import CHILDREN
from benchmarks._throughput.servers import RABBITMQ, REDIS, SERVERS, stop_servers
from benchmarks.throughput import measures_of, on

TASKS = 20_000
CELERYS_PYTHON = Path(__file__).resolve().parent.parent / ".venv-celery/bin/python"

AS_IT_IS = replace(
    CELERY,
    name="umbel_celery",
    python=CELERYS_PYTHON,
    worker=f"python -m umbel worker -A {CELERY.module} -c {CHILDREN} -l warning",
    shares={REDIS.name: 0.5, RABBITMQ.name: 0.5},
    counted_by=UMBEL.counted_by,
)
UNDER_CELERY = replace(CELERY, python=CELERYS_PYTHON, shares={REDIS.name: 0.075, RABBITMQ.name: 0.1})
NATIVE = replace(UMBEL, name="umbel_native", shares={REDIS.name: 1.0, RABBITMQ.name: 0.5})

TARGETS = (
    Target("redis_drain", UNDER_CELERY.name, 8.0),
    Target("redis_latency", UNDER_CELERY.name, 2.0),
    Target("redis_memory", UNDER_CELERY.name, 1.0),
    Target("rabbitmq_drain", UNDER_CELERY.name, 4.0),
    Target("rabbitmq_latency", UNDER_CELERY.name, 2.0),
    Target("rabbitmq_memory", UNDER_CELERY.name, 1.0),
)

NOTES = (
    "umbel_celery and celery run the same app, with a large prefetch, no results and no rate limits,",
    "as Celery's guide says for short tasks; umbel_native is the same tasks in an umbel.App.",
    "Under Umbel the acknowledgement follows the app: early, as Celery's default has it.",
)

BENCHMARK = Benchmark(
    name="celery_apps",
    question="the same Celery app under celery worker and under umbel worker",
    contenders=(AS_IT_IS, UNDER_CELERY, NATIVE),
    stages={server.title: on(server) for server in (REDIS, RABBITMQ)},
    measures=[one for server in SERVERS for one in measures_of(server)],
    targets=TARGETS,
    tasks=TASKS,
    notes=NOTES,
)

if __name__ == "__main__":
    try:
        status = BENCHMARK.main()
    finally:
        stop_servers()
    sys.exit(status)
