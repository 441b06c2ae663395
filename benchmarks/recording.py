"""What does recording cost a worker, on Redis and on the embedded broker?

No-op tasks, two children, no results, as in `throughput.py`. The same worker drains the same tasks with
`-E` and nobody who records; with `-E` while its events are logged for a recorder that runs elsewhere; with
a recorder on the same machine; and with one that the worker starts (`--record`).

    scripts/setup servers
    .venv/bin/python benchmarks/recording.py [--json] [--rounds N] [--tasks N] [--only logged]
    .venv/bin/python benchmarks/recording.py --against COMMIT

How many events a second the recorder takes beside what a worker makes: `pipeline.py --steps recorder`.
"""

import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._harness.benchmark import Benchmark, Stage
from benchmarks._harness.measures import Measure, Target
from benchmarks._recording.contenders import BESIDE, EVENTS, ITSELF, LOGGED, Recorded
from benchmarks._recording.servers import EMBEDDED
from benchmarks._throughput.servers import REDIS, Server, stop_servers

TASKS = 60_000
SERVERS: tuple[Server, ...] = (REDIS, EMBEDDED)
KEPT = 0.75  # of the drain with -E and no recorder


def measures_of(server: Server) -> tuple[Measure, ...]:
    name, on = server.name, f"{server.title}: "
    return (
        Measure(f"{name}_drain", f"{on}drain", "tasks/s"),
        Measure(f"{name}_drain_cpu", f"{on}drain: CPU of worker and children", "µs/task", False),
        Measure(f"{name}_server_cpu", f"{on}drain: CPU of the server", "µs/task", False),
        Measure(f"{name}_recorder_cpu", f"{on}drain: CPU of the recorder meanwhile", "µs/task", False),
        Measure(f"{name}_unlogged", f"{on}events that are not in the log", "of all", False),
    )


def on(server: Server) -> Stage[Recorded]:
    def stage(contender: Recorded, home: Path, tasks: int) -> Mapping[str, float]:
        measured = contender.measure(home, server, tasks)
        return {f"{server.name}_{name}": value for name, value in measured.items()}

    return stage


BENCHMARK = Benchmark(
    name="recording",
    question="no-op tasks while their events are recorded",
    contenders=(LOGGED, EVENTS, BESIDE, ITSELF),
    stages={server.title: on(server) for server in SERVERS},
    measures=[one for server in SERVERS for one in measures_of(server)],
    targets=tuple(Target(f"{server.name}_drain", EVENTS.name, KEPT) for server in SERVERS),
    tasks=TASKS,
    notes=(
        "events: -E, nobody records. logged: -E, a recorder is registered that runs on another machine.",
        "beside: -E, a recorder runs on this machine. itself: the worker starts the recorder (--record).",
        "Of the embedded broker nothing runs but the worker, so it has no CPU of a server.",
    ),
    at_commit=Recorded.at_commit,
)

if __name__ == "__main__":
    try:
        status = BENCHMARK.main()
    finally:
        stop_servers()
    sys.exit(status)
