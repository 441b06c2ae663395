"""The pool alone, without a broker: no-op jobs through two children.

Umbel's prefork pool beside the standard library's two. The executor takes one call at a time;
multiprocessing's pool is given chunks of 64, as Umbel makes batches of at most 64, but its size is
fixed beforehand: a slow call holds the rest of its chunk.
"""

import asyncio
import multiprocessing
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from statistics import median
from typing import Any

from benchmarks._harness.benchmark import ROOT
from benchmarks._harness.measures import Measure
from umbel.pools.interface import (
    ChildContext,
    HostSpec,
    Job,
    LostJob,
    Outcome,
    PoolSettings,
    Runner,
    UserEvent,
)
from umbel.pools.prefork.parent import PreforkPool
from umbel.wire.message import Message, StoredResult

CHILDREN = 2
PROBES = 200
AHEAD = 1000  # calls that the executor has in hand

MEASURES = (
    Measure("alone_rate", "no broker: no-op jobs", "jobs/s"),
    Measure("alone_cpu", "no broker: CPU of the main process", "µs/job", higher_is_better=False),
    Measure("alone_latency", "no broker: one job, there and back, p50", "ms", higher_is_better=False),
    Measure("alone_startup", "no broker: start-up until children are ready", "ms", higher_is_better=False),
)


# ---- Umbel -------------------------------------------------------------------------------------------


class NoOpHost:
    def start_child(self, context: ChildContext) -> Runner:
        return run_nothing

    def stop_child(self) -> None:
        pass


def load(_target: str) -> NoOpHost:
    return NoOpHost()


def run_nothing(job: Job) -> Outcome:
    return Outcome(job.number, "success", time.time(), 1e-6, (StoredResult(job.task_id, "SUCCESS", b"null"),))


class Feeder:
    """Keeps the pool fed as a worker does: by its room, whenever outcomes arrive."""

    def __init__(self, pool: PreforkPool) -> None:
        self._pool = pool
        self._left = self._awaited = 0
        self._done = asyncio.Event()

    async def run(self, jobs: int) -> None:
        self._left = self._awaited = jobs
        self._done.clear()
        self._feed()
        await self._done.wait()

    def _feed(self) -> None:
        count = min(self._pool.room(), self._left)
        self._pool.submit([_job(self._left - n) for n in range(count)])
        self._left -= count

    def on_started(self, started: Sequence[tuple[int, float, int]]) -> None:
        pass

    def on_outcomes(self, outcomes: Sequence[Outcome], pid: int) -> None:
        self._awaited -= len(outcomes)
        if self._left:
            self._feed()
        elif not self._awaited:
            self._done.set()

    def on_told(self, told: UserEvent) -> None:
        pass

    def on_lost(self, lost: Sequence[LostJob]) -> None:
        raise AssertionError(lost)

    def on_child(self, what: str, fields: dict[str, Any]) -> None:
        pass


def _job(number: int) -> Job:
    return Job(
        number, "noop", "2a3c0f6e-7c4e-4a52-9d0b-5b8f0f1f7a11", "celery", Message(b"{}", b"[[], {}, {}]")
    )


def through_umbel(jobs: int) -> Mapping[str, float]:
    return asyncio.run(_through_umbel(jobs))


async def _through_umbel(jobs: int) -> Mapping[str, float]:
    host = HostSpec("benchmarks._pools.alone:load", "", search_path=(str(ROOT),))
    pool = PreforkPool(PoolSettings(host, "bench@here", CHILDREN))
    feeder = Feeder(pool)
    began = time.perf_counter()
    await pool.start(feeder)
    startup_s = time.perf_counter() - began
    probes_s = []
    for _ in range(PROBES):
        began = time.perf_counter()
        await feeder.run(1)
        probes_s.append(time.perf_counter() - began)
    began, cpu = time.perf_counter(), time.process_time()
    await feeder.run(jobs)
    took_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    await pool.stop(grace_s=1.0)
    return _values(jobs, startup_s, probes_s, took_s, cpu_s)


# ---- the standard library ----------------------------------------------------------------------------


def nothing() -> None:
    pass


def nothing_of(_number: int) -> None:
    pass


def through_executor(jobs: int) -> Mapping[str, float]:
    began = time.perf_counter()
    with ProcessPoolExecutor(CHILDREN) as pool:
        for ready in [pool.submit(nothing) for _ in range(CHILDREN)]:
            ready.result()
        startup_s = time.perf_counter() - began
        probes_s = []
        for _ in range(PROBES):
            began = time.perf_counter()
            pool.submit(nothing).result()
            probes_s.append(time.perf_counter() - began)
        began, cpu = time.perf_counter(), time.process_time()
        for first in range(0, jobs, AHEAD):
            for done in as_completed([pool.submit(nothing) for _ in range(min(AHEAD, jobs - first))]):
                done.result()
        took_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    return _values(jobs, startup_s, probes_s, took_s, cpu_s)


def through_chunks(jobs: int) -> Mapping[str, float]:
    began = time.perf_counter()
    with multiprocessing.get_context("fork").Pool(CHILDREN) as pool:
        pool.apply(nothing)
        startup_s = time.perf_counter() - began
        probes_s = []
        for _ in range(PROBES):
            began = time.perf_counter()
            pool.apply(nothing)
            probes_s.append(time.perf_counter() - began)
        began, cpu = time.perf_counter(), time.process_time()
        for _ in pool.imap_unordered(nothing_of, range(jobs), chunksize=64):
            pass
        took_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    return _values(jobs, startup_s, probes_s, took_s, cpu_s)


def _values(
    jobs: int, startup_s: float, probes_s: list[float], took_s: float, cpu_s: float
) -> Mapping[str, float]:
    return {
        "alone_rate": jobs / took_s,
        "alone_cpu": cpu_s / jobs * 1e6,
        "alone_latency": median(probes_s) * 1e3,
        "alone_startup": startup_s * 1e3,
    }
