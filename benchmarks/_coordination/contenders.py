"""The contenders: how a cluster of each is grown, and how its messages are counted."""

import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks._coordination.listening import ELECTION, OTHER, STORE, Listening
from benchmarks._harness.benchmark import PEERS_PYTHON, clean_environment
from benchmarks._harness.processes import BenchmarkFailed, Running, answer_of, running
from tests.servers.redis import RedisServer
from umbel import App

START_S = 120.0
PING_S = 10.0
PAUSE_S = 1.0  # after an election: it is over before the next


@dataclass(frozen=True)
class Sizes:
    nodes: Sequence[int] = (2, 4, 8, 16)
    idle_s: float = 6.0
    acquainted_s: float = 6.0  # three heartbeats, so that all know all


@dataclass(frozen=True)
class Contender:
    name: str
    python: Path
    module: str
    several_in_one: bool  # nodes share a process

    @property
    def is_peer(self) -> bool:
        return self.python == PEERS_PYTHON

    def settings(self, home: Path) -> Mapping[str, str]:
        nodes = (
            "whole workers with the solo pool, several in a process"
            if self.several_in_one
            else ("celery worker -P solo, a process each")
        )
        return {"nodes": nodes}

    def measure(self, home: Path, elections: int, sizes: Sizes) -> Mapping[str, float]:
        """Grow a cluster and count what it says at each size, at rest and for elections."""
        measured: dict[str, float] = {}
        with _redis(home) as server, Listening(server) as listening, ExitStack() as cluster:
            here = Cluster(self, server, home, cluster, sizes.acquainted_s)
            for nodes in sizes.nodes:
                here.grow(nodes)
                measured |= here.at_rest(listening, sizes.idle_s)
                measured |= here.elect(listening, elections)
        return measured


class Cluster:
    def __init__(
        self, contender: Contender, server: RedisServer, home: Path, stack: ExitStack, acquainted_s: float
    ) -> None:
        self._contender = contender
        self._acquainted_s = acquainted_s
        self._server = server
        self._home = home
        self._stack = stack
        self._processes: dict[str, Running] = {}
        self._nodes = 0
        self._elections = 0
        self._monitor = App("monitor", broker=server.url)
        stack.callback(self._monitor.close)

    def grow(self, nodes: int) -> None:
        first, self._nodes = self._nodes, nodes
        for name in self._names(first, nodes):
            self._start(name)
        self._wait_until_acquainted()

    def at_rest(self, listening: Listening, idle_s: float) -> dict[str, float]:
        before, began = listening.counts(), time.monotonic()
        time.sleep(idle_s)
        told = listening.counts() - before
        took_s = time.monotonic() - began
        return {f"rest_{self._nodes}": (told[OTHER] + told[ELECTION]) / took_s}

    def elect(self, listening: Listening, count: int) -> dict[str, float]:
        """Elections one after the other, up to the first that a node dies of; that one replaced."""
        told: list[Counter[str]] = []
        decided_ms: list[float] = []
        dead: list[str] = []
        for _ in range(count):
            before = listening.counts()
            decided_ms += self._hold_election().values()
            told.append(listening.counts() - before)
            if dead := [
                name for name, process in self._processes.items() if process.process.poll() is not None
            ]:
                break
        measured = {f"election_{self._nodes}": float(median(one[ELECTION] for one in told))}
        if any(one[STORE] for one in told):
            measured[f"store_{self._nodes}"] = sum(one[STORE] for one in told) / len(told)
        if decided_ms:
            measured[f"decided_{self._nodes}"] = median(decided_ms)
        if dead:
            measured[f"died_{self._nodes}"] = float(len(dead))
            self._wait_until_acquainted()
        return measured

    def _hold_election(self) -> dict[str, float]:
        self._elections += 1
        answer: dict[str, float] = answer_of(
            f"{self._contender.name}-client",
            [
                self._contender.python,
                "-m",
                self._contender.module,
                "elect",
                str(self._elections),
                str(PAUSE_S),
            ],
            environment=self._environment(),
            directory=self._home,
            timeout_s=START_S,
        )
        return answer

    def _dead(self) -> list[str]:
        return [name for name, one in self._processes.items() if one.process.poll() is not None]

    def _replace_dead(self) -> None:
        """Celery's nodes may take their time to die of an election; of ours none may."""
        for name in self._dead():
            if not self._contender.is_peer:
                self._processes[name].check()
            self._start(name)

    def _names(self, first: int, end: int) -> list[str]:
        """Of the processes that hold these nodes."""
        if self._contender.several_in_one:
            return [f"{first}-{end - 1}"]
        return [f"{number}-{number}" for number in range(first, end)]

    def _start(self, name: str) -> None:
        one, (first, last) = self._contender, name.split("-")
        if one.several_in_one:
            count = str(int(last) - int(first) + 1)
            command: list[str | Path] = [one.python, "-m", one.module, "nodes", str(self._home), first, count]
        else:
            worker = ["worker", "-P", "solo", "-n", f"n{first}@bench", "-l", "WARNING"]
            command = [one.python.parent / "celery", "-A", one.module, *worker]
        process = running(f"nodes-{name}", command, environment=self._environment(), directory=self._home)
        self._processes[name] = self._stack.enter_context(process)

    def _wait_until_acquainted(self) -> None:
        ends = time.monotonic() + START_S
        ping = self._monitor.control.ping  # both kinds answer alike
        while len(ping(timeout=PING_S, limit=self._nodes) or ()) < self._nodes:
            self._replace_dead()
            if time.monotonic() > ends:
                raise BenchmarkFailed(f"{self._contender.name}: no {self._nodes} nodes in {START_S:g} s")
        time.sleep(self._acquainted_s)

    def _environment(self) -> dict[str, str]:
        return clean_environment(BENCH_BROKER=self._server.url)


@dataclass(frozen=True)
class Formula:
    """What Celery's rules come to: the command, an elect from each node, an ack from each to each."""

    name: str = "formula"
    is_peer: bool = False

    def settings(self, home: Path) -> Mapping[str, str]:
        return {"election": "1 + N + N² messages", "rest": "N / 2 heartbeats a second"}

    def measure(self, home: Path, elections: int, sizes: Sizes) -> Mapping[str, float]:
        told = {f"election_{nodes}": 1.0 + nodes + nodes**2 for nodes in sizes.nodes}
        return told | {f"rest_{nodes}": nodes / 2 for nodes in sizes.nodes}


@contextmanager
def _redis(home: Path) -> Iterator[RedisServer]:
    directory = home / "redis"
    directory.mkdir()
    server = RedisServer(directory)
    server.start()
    try:
        yield server
    finally:
        server.stop()


UMBEL = Contender("umbel", Path(sys.executable), "benchmarks._coordination.umbel_side", several_in_one=True)
CELERY = Contender("celery", PEERS_PYTHON, "benchmarks._coordination.celery_side", several_in_one=False)
FORMULA = Formula()
