"""Pools that run jobs in threads of the main process, for tasks that wait more than they compute.

The event loop stays free, but threads share one interpreter: a job that computes slows the others and the
loop, and a job that crashes ends the worker. No thread can be ended from outside, so hard limits and
`terminate_job` are refused. SoloPool is the same with a single thread.

ThreadWorkers manages the threads. They take jobs from one queue, so a long job blocks only its own thread.
Taking a job is atomic: a job is run or withdrawn, never both.

Soft limits, cancels and the worker's shutdown are exceptions. Python can raise an exception in another
thread, at that thread's next Python instruction: a job that waits in C code (a long `time.sleep`, a driver
that blocks) gets it when the C call returns. If a coroutine waits on an event loop, the loop is woken.

The exception must not reach a later job. So each run has one ticket, and the side that takes it first
decides: the event loop, which then raises, or the thread, whose job has ended. The exception is raised only
while the thread is inside a guarded call, where it is caught. If the thread leaves that call at the same
moment, the outcome of its job is lost, and the job runs again.
"""

import asyncio
import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, assert_never

from msgspec.structs import replace

from umbel.errors import NotSupported, SoftTimeLimitExceeded, TaskCancelled, WorkerStopping
from umbel.pools.abilities import ABILITIES
from umbel.pools.event_loop import Reports, start_host, stop_host
from umbel.pools.guard import interrupted_by_loop, is_guarded, soft_limit_of
from umbel.pools.interface import Host, Job, LostJob, Outcome, PoolListener, PoolSettings, Runner, UserEvent
from umbel.pools.reporting import GuardedListener, apart, broken, cut_off, not_started, resized, until_idle
from umbel.protocol.pool.slots import BRIEF_S

# ---- thread workers --------------------------------------------------------------------------------

INTERRUPTIONS: tuple[type[Exception], ...] = (SoftTimeLimitExceeded, TaskCancelled)
_POST_S = 0.0005  # between checks whether the requested exception was raised


@dataclass(frozen=True, slots=True)
class JobBegan:
    """Report: a thread has taken this job."""

    job: Job
    at: float  # Unix time
    thread: int  # the kernel's thread id


@dataclass(frozen=True, slots=True)
class JobEnded:
    """Report: a job has ended with this outcome."""

    outcome: Outcome


@dataclass(frozen=True, slots=True)
class RunnerFailed:
    """Report: the runner itself raised, so the job has no outcome."""

    job: Job
    error: BaseException


@dataclass(frozen=True, slots=True)
class ThreadEnded:
    """Report: a thread has ended, as requested."""

    thread: int


Report = JobBegan | JobEnded | RunnerFailed | ThreadEnded


@dataclass(slots=True)
class _ThreadRun:
    """The state of a running job that the loop needs to raise an exception in its thread."""

    ident: int
    ticket: list[None] = field(default_factory=lambda: [None])
    raised: bool = False

    def take_ticket(self) -> bool:
        try:
            self.ticket.pop()  # atomic
        except IndexError:
            return False
        return True


class ThreadWorkers:
    """Runs jobs from one queue in threads.

    `soft_limit` is the class that a soft limit raises in tasks; Umbel's class is also raised at shutdown.
    """

    def __init__(
        self,
        name: str,
        runner: Runner,
        report: Callable[[Report], None],
        *,
        soft_limit: type[Exception] = SoftTimeLimitExceeded,
    ) -> None:
        self.interruptions = (soft_limit, *INTERRUPTIONS)
        self._name = name
        self._runner = runner
        self._report = report
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._running: dict[int, _ThreadRun] = {}  # by job number
        self._started = 0
        self.size = 0  # number of threads that were not asked to end

    def start_threads(self, count: int) -> None:
        """Start this many more threads."""
        for _ in range(count):
            self._started += 1
            self.size += 1
            threading.Thread(
                target=self._work, name=f"umbel-{self._name}-{self._started}", daemon=True
            ).start()

    def stop_threads(self, count: int) -> None:
        """End this many threads, each after the jobs that were queued before this call."""
        self.size -= count
        for _ in range(count):
            self._jobs.put(None)

    def put(self, job: Job) -> None:
        """Queue a job for the next free thread."""
        self._jobs.put(job)

    def withdraw(self) -> list[Job]:
        """Take back the jobs that no thread has taken; no thread takes them afterwards."""
        jobs, leaving = [], 0
        while True:
            try:
                job = self._jobs.get_nowait()
            except Empty:
                break
            if job is None:
                leaving += 1
            else:
                jobs.append(job)
        for _ in range(leaving):
            self._jobs.put(None)
        return jobs

    def waiting(self) -> int:
        """Return how many jobs and requests to end are queued."""
        return self._jobs.qsize()

    def raise_in(self, job: int, error: type[Exception]) -> bool:
        """Raise the error in the thread that runs this job; return False if the caller must retry.

        A job gets only one exception: after its soft limit it does not get the worker's shutdown.
        """
        run = self._running.get(job)
        if run is None:
            return True  # the job has ended
        frame = sys._current_frames().get(run.ident)
        if not is_guarded(frame, within=_run.__code__):
            return False
        if not run.take_ticket():
            return True
        if not interrupted_by_loop(run.ident, error()):
            _raise_in(run.ident, error)
        run.raised = True
        return True

    def _work(self) -> None:
        thread, ident = threading.get_native_id(), threading.get_ident()
        while (job := self._jobs.get()) is not None:
            self._report(JobBegan(job, time.time(), thread))
            run = self._running[job.number] = _ThreadRun(ident)
            report: Report
            try:
                report = JobEnded(_run(self._runner, job, run, self.interruptions))
            except BaseException as error:  # a task may raise anything, and this thread has more jobs to run
                report = RunnerFailed(job, error)
            del self._running[job.number]
            self._report(report)
            del job, report  # otherwise an idle thread would keep its last job's values in memory
        self._report(ThreadEnded(thread))


def _run(
    runner: Runner, job: Job, run: _ThreadRun, interruptions: tuple[type[Exception], ...] = INTERRUPTIONS
) -> Outcome:
    outcome: Outcome | None = None
    try:
        outcome = runner(job)
        if not run.take_ticket():
            _absorb(run)
    except interruptions:
        # Raised just after the guarded call. If there is an outcome, nothing is lost.
        if outcome is None:
            raise
    return outcome


def _absorb(run: _ThreadRun) -> None:
    """Wait for a requested exception. If the job did not get it, clear it before the next job."""
    while not run.raised:
        time.sleep(_POST_S)
    _raise_in(run.ident, None)


def _raise_in(ident: int, error: type[BaseException] | None) -> None:
    target = ctypes.py_object(error) if error is not None else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), target)


# ---- threads pool ----------------------------------------------------------------------------------

_AHEAD_S, _AHEAD_MAX = 0.05, 64
_AGAIN_S = 0.01  # between attempts to raise a soft limit


@dataclass(slots=True)
class _Running:
    job: Job
    limit: asyncio.TimerHandle | None = None


class ThreadsPool:
    """Runs jobs in ThreadWorkers; on the event loop it only times soft limits and counts jobs."""

    name = "threads"
    is_green = False

    def __init__(self, settings: PoolSettings) -> None:
        self.abilities = ABILITIES[self.name]
        self._settings = settings
        self._size = settings.concurrency
        self._workers: ThreadWorkers | None = None
        self._host: Host | None = None
        self._outstanding: dict[int, Job] = {}  # jobs that were submitted and not reported back
        self._running: dict[int, _Running] = {}
        self._threads = 0  # running threads, including those that were asked to end
        self._typical_s: float | None = None
        self._closing = False

    # ---- the interface -----------------------------------------------------------------------------

    async def start(self, listener: PoolListener) -> None:
        """Load the app in a thread, then start the threads; raise PoolError if it cannot be loaded."""
        self._loop = asyncio.get_running_loop()
        self._listener = GuardedListener(listener)
        self._left = asyncio.Event()
        reports: Reports[Report | UserEvent] = Reports(self._loop, self._on_reports)
        self._host, runner = await start_host(self._settings, tell=reports.add)
        self._soft_limit = soft_limit_of(self._host)
        self._workers = ThreadWorkers(self.name, runner, reports.add, soft_limit=self._soft_limit)
        self._start_threads(self._size)
        self._listener.on_child("started", {"child": 0, "pid": os.getpid()})

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue jobs; those with a hard limit are reported as lost."""
        jobs, unfit = apart(jobs, hard_limits=self._refuse_hard_limit)
        if unfit:
            self._listener.on_lost(unfit)
        self._outstanding |= {job.number: job for job in jobs}
        if self._closing or self._workers is None:
            self._lose([not_started(job) for job in jobs])
            return
        for job in jobs:
            self._workers.put(job)

    def note_unsettled(self, count: int) -> None:
        """Do nothing: the number of claimed messages is limited already."""

    def room(self) -> int:
        """Return how many more jobs to submit now, so that short jobs do not leave threads idle."""
        if self._closing:
            return 0
        return max(0, self._size * self._ahead() - len(self._outstanding))

    def free(self) -> int:
        """Return how many more jobs could start at once."""
        return 0 if self._closing else max(0, self._size - len(self._outstanding))

    def withdraw(self) -> Sequence[Job]:
        """Take back the jobs that no thread has taken."""
        jobs = tuple(self._workers.withdraw()) if self._workers is not None else ()
        for job in jobs:
            del self._outstanding[job.number]
        return jobs

    def cancel_job(self, number: int) -> bool:
        """Raise TaskCancelled in this job's thread; return False if the job does not run."""
        self._raise_in(number, TaskCancelled)
        return number in self._running

    def terminate_job(self, number: int, signum: int) -> bool:
        """Return False: a thread cannot be ended from outside."""
        return False

    def interrupt(self) -> int:
        """Raise WorkerStopping in every running job; return how many there are."""
        for number in list(self._running):
            self._raise_in(number, WorkerStopping)
        return len(self._running)

    def resize(self, by: int) -> int:
        """Start threads, or end some after their jobs; raise NotSupported for the solo pool."""
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
        """Return the state for `health` and `stats`; there are no child processes to list."""
        return {
            "implementation": self.name,
            "max-concurrency": self._size,
            "faults": self._listener.faults if self._workers is not None else 0,
            "processes": [],
            "threads": self._threads,
            "running": {running.job.task_id: os.getpid() for running in self._running.values()},
            "waiting": len(self._outstanding) - len(self._running),
        }

    async def stop(self, *, grace_s: float) -> None:
        """Wait up to `grace_s` for running jobs, then report the others as lost: threads cannot be ended."""
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
            # Threads cannot be ended. Whatever they still do is ignored.
            self._lose([cut_off(number) for number in self._outstanding])

    def _refuse_hard_limit(self, job: Job) -> str:
        why = self.abilities.hard_limits
        return f"the {self.name} pool cannot enforce the hard limit of {job.task!r}: {why}"

    # ---- on the loop -------------------------------------------------------------------------------

    def _ahead(self) -> int:
        """Return how many jobs to queue for each thread, including the job it runs."""
        typical_s = self._typical_s
        if typical_s is None or typical_s >= BRIEF_S:
            return 1
        return 2 if typical_s <= 0 else max(2, min(int(_AHEAD_S / typical_s), _AHEAD_MAX))

    def _start_threads(self, count: int) -> None:
        assert self._workers is not None
        self._threads += count
        self._workers.start_threads(count)

    def _on_reports(self, reports: Sequence[Report | UserEvent]) -> None:
        assert self._workers is not None
        ended: list[Outcome] = []
        lost: list[LostJob] = []
        begun: dict[int, tuple[int, float, int]] = {}
        for report in reports:
            match report:
                case JobBegan(job, at):
                    if job.number in self._outstanding:
                        self._running[job.number] = _Running(job, self._arm(job, at))
                        begun[job.number] = (job.number, at, os.getpid())
                case UserEvent():
                    self._listener.on_told(report)
                case JobEnded(outcome):
                    begun.pop(outcome.number, None)
                    if self._is_back(outcome.number):
                        self._typical_s = outcome.runtime_s
                        ended.append(outcome)
                case RunnerFailed(job, error):
                    begun.pop(job.number, None)
                    if self._is_back(job.number):
                        lost.append(broken(job, error, self._workers.interruptions))
                case ThreadEnded(thread):
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
        """Forget the job; return False if it was reported as lost meanwhile."""
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
        for job in lost:
            self._is_back(job.number)
        if lost:
            self._listener.on_lost(lost)


# ---- solo pool -------------------------------------------------------------------------------------
#
# This pool is for debugging, and for platforms where processes are expensive.


class SoloPool(ThreadsPool):
    """A ThreadsPool with one thread, whatever the concurrency."""

    name = "solo"

    def __init__(self, settings: PoolSettings) -> None:
        super().__init__(replace(settings, concurrency=1))
