"""How quick is Umbel on Redis and on RabbitMQ, beside the other task queues for Python?

No-op tasks, two children, no results, task events off. Every round gives each contender an empty
broker: one client process sends tasks one at a time and then in bulk, a worker is started on the
full queue and drains it, and then runs single tasks while it is idle. Contenders get different
numbers of tasks, so that each takes a second or two.

    scripts/setup bench; scripts/setup servers
    .venv/bin/python benchmarks/throughput.py [--json] [--rounds N] [--tasks N] [--only umbel]
    .venv/bin/python benchmarks/throughput.py --against COMMIT   # what a task costs now, and did; no peers
"""

import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._harness.benchmark import Benchmark, Stage
from benchmarks._harness.measures import Measure, Target
from benchmarks._harness.processes import BenchmarkFailed
from benchmarks._throughput.contenders import (
    CELERY,
    CELERY_EVENTS,
    DRAMATIQ,
    DRAMATIQ_CONFIRMED,
    HUEY,
    RQ,
    SAQ,
    TASKIQ,
    UMBEL,
    UMBEL_EVENTS,
    UMBEL_SIGNED,
    Contender,
)
from benchmarks._throughput.servers import RABBITMQ, REDIS, SERVERS, Server, stop_servers

TASKS = 60_000
TASKS_MIN = 20
ONE_AT_A_TIME = 0.25  # of the tasks; the others are sent in bulk
AT_ONCE = 0.125  # from threads, where the contender does that; as many awaited
PROBES_MAX = 30
PEERS = tuple(peer.name for peer in (CELERY, DRAMATIQ, TASKIQ, HUEY, RQ, SAQ))


def measures_of(server: Server) -> tuple[Measure, ...]:
    name, on = server.name, f"{server.title}: "
    return (
        Measure(f"{name}_drain", f"{on}drain", "tasks/s"),
        Measure(f"{name}_enqueue", f"{on}enqueue, one at a time", "tasks/s"),
        Measure(f"{name}_bulk", f"{on}enqueue, in bulk", "tasks/s"),
        Measure(f"{name}_threads", f"{on}enqueue, from 8 threads", "tasks/s"),
        Measure(f"{name}_awaited", f"{on}enqueue, awaited by 8", "tasks/s"),
        Measure(f"{name}_latency", f"{on}idle: sent until it runs, p50", "ms", higher_is_better=False),
        Measure(
            f"{name}_latency_client", f"{on}idle: until the call returns, p50", "ms", higher_is_better=False
        ),
        Measure(
            f"{name}_latency_worker", f"{on}idle: from then until it runs, p50", "ms", higher_is_better=False
        ),
        Measure(f"{name}_startup", f"{on}start-up until the first task", "ms", higher_is_better=False),
        Measure(f"{name}_memory", f"{on}worker and children, PSS", "MiB", higher_is_better=False),
        Measure(f"{name}_drain_cpu", f"{on}drain: CPU of worker and children", "µs/task", False),
        Measure(f"{name}_server_cpu", f"{on}drain: CPU of the server", "µs/task", False),
        Measure(f"{name}_enqueue_cpu", f"{on}enqueue, one at a time: CPU of the client", "µs/task", False),
        Measure(f"{name}_bulk_cpu", f"{on}enqueue, in bulk: CPU of the client", "µs/task", False),
    )


def on(server: Server) -> Stage[Contender]:
    def stage(contender: Contender, home: Path, tasks: int) -> Mapping[str, float]:
        if server.name not in contender.shares:
            return {}
        count = max(TASKS_MIN, round(tasks * contender.shares[server.name]))
        measured = measure(contender, home, server, count)
        return {f"{server.name}_{name}": value for name, value in measured.items()}

    return stage


def measure(contender: Contender, home: Path, server: Server, count: int) -> Mapping[str, float]:
    url = server.empty_url()
    each, at_once = round(count * ONE_AT_A_TIME), round(count * AT_ONCE) * contender.sends_at_once
    fill = contender.fill(home, url, count, each=each, at_once=at_once)
    latency: Mapping[str, float] = {}
    with contender.draining(home, url, server, count) as (worker, drain):
        memory_bytes = worker.pss_bytes()
        if not contender.drains_only:
            latency = contender.probe(home, url, min(PROBES_MAX, count))
    if left := contender.waiting(server, url):
        raise BenchmarkFailed(f"{contender.name} left {left:,} messages that it had run")
    drained = {
        "drain": drain.tasks_per_s,
        "drain_cpu": drain.cpu_us,
        "server_cpu": drain.server_cpu_us,
        "memory": memory_bytes / 2**20,
        "startup": drain.first_task_ms,
    }
    if contender.drains_only:
        return drained
    at_the_same_time = {"threads": fill.threads_per_s, "awaited": fill.awaited_per_s}
    return {
        **drained,
        **latency,
        **{name: value for name, value in at_the_same_time.items() if value is not None},
        "enqueue": fill.each_per_s,
        "enqueue_cpu": fill.each_cpu_us,
        "bulk": fill.bulk_per_s,
        "bulk_cpu": fill.bulk_cpu_us,
    }


TARGETS = (
    Target("redis_drain", "best_peer", 3.0, among=PEERS),
    Target("redis_drain", CELERY.name, 25.0),
    Target("redis_bulk", "best_peer", 5.0, among=PEERS),
    Target("redis_enqueue", "best_peer", 1.0, among=PEERS),
    Target("redis_latency", "best_peer", 1.0, among=PEERS),
    Target("redis_memory", CELERY.name, 1 / 0.7),
    Target("rabbitmq_drain", DRAMATIQ.name, 3.0),
    Target("rabbitmq_drain", CELERY.name, 4.0),
    Target("rabbitmq_enqueue", DRAMATIQ_CONFIRMED.name, 10.0),
    Target("rabbitmq_threads", DRAMATIQ.name, 0.5),
    Target("rabbitmq_bulk", DRAMATIQ.name, 2.0),
    Target("rabbitmq_latency", "best_peer", 1.0, among=(CELERY.name, DRAMATIQ.name)),
    Target("rabbitmq_memory", CELERY.name, 1 / 0.7),
)

NOTES = (
    "of these tasks umbel drains all from Redis, the others such a share that each takes as long.",
    "Redis keeps nothing on disk; on RabbitMQ queues are durable and messages persistent, for all.",
    "Umbel acknowledges after a task has run and waits for RabbitMQ's confirms, its defaults.",
    "Peers run as their documentation says for short tasks: large prefetch (celery, dramatiq), coroutines",
    "and uvloop (taskiq), workers that do not fork (rq), no results; hiredis is there for all.",
    "_events: the same worker with -E, which sends an event at every step of a task.",
    "dramatiq_confirmed: the same with confirm_delivery, so that RabbitMQ answers for what is sent.",
    "umbel_signed: the same with 'signing_keys', so every message is signed, verified and used once.",
)

BENCHMARK = Benchmark(
    name="throughput",
    question="no-op tasks, two children, Redis and RabbitMQ",
    contenders=(
        UMBEL,
        UMBEL_EVENTS,
        UMBEL_SIGNED,
        CELERY,
        CELERY_EVENTS,
        DRAMATIQ,
        DRAMATIQ_CONFIRMED,
        TASKIQ,
        HUEY,
        RQ,
        SAQ,
    ),
    stages={server.title: on(server) for server in (REDIS, RABBITMQ)},
    measures=[one for server in SERVERS for one in measures_of(server)],
    targets=TARGETS,
    tasks=TASKS,
    notes=NOTES,
    at_commit=Contender.at_commit,
)

if __name__ == "__main__":
    try:
        status = BENCHMARK.main()
    finally:
        stop_servers()
    sys.exit(status)
