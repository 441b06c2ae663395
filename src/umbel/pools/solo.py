"""SoloPool: one job at a time, in one thread of the main process.

For debugging and for platforms where processes are dear. The event loop stays free, but a job
that holds the interpreter delays it, a job that crashes takes the worker down, and no job can be
ended from outside: time limits and `terminate_job` are refused.
"""

import asyncio
import contextlib
import os
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from umbel.errors import NotSupported, PoolError
from umbel.pools.guard import Raised, call_guarded
from umbel.pools.hosting import in_one_line, load_host
from umbel.pools.interface import (
    ChildContext,
    Host,
    Job,
    LostJob,
    Outcome,
    PoolListener,
    PoolSettings,
    Runner,
)

_BRIEF_S = 0.25  # below this, a job that waits here is worth more than one left to other nodes
_AHEAD_S, _AHEAD_MAX = 0.05, 64


class SoloPool:
    is_green = False
    supports_time_limits = False

    def __init__(self, settings: PoolSettings) -> None:
        self._settings = settings
        self._waiting: deque[Job] = deque()
        self._running: Job | None = None
        self._typical_s: float | None = None
        # The thread has one job at a time, so that those behind it can be withdrawn.
        self._orders: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="umbel-solo", daemon=True)
        self._closing = False
        self._listener: PoolListener | None = None

    async def start(self, listener: PoolListener) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._started: asyncio.Future[None] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._thread.start()
        try:
            async with asyncio.timeout(self._settings.start_timeout_s):
                await self._started
        except TimeoutError:
            raise PoolError(
                f"the app {self._settings.host.target!r} was not loaded after "
                f"{self._settings.start_timeout_s:g} s (start_timeout_s)"
            ) from None

    def submit(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            if job.hard_limit_s is not None or job.soft_limit_s is not None:
                raise PoolError(f"the solo pool cannot end a job at its time limit (task {job.task!r})")
        self._waiting.extend(jobs)
        if self._closing:
            self._give_up()
        self._run_next()

    def room(self) -> int:
        if self._closing:
            return 0
        typical_s = self._typical_s
        if typical_s is None or typical_s >= _BRIEF_S:
            wanted = 1
        else:
            wanted = 2 if typical_s <= 0 else max(2, min(int(_AHEAD_S / typical_s), _AHEAD_MAX))
        return max(0, wanted - len(self._waiting) - (self._running is not None))

    def withdraw(self) -> Sequence[Job]:
        jobs = tuple(self._waiting)
        self._waiting.clear()
        return jobs

    def terminate_job(self, number: int, signum: int) -> bool:
        return False

    def interrupt(self) -> int:
        return 0  # what runs in a thread cannot be interrupted from outside

    def resize(self, by: int) -> int:
        raise NotSupported("the solo pool runs one task at a time; start the worker with -P prefork")

    def describe(self) -> dict[str, Any]:
        return {
            "implementation": "solo",
            "max-concurrency": 1,
            "processes": [],
            "running": {} if self._running is None else {os.getpid(): self._running.task_id},
            "waiting": len(self._waiting),
        }

    async def stop(self, *, grace_s: float) -> None:
        if self._listener is None or self._closing:
            return
        self._closing = True
        self._give_up()
        self._orders.put(None)
        try:
            async with asyncio.timeout(grace_s if self._running else self._settings.stop_grace_s):
                await asyncio.shield(self._ended)
        except TimeoutError:
            self._abandon()

    # ---- on the loop -------------------------------------------------------------------------------

    def _run_next(self) -> None:
        if self._running is None and self._waiting:
            self._running = self._waiting.popleft()
            self._listen().on_started([(self._running.number, time.time(), os.getpid())])
            self._orders.put(self._running)

    def _on_outcome(self, outcome: Outcome) -> None:
        if self._running is None:  # given up meanwhile
            return
        self._running = None
        self._typical_s = outcome.runtime_s
        self._run_next()
        self._listen().on_outcomes([outcome], os.getpid())

    def _on_raised(self, job: Job, error: BaseException) -> None:
        if self._running is None:
            return
        self._running = None
        self._run_next()
        reason = f"the task ended its thread: {in_one_line(error)}"
        self._listen().on_lost([LostJob(job.number, started=True, reason=reason, ran=True)])

    def _on_started(self, problem: str) -> None:
        if self._started.done():
            return
        if problem:
            self._started.set_exception(PoolError(problem))
        else:
            self._listen().on_child("started", {"child": 0, "pid": os.getpid()})
            self._started.set_result(None)

    def _on_ended(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)

    def _give_up(self) -> None:
        reason = "the pool was stopped before it started"
        lost = [LostJob(job.number, started=False, reason=reason) for job in self.withdraw()]
        if lost:
            self._listen().on_lost(lost)

    def _abandon(self) -> None:
        """The thread cannot be ended. What it still does is of no consequence to us."""
        if self._running is not None:
            job, self._running = self._running, None
            reason = "its job was still running when the pool had to stop"
            self._listen().on_lost([LostJob(job.number, started=False, reason=reason, ran=True)])

    def _listen(self) -> PoolListener:
        assert self._listener is not None, "jobs come after start()"
        return self._listener

    # ---- in the thread -----------------------------------------------------------------------------

    def _work(self) -> None:
        made = call_guarded(self._make_runner)
        if isinstance(made, Raised):
            traceback.print_exception(made.error)
            target = self._settings.host.target
            self._tell(self._on_started, f"the app {target!r} cannot be loaded: {in_one_line(made.error)}")
            self._tell(self._on_ended)
            return
        host, runner = made.value
        self._tell(self._on_started, "")
        while (job := self._orders.get()) is not None:
            ran = call_guarded(runner, job)
            if isinstance(ran, Raised):
                self._tell(self._on_raised, job, ran.error)
            else:
                self._tell(self._on_outcome, ran.value)
        ended = call_guarded(host.stop_child)
        if isinstance(ended, Raised):
            traceback.print_exception(ended.error)
        self._tell(self._on_ended)

    def _make_runner(self) -> tuple[Host, Runner]:
        host = load_host(self._settings.host)
        settings = self._settings
        return host, host.start_child(
            ChildContext(settings.node, 0, settings.loglevel, settings.logfile, settings.log_json)
        )

    def _tell(self, callback: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody is there to hear it
            self._loop.call_soon_threadsafe(callback, *arguments)
