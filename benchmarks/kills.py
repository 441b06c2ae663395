"""How many tasks that had ended does a kill repeat?

A worker with two children runs tasks that do nothing, or sleep for a millisecond, from a queue that never
empties. At a random moment SIGKILL ends every process of it at once (`worker`), or one child (`child`), and
another worker takes its place, or another child; in the end every task has run, and the ledger says which
ended twice. Results are ignored. A round is so many kills.

    scripts/setup servers
    .venv/bin/python benchmarks/kills.py [--json] [--rounds N] [--tasks KILLS] [--against COMMIT]
"""

import asyncio
import os
import random
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, median
from time import sleep

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._harness.benchmark import SOURCE, Benchmark, Stage, clean_environment
from benchmarks._harness.measures import Measure
from benchmarks._harness.processes import BenchmarkFailed, Running, running, wait_for
from benchmarks._kills.ledger import count_of, ended, repeats
from benchmarks._throughput.servers import RABBITMQ, REDIS, stop_servers
from umbel.brokers.interface import BrokerSettings
from umbel.brokers.registry import open_broker

KILLS = 10
CHILDREN = 2
WARM = 300  # tasks that end before a kill, so that the worker knows how short they are
MOMENT_S = (0.1, 0.4)  # after that
LOADS = {"no-op": (0.0, 50_000), "1 ms": (0.001, 2_500)}  # how long a task takes, and how many wait
BROKERS = ("SQLite", "Redis", "RabbitMQ")
MODULE = "benchmarks._kills.umbel_side"


@dataclass(frozen=True)
class Contender:
    name: str
    source: Path = SOURCE
    is_peer: bool = False

    def at_commit(self, name: str, source: Path) -> "Contender":
        return replace(self, name=name, source=source)

    def settings(self, home: Path) -> Mapping[str, str]:
        return {"worker": f"umbel worker -c {CHILDREN}"}


@dataclass
class Run:
    """One contender on an empty broker: what was sent, and in which files is what ended where."""

    contender: Contender
    home: Path
    url: str
    takes_s: float
    waiting: int
    sent: int = 0
    lives: list[Path] = field(default_factory=list)
    killed: list[list[Path]] = field(
        default_factory=list
    )  # by kill: the files of the processes that it ended

    def fill(self, waiting: int = 0) -> None:
        """Send until so many wait; what is repeated is left out of the count."""
        missing = (waiting or self.waiting) - (self.sent - self.ended())
        if missing <= 0:
            return
        client = [sys.executable, "-m", MODULE, str(self.sent + 1), str(missing), str(self.takes_s)]
        with running("client", client, environment=self._environment(), directory=self.home) as process:
            if process.process.wait(120):
                raise process.failed("could not send")
        self.sent += missing

    def ended(self) -> int:
        return sum(map(count_of, self.lives))

    @contextmanager
    def worker(self) -> Iterator[Running]:
        life = self.home / f"life-{len(self.lives)}"
        life.mkdir()
        self.lives.append(life)
        command = [sys.executable, "-m", "umbel", "worker", "-A", MODULE, "-l", "warning"]
        command += ["-c", str(CHILDREN), "-n", f"w{len(self.lives)}@kills"]
        environment = self._environment(KILLS_LEDGER=life)
        with running(
            f"worker-{len(self.lives)}", command, environment=environment, directory=self.home
        ) as it:
            yield it

    def wait_for_a_moment(self, worker: Running) -> None:
        """Until it knows how short the tasks are, and then for as long as chance will have it."""
        wanted = count_of(self.lives[-1]) + WARM
        wait_for(lambda: count_of(self.lives[-1]) >= wanted, f"run {WARM} tasks", worker)
        sleep(random.uniform(*MOMENT_S))

    def repeats(self) -> list[int]:
        """Have all tasks run; for each kill, how many had ended and ran again."""
        with self.worker() as worker:
            wait_for(lambda: self.ended() >= self.sent, "run all tasks", worker)
            wait_for(lambda: not asyncio.run(_unfinished(self.url)), "empty the queue", worker)
        of_killed = {file for kill in self.killed for file in kill}
        rest = [file for life in self.lives for file in life.iterdir() if file not in of_killed]
        numbers = [_numbers(files) for files in (*self.killed, rest)]
        if lost := set(range(1, self.sent + 1)).difference(*numbers):
            raise BenchmarkFailed(f"{self.contender.name}: {len(lost)} of {self.sent:,} tasks never ended")
        return repeats(numbers[:-1], numbers[-1])

    def _environment(self, **more: str | Path) -> dict[str, str]:
        places: dict[str, str | Path] = {"KILLS_URL": self.url, "UMBEL_RUN_DIR": self.home / "run"}
        return clean_environment(source=self.contender.source, **places, **more)


def kill_workers(run: Run, kills: int) -> None:
    """Every process of the worker dies at once, and another worker takes its place."""
    for _ in range(kills):
        run.fill()
        with run.worker() as worker:
            run.wait_for_a_moment(worker)
            main = psutil.Process(worker.process.pid)
            pids = [main.pid, *(child.pid for child in main.children(recursive=True))]
            for pid in pids:
                with suppress(ProcessLookupError):  # a child dies with its parent
                    os.kill(pid, signal.SIGKILL)
            worker.process.wait()
        run.killed.append(list(run.lives[-1].iterdir()))


def kill_children(run: Run, kills: int) -> None:
    """One child dies; the worker starts another, and is stopped in good order."""
    for _ in range(kills):
        run.fill()
        with run.worker() as worker:
            run.wait_for_a_moment(worker)
            killed = random.choice(sorted(run.lives[-1].iterdir()))
            os.kill(int(killed.name), signal.SIGKILL)
            run.killed.append([killed])


KINDS = {"worker": kill_workers, "child": kill_children}


def on(broker: str) -> Stage[Contender]:
    def stage(contender: Contender, home: Path, kills: int) -> Mapping[str, float]:
        measured: dict[str, float] = {}
        for kind, kill in KINDS.items():
            for load, (takes_s, waiting) in LOADS.items():
                place = home / f"{kind}-{waiting}"
                place.mkdir()
                run = Run(contender, place, _empty_url(broker, place), takes_s, waiting)
                run.fill()
                kill(run, kills)
                counts = run.repeats()
                measured[f"{broker}_{kind}_{load}_median"] = median(counts)
                measured[f"{broker}_{kind}_{load}_mean"] = mean(counts)
                measured[f"{broker}_{kind}_{load}_worst"] = max(counts)
        return measured

    return stage


def _numbers(files: Sequence[Path]) -> list[int]:
    return [number for file in files for number in ended(file)]


def _empty_url(broker: str, home: Path) -> str:
    if broker == "SQLite":
        return f"sqlite:///{home}/umbel.db"
    return {"Redis": REDIS, "RabbitMQ": RABBITMQ}[broker].empty_url()


async def _unfinished(url: str) -> int:
    """How many messages wait or are claimed: those of a killed worker come back when its lease has ended."""
    broker = open_broker(BrokerSettings(url))
    await broker.open()
    try:
        return sum(depth.ready + depth.claimed for depth in (await broker.queues()).values())
    finally:
        await broker.close()


BENCHMARK = Benchmark(
    name="kills",
    question="how many tasks that had ended run again after SIGKILL, by kill",
    contenders=(Contender("umbel"),),
    stages={broker: on(broker) for broker in BROKERS},
    measures=[
        Measure(f"{broker}_{kind}_{load}_{what}", f"{broker}: {kind} killed, {load}, {what}", "tasks", False)
        for broker in BROKERS
        for kind in KINDS
        for load in LOADS
        for what in ("median", "mean", "worst")
    ],
    targets=(),
    tasks=KILLS,
    notes=(f"a worker with {CHILDREN} children; the number of tasks above is that of kills in a round.",),
    at_commit=Contender.at_commit,
)

if __name__ == "__main__":
    try:
        status = BENCHMARK.main()
    finally:
        stop_servers()
    sys.exit(status)
