"""What does a task cost with a larger payload or workflow, more queues, workers, or messages that wait?

On Redis, two children unless a section says otherwise, no results but in workflows. Each section gives every
contender an empty server for each size. Look at the CPU per task: it says what grows, also on a busy machine.

    scripts/setup bench; scripts/setup servers
    .venv/bin/python benchmarks/growth.py [--json] [--rounds N] [--tasks N] [--only payload] [--only umbel]
    .venv/bin/python benchmarks/growth.py --against COMMIT --only payload   # now, and then; no peers
    .venv/bin/python benchmarks/growth.py --decades [--broker sqlite] [--kind chord] [--most 10000]

Fewer `--tasks` leave large sizes out: 20 times as many may wait, a chain has at most a tenth as many steps.

`--decades` is a benchmark apart, of Umbel alone, on SQLite, Redis and RabbitMQ: what 100 to 100,000 parts of
chords and groups, unique and limited tasks, revokes and retained failures cost, and with which exponent.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._growth import decades
from benchmarks._growth.sections import SECTIONS, measures
from benchmarks._harness.benchmark import Benchmark
from benchmarks._harness.measures import Target
from benchmarks._throughput.contenders import CELERY, DRAMATIQ, HUEY, RQ, UMBEL, Contender
from benchmarks._throughput.servers import stop_servers

TASKS = 50_000
PEERS = tuple(peer.name for peer in (CELERY, DRAMATIQ, HUEY, RQ))
AT_LEAST_ONCE = (DRAMATIQ.name,)

TARGETS = (
    Target("payload_10000", "best_peer", 2.0, among=PEERS),
    Target("payload_1000000", "best_peer", 0.5, among=PEERS),
    Target("trickle_50_cpu", HUEY.name, 1 / 1.3),
    Target("trickle_400_cpu", HUEY.name, 1 / 1.3),
    Target("trickle_50_cpu", "at_least_once", 1.0, among=AT_LEAST_ONCE),
    Target("trickle_400_cpu", "at_least_once", 1.0, among=AT_LEAST_ONCE),
)

NOTES = (
    "payloads are text; of the tasks, each contender gets a share, so that each takes about as long.",
    "queues and workflows: those who have them in this form, Umbel and Celery.",
    "backlog: the first tasks of it are run, the rest is left. Of peers 100,000 wait at most.",
    "celery, huey and rq run a task at most once by default; umbel and dramatiq at least once.",
)

BENCHMARK = Benchmark(
    name="growth",
    question="what grows with payloads, queues, backlogs, workers and workflows, on Redis",
    contenders=(UMBEL, CELERY, DRAMATIQ, HUEY, RQ),
    stages=SECTIONS,
    measures=list(measures()),
    targets=TARGETS,
    tasks=TASKS,
    notes=NOTES,
    at_commit=Contender.at_commit,
)

if __name__ == "__main__":
    try:
        is_decades = "--decades" in sys.argv
        arguments = [one for one in sys.argv[1:] if one != "--decades"]
        status = decades.main(arguments) if is_decades else BENCHMARK.main()
    finally:
        stop_servers()
    sys.exit(status)
