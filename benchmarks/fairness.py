"""Does a task wait behind a long one while another worker has nothing to do?

Warm workers with one child each; 100 short tasks, one of 30 s and 200 short ones are sent at once. Of the
300 short ones: how many started more than a second later than an idle worker could have run them? Other
shapes: sent one by one, tasks of 20 ms, eight workers, a chord's parts, priorities. Umbel on SQLite, Redis
and RabbitMQ; in the same rounds Celery's worker with its defaults, and a Celery project under `umbel worker`.
Pub/Sub runs where PUBSUB_EMULATOR_HOST names an emulator.

    scripts/setup interop; scripts/setup servers
    .venv/bin/python benchmarks/fairness.py [--json] [--rounds N] [--only Redis:short] [--against COMMIT]
"""

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._fairness.ledger import late, read_runs
from benchmarks._fairness.shapes import BEFORE, BEHIND, LONG_S, SHAPES, Shape
from benchmarks._harness.benchmark import SOURCE, Benchmark, Stage, clean_environment
from benchmarks._harness.measures import Measure
from benchmarks._harness.processes import BenchmarkFailed, Running, running, wait_for
from benchmarks._throughput.servers import RABBITMQ, REDIS, stop_servers

OUR_PYTHON = Path(sys.executable)
CELERYS_PYTHON = Path(__file__).resolve().parent.parent / ".venv-celery/bin/python"
PUBSUB = "PUBSUB_EMULATOR_HOST"
BROKERS = ("SQLite", "Redis", "RabbitMQ", *(("Pub/Sub",) if PUBSUB in os.environ else ()))
WARM = 20  # tasks that each worker runs before the load comes, so that it knows how long they take


@dataclass(frozen=True)
class Contender:
    name: str
    module: str  # of its app and client
    worker: Sequence[str]
    python: Path
    brokers: Sequence[str]
    client_python: Path
    source: Path = SOURCE
    is_peer: bool = False
    stores_chords: Sequence[str] = ()  # brokers on which it has chords

    def at_commit(self, name: str, source: Path) -> "Contender":
        return replace(self, name=name, source=source)

    def settings(self, home: Path) -> Mapping[str, str]:
        return {"worker": " ".join([*self.worker, "-c 1"])}

    def environment(self, home: Path, url: str) -> dict[str, str]:
        return clean_environment(
            source=self.source,
            FAIRNESS_URL=url,
            FAIRNESS_RESULTS="" if url.startswith(("sqlite", "redis")) else f"sqlite:///{home}/results.db",
            FAIRNESS_LEDGER=home / "ledger",
            FAIRNESS_LONG_S=str(LONG_S),
            **({PUBSUB: os.environ[PUBSUB]} if PUBSUB in os.environ else {}),
        )


UMBEL = Contender(
    name="umbel",
    module="benchmarks._fairness.umbel_side",
    worker=("-m", "umbel", "worker", "-A", "benchmarks._fairness.umbel_side", "-l", "warning"),
    python=OUR_PYTHON,
    client_python=OUR_PYTHON,
    brokers=BROKERS,
    stores_chords=BROKERS,
)
CELERY = Contender(
    name="celery",
    module="benchmarks._fairness.celery_side",
    worker=("-m", "celery", "-A", "benchmarks._fairness.celery_side", "worker", "-l", "warning"),
    python=CELERYS_PYTHON,
    client_python=CELERYS_PYTHON,
    brokers=("Redis", "RabbitMQ"),
    stores_chords=("Redis",),
)
CELERY_PROJECT = replace(
    CELERY,
    name="umbel_celery",
    worker=("-m", "umbel", "worker", "-A", "benchmarks._fairness.celery_side", "-l", "warning"),
)


def on(broker: str, name: str) -> Stage[Contender]:
    def stage(contender: Contender, home: Path, _tasks: int) -> Mapping[str, float]:
        shape = SHAPES[name]
        if broker not in contender.brokers or (shape.is_chord and broker not in contender.stores_chords):
            return {}
        return {f"{broker}_{name}": measure(contender, home, _empty_url(broker, home), name, shape)}

    return stage


def measure(contender: Contender, home: Path, url: str, name: str, shape: Shape) -> float:
    environment, ledger = contender.environment(home, url), home / "ledger"
    ledger.touch()
    with ExitStack() as stack:
        workers = [
            stack.enter_context(_worker(contender, environment, home, number))
            for number in range(shape.workers)
        ]
        children = warm_up(contender, environment, home, ledger, workers)
        ledger.write_bytes(b"")
        sent_s = time.monotonic()
        _send(contender, environment, home, name)
        expected = BEFORE + BEHIND + 1

        def has_ended() -> bool:
            ended = [line.split()[2] for line in ledger.read_text().splitlines() if line.startswith("ended")]
            return len([kind for kind in ended if kind != "body"]) >= expected

        wait_for(has_ended, f"run {expected} tasks", workers[0])
        runs = read_runs(ledger.read_text().splitlines())
    return late(runs, children=children, sent_s=sent_s)


def warm_up(
    contender: Contender, environment: dict[str, str], home: Path, ledger: Path, workers: Sequence[Running]
) -> set[str]:
    """Send until every child has run some: each worker then knows that tasks are short. The children."""

    def warm() -> set[str]:
        ran = [line.split()[1] for line in ledger.read_text().splitlines() if line.startswith("ended")]
        return {child for child in set(ran) if ran.count(child) >= WARM}

    deadline = time.monotonic() + 120
    while len(children := warm()) < len(workers):
        if time.monotonic() > deadline:
            raise BenchmarkFailed(f"{contender.name}: not every worker ran {WARM} tasks in time")
        before = ledger.read_text().count("ended")
        _send(contender, environment, home, "warm")
        count = SHAPES["warm"].count
        wait_for(
            lambda before=before, count=count: ledger.read_text().count("ended") >= before + count,  # type: ignore[misc]
            "run the tasks that warm it up",
            workers[0],
        )
    return children


@contextmanager
def _worker(contender: Contender, environment: dict[str, str], home: Path, number: int) -> Iterator[Running]:
    command: list[str | Path] = [contender.python, *contender.worker, "-c", "1", "-n", f"w{number}@fairness"]
    name = f"{contender.name}-{number}"
    with running(name, command, environment=environment, directory=home) as worker:
        yield worker


def _send(contender: Contender, environment: dict[str, str], home: Path, shape: str) -> None:
    command: list[str | Path] = [contender.client_python, "-m", contender.module, shape]
    with running("client", command, environment=environment, directory=home) as client:
        if client.process.wait(120):
            raise client.failed("could not send")


def _empty_url(broker: str, home: Path) -> str:
    if broker == "SQLite":
        return f"sqlite:///{home}/umbel.db"
    if broker == "Pub/Sub":
        return f"gcpubsub://projects/fairness-{time.monotonic_ns()}"
    return {"Redis": REDIS, "RabbitMQ": RABBITMQ}[broker].empty_url()


MEASURED = [name for name in SHAPES if name != "warm"]
BENCHMARK = Benchmark(
    name="fairness",
    question=f"of {BEFORE + BEHIND} short tasks, how many waited for over a second while a worker was idle",
    contenders=(UMBEL, CELERY_PROJECT, CELERY),
    stages={f"{broker}:{name}": on(broker, name) for broker in BROKERS for name in MEASURED},
    measures=[
        Measure(f"{broker}_{name}", f"{broker}: {SHAPES[name].title}", "late", higher_is_better=False)
        for broker in BROKERS
        for name in MEASURED
    ],
    targets=(),
    tasks=BEFORE + BEHIND,
    notes=(
        f"workers have one child and are warm; {BEFORE} short tasks, one of {LONG_S:g} s, {BEHIND} short.",
        "umbel_celery is the same Celery app as celery's, under `umbel worker`.",
    ),
    at_commit=Contender.at_commit,
)

if __name__ == "__main__":
    try:
        status = BENCHMARK.main()
    finally:
        stop_servers()
    sys.exit(status)
