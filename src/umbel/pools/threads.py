"""ThreadsPool: jobs in threads of the main process. For tasks that wait more than they compute.

The event loop stays free, but threads share one interpreter: a job that computes slows the others
and the loop, and a job that crashes takes the worker down. No thread can be ended from outside, so
hard limits and `terminate_job` are refused; a soft limit is an exception in the job's thread
(`thread_workers.py` says when it arrives).
"""

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, assert_never

from umbel.errors import NotSupported, TaskCancelled, WorkerStopping
from umbel.pools.abilities import ABILITIES
from umbel.pools.guarded_listener import GuardedListener
from umbel.pools.hosting import soft_limit_of
from umbel.pools.interface import Host, Job, LostJob, Outcome, PoolListener, PoolSettings, Told
from umbel.pools.losses import apart, broken, cut_off, not_started
from umbel.pools.own_host import start_host, stop_host
from umbel.pools.reports import Reports
from umbel.pools.sizes import resized, until_idle
from umbel.pools.thread_workers import Began, Broke, Ended, Left, Report, ThreadWorkers
from umbel.protocol.pool.slots import BRIEF_S

_AHEAD_S, _AHEAD_MAX = 0.05, 64
_AGAIN_S = 0.01  # until the next try to raise a soft limit


@dataclass(slots=True)
class _Running:
    job: Job
    limit: asyncio.TimerHandle | None = None


class ThreadsPool:
    name = "threads"
    is_green = False

    def __init__(self, settings: PoolSettings) -> None:
        self.abilities = ABILITIES[self.name]
        self._settings = settings
        self._size = settings.concurrency
        self._workers: ThreadWorkers | None = None
        self._host: Host | None = None
        self._outstanding: dict[int, Job] = {}  # submitted and not back
        self._running: dict[int, _Running] = {}
        self._threads = 0  # that have not ended, those that were asked to included
        self._typical_s: float | None = None
        self._closing = False

    # ---- the interface -----------------------------------------------------------------------------

    async def start(self, listener: PoolListener) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = GuardedListener(listener)
        self._left = asyncio.Event()
        reports: Reports[Report | Told] = Reports(self._loop, self._on_reports)
        self._host, runner = await start_host(self._settings, tell=reports.add)
        self._soft_limit = soft_limit_of(self._host)
        self._workers = ThreadWorkers(self.name, runner, reports.add, soft_limit=self._soft_limit)
        self._start_threads(self._size)
        self._listener.on_child("started", {"child": 0, "pid": os.getpid()})

    def submit(self, jobs: Sequence[Job]) -> None:
        jobs, unfit = apart(jobs, hard_limits=self._refuse_hard_limit)
        if unfit:
            self._listener.on_lost(unfit)
        self._outstanding |= {job.number: job for job in jobs}
        if self._closing or self._workers is None:
            self._lose([not_started(job) for job in jobs])
            return
        for job in jobs:
            self._workers.put(job)

    def room(self) -> int:
        if self._closing:
            return 0
        return max(0, self._size * self._ahead() - len(self._outstanding))

    def withdraw(self) -> Sequence[Job]:
        jobs = tuple(self._workers.withdraw()) if self._workers is not None else ()
        for job in jobs:
            del self._outstanding[job.number]
        return jobs

    def cancel_job(self, number: int) -> bool:
        self._raise_in(number, TaskCancelled)
        return number in self._running

    def terminate_job(self, number: int, signum: int) -> bool:
        return False

    def interrupt(self) -> int:
        for number in list(self._running):
            self._raise_in(number, WorkerStopping)
        return len(self._running)

    def resize(self, by: int) -> int:
        if self.abilities.resize:
            raise NotSupported(f"the {self.name} pool cannot be resized: {self.abilities.resize}")
        size = resized(self._size, by)
        assert self._workers is not None, "a pool is resized after start()"
        self._size = size
        if by > 0:
            self._start_threads(by)
        else:
            self._workers.stop_threads(-by)
        return size

    def describe(self) -> dict[str, Any]:
        return {
            "implementation": self.name,
            "max-concurrency": self._size,
            "faults": self._listener.faults if self._workers is not None else 0,
            "processes": [],
            "threads": self._threads,
            "running": {one.job.task_id: os.getpid() for one in self._running.values()},
            "waiting": len(self._outstanding) - len(self._running),
        }

    async def stop(self, *, grace_s: float) -> None:
        if self._workers is None or self._host is None or self._closing:
            return
        self._closing = True
        self._lose([not_started(job) for job in self._workers.withdraw()])
        self._workers.stop_threads(self._workers.size)
        try:
            async with asyncio.timeout(grace_s if self._outstanding else self._settings.stop_grace_s):
                await until_idle(lambda: self._threads, self._left)
            async with asyncio.timeout(self._settings.stop_grace_s):
                await stop_host(self._host)
        except TimeoutError:
            # Threads cannot be ended. What they still do is of no consequence to us.
            self._lose([cut_off(number) for number in self._outstanding])

    def _refuse_hard_limit(self, job: Job) -> str:
        why = self.abilities.hard_limits
        return f"the {self.name} pool cannot enforce the hard limit of {job.task!r}: {why}"

    # ---- on the loop -------------------------------------------------------------------------------

    def _ahead(self) -> int:
        """How many jobs a thread should have in sight, the one it runs included."""
        typical_s = self._typical_s
        if typical_s is None or typical_s >= BRIEF_S:
            return 1
        return 2 if typical_s <= 0 else max(2, min(int(_AHEAD_S / typical_s), _AHEAD_MAX))

    def _start_threads(self, count: int) -> None:
        assert self._workers is not None
        self._threads += count
        self._workers.start_threads(count)

    def _on_reports(self, reports: Sequence[Report | Told]) -> None:
        assert self._workers is not None
        ended: list[Outcome] = []
        lost: list[LostJob] = []
        begun: dict[int, tuple[int, float, int]] = {}
        for report in reports:
            match report:
                case Began(job, at):
                    if job.number in self._outstanding:
                        self._running[job.number] = _Running(job, self._arm(job, at))
                        begun[job.number] = (job.number, at, os.getpid())
                case Told():
                    self._listener.on_told(report)
                case Ended(outcome):
                    begun.pop(outcome.number, None)
                    if self._is_back(outcome.number):
                        self._typical_s = outcome.runtime_s
                        ended.append(outcome)
                case Broke(job, error):
                    begun.pop(job.number, None)
                    if self._is_back(job.number):
                        lost.append(broken(job, error, self._workers.interruptions))
                case Left(thread):
                    self._threads -= 1
                    self._left.set()
                    self._listener.on_child("ended", {"child": thread, "pid": os.getpid()})
                case _:
                    assert_never(report)
        if begun:
            self._listener.on_started(list(begun.values()))
        if ended:
            self._listener.on_outcomes(ended, os.getpid())
        if lost:
            self._listener.on_lost(lost)

    def _is_back(self, number: int) -> bool:
        """False for a job that was given up meanwhile."""
        running = self._running.pop(number, None)
        if running is not None and running.limit is not None:
            running.limit.cancel()
        return self._outstanding.pop(number, None) is not None

    def _arm(self, job: Job, began_at: float) -> asyncio.TimerHandle | None:
        if job.soft_limit_s is None:
            return None
        left_s = began_at + job.soft_limit_s - time.time()
        return self._loop.call_later(max(0.0, left_s), self._raise_in, job.number, self._soft_limit)

    def _raise_in(self, number: int, error: type[Exception]) -> None:
        assert self._workers is not None
        running = self._running.get(number)
        if running is None:
            return
        if running.limit is not None:
            running.limit.cancel()
        if not self._workers.raise_in(number, error):
            running.limit = self._loop.call_later(_AGAIN_S, self._raise_in, number, error)

    def _lose(self, lost: Sequence[LostJob]) -> None:
        for one in lost:
            self._is_back(one.number)
        if lost:
            self._listener.on_lost(lost)
