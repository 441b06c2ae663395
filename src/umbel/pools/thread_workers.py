"""ThreadWorkers: threads of this process that run jobs, and the soft limit as an exception in one of them.

Threads take jobs from one queue, so a long job blocks only its own thread. Taking one is
atomic: a job is run or withdrawn, never both.

Soft limits, cancels and the worker's shutdown are exceptions. Python can raise one in another thread, at
that thread's next step of Python code: a job that waits in C (a long `time.sleep`, a driver that
blocks) gets it when that returns. A loop of ours on which a coroutine waits is woken.
The taker of the run's one ticket decides: the loop, to raise, or the thread, whose job has ended.
So the exception cannot reach a later job. It is raised only while the thread is inside a guarded
call, where it is caught; should the thread leave that call in the very moment, its job's outcome is
lost, and the job counts as one that ran and comes back to be run again.
"""

import ctypes
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from umbel.errors import SoftTimeLimitExceeded, TaskCancelled
from umbel.pools.guard import Raised, call_to_the_end, interrupted_by_loop, is_guarded
from umbel.pools.interface import Job, Outcome, Runner

INTERRUPTIONS: tuple[type[Exception], ...] = (SoftTimeLimitExceeded, TaskCancelled)
_POST_S = 0.0005  # between looks whether the exception that was announced is on its way


@dataclass(frozen=True, slots=True)
class Began:
    job: Job
    at: float  # Unix time
    thread: int  # the kernel's number of it


@dataclass(frozen=True, slots=True)
class Ended:
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Broke:
    """The runner itself did not return."""

    job: Job
    error: BaseException


@dataclass(frozen=True, slots=True)
class Left:
    """A thread has ended, as it was asked to."""

    thread: int


Report = Began | Ended | Broke | Left


@dataclass(slots=True)
class _ThreadRun:
    """What the loop must know of a thread to raise in it."""

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
    """`soft_limit`: what a soft limit raises in the tasks; ours is also the worker's shutdown."""

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
        self._running: dict[int, _ThreadRun] = {}  # by job: those that run
        self._started = 0
        self.size = 0  # threads that were not asked to leave

    def start_threads(self, count: int) -> None:
        for _ in range(count):
            self._started += 1
            self.size += 1
            threading.Thread(
                target=self._work, name=f"umbel-{self._name}-{self._started}", daemon=True
            ).start()

    def stop_threads(self, count: int) -> None:
        """So many threads end, each after the jobs that were put before this."""
        self.size -= count
        for _ in range(count):
            self._jobs.put(None)

    def put(self, job: Job) -> None:
        self._jobs.put(job)

    def withdraw(self) -> list[Job]:
        """The jobs that no thread has taken; from now on none will."""
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
        return self._jobs.qsize()

    def raise_in(self, job: int, error: type[Exception]) -> bool:
        """Raise in the thread that runs this job; False when this is not the moment: try again.

        A job gets one exception only: after its soft limit it does not get the worker's shutdown.
        """
        run = self._running.get(job)
        if run is None:
            return True  # it has ended
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
            self._report(Began(job, time.time(), thread))
            run = self._running[job.number] = _ThreadRun(ident)
            ran = call_to_the_end(_run, self._runner, job, run, self.interruptions)
            del self._running[job.number]
            self._report(Broke(job, ran.error) if isinstance(ran, Raised) else Ended(ran.value))
            del job, ran  # or an idle thread would keep its last job's values alive
        self._report(Left(thread))


def _run(
    runner: Runner, job: Job, run: _ThreadRun, interruptions: tuple[type[Exception], ...] = INTERRUPTIONS
) -> Outcome:
    outcome: Outcome | None = None
    try:
        outcome = runner(job)
        if not run.take_ticket():
            _absorb(run)
    except interruptions:
        # It left the guarded call just then. With the outcome in hand nothing is lost.
        if outcome is None:
            raise
    return outcome


def _absorb(run: _ThreadRun) -> None:
    """The exception was raised, or is about to be. If the job did not get it, nobody else may."""
    while not run.raised:
        time.sleep(_POST_S)
    _raise_in(run.ident, None)


def _raise_in(ident: int, error: type[BaseException] | None) -> None:
    target = ctypes.py_object(error) if error is not None else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), target)
