"""A pool that runs `async def` tasks as coroutines, thousands at once, on an event loop in a separate thread.

Plain functions run in other threads. The worker's main loop runs no task: a coroutine that never yields
blocks the other coroutines, but not heartbeats, leases and remote control.

The main loop measures time limits, from the moment a job starts. At a soft limit an exception is raised where
the coroutine waits. At a hard limit the coroutine is cancelled. If it does not end soon after, the job is
reported as lost, and any later outcome of the coroutine is ignored. If that coroutine blocks the loop, an
exception is raised in its code. If even that fails (the code waits in C), the thread is abandoned: a new
thread with a new loop replaces it, and the other jobs of the old loop run again.

A plain function in a thread cannot be ended, so it must not have a hard limit here.
"""

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, assert_never, cast

from umbel.errors import TaskCancelled, WorkerStopping
from umbel.pools.abilities import ABILITIES
from umbel.pools.event_loop import Reports, start_host, stop_host
from umbel.pools.guard import soft_limit_of
from umbel.pools.interface import (
    AsyncRunner,
    Host,
    Job,
    LostJob,
    Outcome,
    PoolListener,
    PoolSettings,
    UserEvent,
)
from umbel.pools.loop_thread import (
    CancelAsked,
    CancelJob,
    ConfirmAlive,
    EndLoop,
    Interruption,
    InterruptJob,
    JobCancelled,
    LoopEnded,
    LoopThread,
    Report,
    SoftLimitPassed,
    WorkerStops,
)
from umbel.pools.reporting import (
    BY_LIMIT,
    BY_REQUEST,
    GuardedListener,
    apart,
    broken,
    cut_off,
    ended_by,
    not_started,
    resized,
    until_idle,
)
from umbel.pools.threads import JobBegan, JobEnded, RunnerFailed, ThreadEnded, ThreadWorkers
from umbel.protocol.pool.slots import BRIEF_S

log = logging.getLogger(__name__)

_THREADS_MAX = 64  # for plain functions; more of them wait
_AGAIN_S = 0.01  # between attempts to raise an exception in a thread
_CANCEL_S = 1.0  # time for a cancelled coroutine to end, before its job is reported as lost
_ABANDON_S = 5.0  # time for a blocked loop to run again after that
_WATCH_S = 1.0  # between checks for a blocked loop


@dataclass(slots=True)
class _Running:
    job: Job
    loop_thread: LoopThread | None  # None for a job that runs in a thread
    began: bool = False
    soft: asyncio.TimerHandle | None = None
    hard: asyncio.TimerHandle | None = None
    ended_by: str = ""  # why the job was cancelled

    def disarm(self) -> None:
        for timer in (self.soft, self.hard):
            if timer is not None:
                timer.cancel()


class AsyncioPool:
    """Runs coroutines on one LoopThread and plain functions in ThreadWorkers."""

    name = "asyncio"
    is_green = True

    def __init__(self, settings: PoolSettings) -> None:
        self.abilities = ABILITIES[self.name]
        self._settings = settings
        self._size = settings.concurrency
        self._waiting: deque[Job] = deque()
        self._running: dict[int, _Running] = {}
        self._in_threads = 0  # number of running plain functions
        self._typical_s: float | None = None
        self._host: Host | None = None
        self._closing = False
        self._warned = False  # whether the warning about a blocked loop was logged
        self._loops_ended: list[LoopThread] = []

    # ---- the interface -----------------------------------------------------------------------------

    async def start(self, listener: PoolListener) -> None:
        """Load the app in a thread, then start the loop thread; raise PoolError if loading fails."""
        self._loop = asyncio.get_running_loop()
        self._listener = GuardedListener(listener)
        self._ended = asyncio.Event()
        self._reports: Reports[Report | ThreadEnded | UserEvent] = Reports(self._loop, self._on_reports)
        self._host, runner = await start_host(self._settings, self._reports.add, on_loop=True)
        self._runner = cast(AsyncRunner, runner)
        self._soft_limit = soft_limit_of(self._host)
        self._workers = ThreadWorkers(self.name, runner, self._reports.add, soft_limit=self._soft_limit)
        self._loop_thread = LoopThread(self._runner, self._reports.add, self._settings.loop)
        self._watch = self._loop.call_later(_WATCH_S, self._look)
        self._listener.on_child("started", {"child": 0, "pid": os.getpid()})

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue jobs; those with a limit that cannot be enforced here are reported as lost."""
        jobs, unfit = apart(jobs, hard_limits=self._refuse_hard_limit)
        if unfit:
            self._listener.on_lost(unfit)
        self._waiting.extend(jobs)
        if self._closing:
            self._give_up()
        self._start_next()

    def note_unsettled(self, count: int) -> None:
        """Do nothing: the number of claimed messages is limited already."""

    def room(self) -> int:
        """Return how many more jobs to submit now: twice the size while jobs are short."""
        is_brief = self._typical_s is not None and self._typical_s < BRIEF_S
        return self._room_in(self._size * (2 if is_brief else 1))

    def free(self) -> int:
        """Return how many more jobs could start at once."""
        return self._room_in(self._size)

    def _room_in(self, size: int) -> int:
        return 0 if self._closing else max(0, size - len(self._running) - len(self._waiting))

    def withdraw(self) -> Sequence[Job]:
        """Take back the queued jobs, including jobs handed to threads that have not started them."""
        jobs = [*self._waiting]
        self._waiting.clear()
        if self._host is not None:
            untaken = self._workers.withdraw()
            for job in untaken:
                self._forget(job.number)
            jobs[:0] = untaken
        return tuple(jobs)

    def cancel_job(self, number: int) -> bool:
        """Raise TaskCancelled in the coroutine or thread of this job; return False if it does not run."""
        self._interrupt(number, TaskCancelled, CancelAsked)
        return number in self._running

    def terminate_job(self, number: int, signum: int) -> bool:
        """Cancel the coroutine of this job; return False for a plain function, which cannot be ended."""
        running = self._running.get(number)
        if running is None or running.loop_thread is None:
            return False
        running.ended_by = BY_REQUEST
        running.loop_thread.tell(CancelJob(number))
        return True

    def interrupt(self) -> int:
        """Raise WorkerStopping in every running job; return how many there are."""
        for number in self._running:
            self._interrupt(number, WorkerStopping, WorkerStops)
        return len(self._running)

    def resize(self, by: int) -> int:
        """Change how many jobs run at once; no child process is involved."""
        size = self._size = resized(self._size, by)
        self._start_next()
        return size

    def describe(self) -> dict[str, Any]:
        """Return the state for `health` and `stats`; there are no child processes to list."""
        return {
            "implementation": self.name,
            "max-concurrency": self._size,
            "faults": self._listener.faults if self._host is not None else 0,
            "processes": [],
            "coroutines": self._size,
            "running": {running.job.task_id: os.getpid() for running in self._running.values()},
            "waiting": len(self._waiting),
        }

    async def stop(self, *, grace_s: float) -> None:
        """Wait up to `grace_s` for running jobs, report the others as lost, and end loop and threads."""
        if self._host is None or self._closing:
            return
        self._closing = True
        self._give_up()
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await until_idle(lambda: self._running, self._ended)
        in_threads = self._in_threads
        self._lose([cut_off(number) for number in self._running])
        self._watch.cancel()
        self._loop_thread.tell(EndLoop())
        self._workers.stop_threads(self._workers.size)
        try:
            async with asyncio.timeout(self._settings.stop_grace_s):
                await until_idle(lambda: self._loop_thread not in self._loops_ended, self._ended)
                if not in_threads:  # otherwise, threads that cannot be ended still use the app
                    await stop_host(self._host)
        except TimeoutError:
            log.warning("task still blocks the event loop at shutdown; child shutdown hooks skipped")

    def _refuse_hard_limit(self, job: Job) -> str:
        if self._runner.is_async(job.task):
            return ""
        why = self.abilities.hard_limits
        return f"the {self.name} pool cannot enforce the hard limit of {job.task!r}: {why}"

    # ---- starting jobs -----------------------------------------------------------------------------

    def _start_next(self) -> None:
        while self._waiting and len(self._running) < self._size:
            job = self._waiting.popleft()
            if self._runner.is_async(job.task):
                self._running[job.number] = _Running(job, self._loop_thread)
                self._loop_thread.tell(job)
            else:
                self._running[job.number] = _Running(job, None)
                self._in_threads += 1
                if self._in_threads > self._workers.size and self._workers.size < _THREADS_MAX:
                    self._workers.start_threads(1)
                self._workers.put(job)

    def _arm(self, running: _Running, began_at: float) -> None:
        job, passed_s = running.job, time.time() - began_at
        if job.soft_limit_s is not None:
            due_s = max(0.0, job.soft_limit_s - passed_s)
            running.soft = self._loop.call_later(due_s, self._on_soft_limit, job.number)
        if job.hard_limit_s is not None:
            due_s = max(0.0, job.hard_limit_s - passed_s)
            running.hard = self._loop.call_later(due_s, self._on_hard_limit, job.number)

    # ---- what comes back ---------------------------------------------------------------------------

    def _on_reports(self, reports: Sequence[Report | ThreadEnded | UserEvent]) -> None:
        ended: list[Outcome] = []
        lost: list[LostJob] = []
        begun: dict[int, tuple[int, float, int]] = {}
        for report in reports:
            match report:
                case JobBegan(job, at):
                    running = self._running.get(job.number)
                    if running is not None:
                        running.began = True
                        self._arm(running, at)
                        begun[job.number] = (job.number, at, os.getpid())
                case UserEvent():
                    self._listener.on_told(report)
                case JobEnded(outcome):
                    begun.pop(outcome.number, None)
                    if self._forget(outcome.number) is not None:
                        self._typical_s = outcome.runtime_s
                        ended.append(outcome)
                case RunnerFailed(job, error):
                    begun.pop(job.number, None)
                    if self._forget(job.number) is not None:
                        lost.append(broken(job, error, self._workers.interruptions))
                case JobCancelled(job):
                    begun.pop(job.number, None)
                    if (running := self._forget(job.number)) is not None:
                        lost.append(ended_by(job.number, running.ended_by or "the end of its event loop"))
                case LoopEnded(loop_thread):
                    self._on_loop_ended(loop_thread)
                case ThreadEnded():
                    pass
                case _:
                    assert_never(report)
        self._ended.set()
        self._start_next()
        self._tell(list(begun.values()), ended, lost)

    def _tell(
        self, begun: Sequence[tuple[int, float, int]], ended: Sequence[Outcome], lost: Sequence[LostJob]
    ) -> None:
        if begun:
            self._listener.on_started(begun)
        if ended:
            self._listener.on_outcomes(ended, os.getpid())
        if lost:
            self._listener.on_lost(lost)

    def _forget(self, number: int) -> _Running | None:
        running = self._running.pop(number, None)
        if running is not None:
            running.disarm()
            self._in_threads -= running.loop_thread is None
        return running

    # ---- limits ------------------------------------------------------------------------------------

    def _on_soft_limit(self, number: int) -> None:
        self._interrupt(number, self._soft_limit, SoftLimitPassed)

    def _interrupt(self, number: int, in_thread: type[Exception], on_loop: Interruption) -> None:
        running = self._running.get(number)
        if running is None:
            return
        if running.loop_thread is not None:
            running.loop_thread.tell(InterruptJob(number, on_loop))
        else:
            self._raise_in_thread(number, in_thread)

    def _raise_in_thread(self, number: int, error: type[Exception]) -> None:
        running = self._running.get(number)
        if running is not None and not self._workers.raise_in(number, error):
            running.soft = self._loop.call_later(_AGAIN_S, self._raise_in_thread, number, error)

    def _on_hard_limit(self, number: int) -> None:
        running = self._running[number]
        assert running.loop_thread is not None, "plain functions have no hard limit here"
        running.ended_by = BY_LIMIT
        running.loop_thread.tell(CancelJob(number))
        running.hard = self._loop.call_later(_CANCEL_S, self._on_deaf, number)

    def _on_deaf(self, number: int) -> None:
        """Report a job as lost that was cancelled but still runs."""
        running = self._running[number]
        assert running.loop_thread is not None
        cancelled_at = time.monotonic() - _CANCEL_S
        holder = running.loop_thread.holder()
        if running.loop_thread.sign_at < cancelled_at and holder is not None and holder[0].number == number:
            running.loop_thread.break_in()
            self._loop.call_later(_ABANDON_S, self._abandon_if_stuck, running.loop_thread, cancelled_at)
        else:
            log.warning(
                "task keeps running after it was cancelled at its time limit", extra=_about(running.job)
            )
        self._lose([ended_by(number, BY_LIMIT)])
        self._start_next()

    def _abandon_if_stuck(self, loop_thread: LoopThread, since: float) -> None:
        if loop_thread is self._loop_thread and loop_thread.sign_at < since and not self._closing:
            log.error("task blocks the event loop beyond its time limit; starting a new loop")
            self._replace(loop_thread, "another task blocked the event loop, which was replaced")

    def _on_loop_ended(self, loop_thread: LoopThread) -> None:
        self._loops_ended.append(loop_thread)
        if loop_thread is self._loop_thread and not self._closing:
            self._replace(loop_thread, "the event loop of the task stopped")

    def _replace(self, loop_thread: LoopThread, reason: str) -> None:
        self._loop_thread = LoopThread(self._runner, self._reports.add, self._settings.loop)
        loop_thread.tell(EndLoop())  # for the case that its loop runs again
        stuck = [number for number, running in self._running.items() if running.loop_thread is loop_thread]
        self._lose(
            [LostJob(job, started=False, reason=reason, ran=self._running[job].began) for job in stuck]
        )
        self._start_next()

    def _look(self) -> None:
        """Check whether the loop is blocked, and log once which task blocks it."""
        silent_s = time.monotonic() - self._loop_thread.sign_at
        holder = self._loop_thread.holder() if silent_s > 2 * _WATCH_S else None
        if holder is not None and not self._warned:
            job, frame = holder
            where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            fields = {**_about(job), "for_s": round(silent_s, 1), "where": where}
            log.warning("task blocks the event loop of the asyncio pool", extra=fields)
        self._warned = holder is not None
        self._loop_thread.tell(ConfirmAlive())
        self._watch = self._loop.call_later(_WATCH_S, self._look)

    def _give_up(self) -> None:
        self._lose([not_started(job) for job in self.withdraw()])

    def _lose(self, lost: Sequence[LostJob]) -> None:
        for job in lost:
            self._forget(job.number)
        if lost:
            self._listener.on_lost(lost)


def _about(job: Job) -> dict[str, Any]:
    return {"task": job.task, "task_id": job.task_id}
