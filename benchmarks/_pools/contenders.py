"""The contenders: a worker for each pool that one has, on Redis, measured from outside."""

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks._harness import probing
from benchmarks._harness.processes import BenchmarkFailed, Running, answer_of
from benchmarks._pools import alone
from benchmarks._pools.places import AT_ONCE
from benchmarks._throughput import contenders as throughput
from benchmarks._throughput.places import CHILDREN, TALLY
from benchmarks._throughput.servers import REDIS

LOAD = 0.5  # of what the children can do, if a task takes as long as it waits
CLIENT_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class PoolContender(throughput.Contender):
    pools: Mapping[str, str] = field(default_factory=dict)  # the worker's command line, by pool

    def on(self, pool: str) -> "PoolContender":
        return replace(self, worker=self.pools[pool])

    def settings(self, home: Path) -> Mapping[str, str]:
        described = self._ask(home, throughput.NOWHERE, "describe")
        return {"version": described["version"], **self.pools}

    def tell(self, home: Path, url: str, *arguments: str) -> dict[str, Any]:
        answer: dict[str, Any] = answer_of(
            f"{self.name}-client",
            [self.python, "-m", "benchmarks._pools.client", self.module, *arguments],
            environment=self._environment(home, url),
            directory=home,
            timeout_s=CLIENT_TIMEOUT_S,
        )
        return answer


@dataclass(frozen=True)
class Alone:
    """A pool of the standard library."""

    name: str
    pool: str
    is_peer: bool = False  # it needs no environment of its own

    def settings(self, home: Path) -> Mapping[str, str]:
        return {"pool": self.pool, "children": str(alone.CHILDREN)}


def measure(contender: PoolContender, home: Path, tasks: int, *, load_tasks: int) -> dict[str, float]:
    """Drain a full queue of no-ops, then take a steady load, then lose every child at once."""
    url = REDIS.empty_url()
    each = max(1, tasks // 10)
    contender.fill(home, url, tasks, each=each)
    with contender.draining(home, url, REDIS, tasks) as (worker, drain):
        main_bytes, child_bytes = _memory(worker)
        per_second = round(LOAD * CHILDREN / 0.010)
        ways = contender.tell(home, url, "load", str(load_tasks), str(per_second))
        found = {
            "drain": drain.tasks_per_s,
            "cpu": drain.cpu_us,
            "startup": drain.first_task_ms,
            "main_memory": main_bytes / 2**20,
            "p50": ways["p50_ms"],
            "p99": ways["p99_ms"],
        }
        if child_bytes:
            found["child_memory"] = child_bytes / 2**20
            found["replace"] = _replaced_ms(contender, home, url, worker)
    return found


def naps(contender: PoolContender, home: Path, tasks: int) -> dict[str, float]:
    url = REDIS.empty_url()
    contender.tell(home, url, "naps", str(tasks))
    with contender.draining(home, url, REDIS, tasks) as (worker, drain):
        memory_bytes = worker.pss_bytes()
    return {"naps": drain.tasks_per_s, "cpu": drain.cpu_us, "memory": memory_bytes / 2**20}


def _memory(worker: Running) -> tuple[int, int]:
    """The main process, and the median of those that ran tasks if they are others."""
    main = psutil.Process(worker.process.pid)
    children = [one for one in main.children(recursive=True) if not one.children()]
    sizes = sorted(int(one.memory_full_info().pss) for one in children)
    return int(main.memory_full_info().pss), sizes[len(sizes) // 2] if sizes else 0


def _replaced_ms(contender: PoolContender, home: Path, url: str, worker: Running) -> float:
    """From the death of all children until a task runs in one of those that follow."""
    ran_in = [int(file.name) for file in (home / TALLY).iterdir()]
    family = {one.pid for one in psutil.Process(worker.process.pid).children(recursive=True)}
    victims = [pid for pid in ran_in if pid in family]
    if not victims:
        raise BenchmarkFailed(f"{contender.name} has no children that ran a task")
    probing.prepare(home)
    began = time.monotonic()
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    contender._ask(home, url, "probe", "1")
    return (time.monotonic() - began) * 1e3


_SIDES = "benchmarks._pools"
_UMBEL = f"umbel worker -A {_SIDES}.umbel_side:app -l warning"
_CELERY = f"celery -A {_SIDES}.celery_side worker -c {CHILDREN} -l warning --without-gossip --without-mingle"

UMBEL = PoolContender(
    **{
        **{name: getattr(throughput.UMBEL, name) for name in ("name", "python", "counted_by", "shares")},
        "module": f"{_SIDES}.umbel_side",
        "worker": "",
    },
    pools={
        "prefork": f"{_UMBEL} -c {CHILDREN}",
        "threads": f"{_UMBEL} -P threads -c {CHILDREN}",
        "asyncio": f"{_UMBEL} -P asyncio -c {AT_ONCE}",
    },
)
CELERY = PoolContender(
    name="celery",
    module=f"{_SIDES}.celery_side",
    worker="",
    shares={},
    counted_by=throughput.CELERY.counted_by,
    pools={"prefork": _CELERY, "threads": f"{_CELERY} -P threads"},
)
TASKIQ = PoolContender(
    name="taskiq",
    module=f"{_SIDES}.taskiq_side",
    worker="",
    shares={},
    counted_by=throughput.TASKIQ.counted_by,
    pools={
        "asyncio": f"taskiq worker {_SIDES}.taskiq_side:broker -w 1 --max-async-tasks {AT_ONCE} "
        "--log-level WARNING"
    },
)
SAQ = PoolContender(
    name="saq",
    module=f"{_SIDES}.saq_side",
    worker="",
    shares={},
    counted_by=throughput.SAQ.counted_by,
    stop_family=True,
    pools={"asyncio": f"saq {_SIDES}.saq_side.settings --workers 1"},
)
EXECUTOR = Alone("executor", "concurrent.futures.ProcessPoolExecutor")
CHUNKS = Alone("chunks", "multiprocessing.Pool.imap_unordered, chunks of 64")
