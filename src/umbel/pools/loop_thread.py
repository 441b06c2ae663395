"""A thread with an event loop on which jobs run as coroutines, controlled from the main loop.

The main loop sends orders through one inbox, and gets reports back. So a coroutine that never yields blocks
only this thread, and the main loop can detect it: a blocked loop does not answer ConfirmAlive.

Soft limits, cancel requests and the worker's shutdown are raised where the coroutine waits. Each of these
exceptions is also a CancelledError. So a task group or a timeout inside the task cancels its content, as it
does for a plain cancellation, and the task may still catch `SoftTimeLimitExceeded`.
"""

import asyncio
import contextlib
import ctypes
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, assert_never, cast

from umbel.errors import SoftTimeLimitExceeded, TaskCancelled, WorkerStopping
from umbel.pools.event_loop import Reports, loop_factory
from umbel.pools.guard import await_guarded
from umbel.pools.interface import AsyncRunner, Job, LoopChoice
from umbel.pools.threads import JobBegan, JobEnded, RunnerFailed

_AGAIN_S = 0.01  # between attempts to interrupt a job
_END_S = 1.0  # time for cancelled coroutines to end when the thread ends


class SoftLimitPassed(SoftTimeLimitExceeded, asyncio.CancelledError):
    """A soft limit that is also a cancellation."""

    def __init__(self) -> None:
        super().__init__("soft time limit exceeded")


class WorkerStops(WorkerStopping, asyncio.CancelledError):
    """The worker's shutdown as a cancellation."""

    def __init__(self) -> None:
        super().__init__("the worker is shutting down; the task returns to its queue")


class CancelAsked(TaskCancelled, asyncio.CancelledError):
    """A cancel request that is also a cancellation."""

    def __init__(self) -> None:
        super().__init__("cancelled")


Interruption = type[SoftLimitPassed] | type[WorkerStops] | type[CancelAsked]


class _Broken(asyncio.CancelledError):
    """Raised in code that blocks the loop beyond its hard limit."""


@dataclass(frozen=True, slots=True)
class CancelJob:
    """Order: cancel this job at its hard limit or for a terminate request."""

    number: int


@dataclass(frozen=True, slots=True)
class InterruptJob:
    """Order: raise this error where the job waits."""

    number: int
    error: Interruption


@dataclass(frozen=True, slots=True)
class ConfirmAlive:
    """Order: prove that the loop is not blocked."""


@dataclass(frozen=True, slots=True)
class EndLoop:
    """Order: cancel all jobs and end the loop."""


Order = Job | CancelJob | InterruptJob | ConfirmAlive | EndLoop


@dataclass(frozen=True, slots=True)
class JobCancelled:
    """Report: the job was cancelled and has ended."""

    job: Job


@dataclass(frozen=True, slots=True)
class LoopEnded:
    """Report: the thread has ended."""

    loop_thread: "LoopThread"


Report = JobBegan | JobEnded | RunnerFailed | JobCancelled | LoopEnded


class LoopThread:
    """The thread, as the main loop sees it.

    `tell` sends an order; `holder` and `break_in` find and interrupt code that blocks the loop.
    """

    def __init__(self, runner: AsyncRunner, report: Callable[[Report], None], loop: LoopChoice) -> None:
        self.sign_at = time.monotonic()  # when the loop last proved that it is not blocked
        self._runner = runner
        self._loop_choice = loop
        self._report = report
        self._tasks: dict[int, tuple[asyncio.Task[None], _Interruptible]] = {}
        self._started = threading.Event()
        self._ending: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._live, name="umbel-loop", daemon=True)
        self._thread.start()
        self._started.wait()  # short, because no user code runs before this

    def tell(self, order: Order) -> None:
        """Send an order; the loop carries it out at its next iteration."""
        self._inbox.add(order)

    # ---- seen from outside -------------------------------------------------------------------------

    def holder(self) -> tuple[Job, FrameType] | None:
        """Return the job whose code runs at this moment, and its frame; None if the loop is idle or between
        jobs.
        """
        frame = innermost = sys._current_frames().get(self._thread.ident or 0)
        while frame is not None:
            if frame.f_code is LoopThread._run.__code__ and innermost is not None:
                return frame.f_locals["job"], innermost
            frame = frame.f_back
        return None

    def break_in(self) -> None:
        """Raise an exception in the code that runs on the loop, at its next Python instruction, if there is
        any.
        """
        error = ctypes.py_object(_Broken)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread.ident or 0), error)

    # ---- in the thread -----------------------------------------------------------------------------

    def _live(self) -> None:
        try:
            with (
                contextlib.suppress(asyncio.CancelledError),
                asyncio.Runner(loop_factory=loop_factory(self._loop_choice)) as runner,
            ):
                runner.run(self._serve())
        finally:
            self._started.set()
            self._report(LoopEnded(self))

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ending = asyncio.Event()
        self._inbox: Reports[Order] = Reports(self._loop, self._on_orders)
        self._started.set()
        await self._ending.wait()
        tasks = [task for task, _ in self._tasks.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_END_S)

    def _on_orders(self, orders: Sequence[Order]) -> None:
        self.sign_at = time.monotonic()
        for order in orders:
            match order:
                case Job():
                    self._begin(order)
                case CancelJob(number):
                    if (found := self._tasks.get(number)) is not None:
                        found[0].cancel()
                case InterruptJob(number, error):
                    self._interrupt(number, error)
                case ConfirmAlive():
                    pass
                case EndLoop():
                    assert self._ending is not None
                    self._ending.set()
                case _:
                    assert_never(order)

    def _begin(self, job: Job) -> None:
        coroutine = _Interruptible(self._run(job))
        task: asyncio.Task[None] = self._loop.create_task(cast(Coroutine[Any, Any, None], coroutine))
        self._tasks[job.number] = task, coroutine

    def _interrupt(self, number: int, error: Interruption) -> None:
        found = self._tasks.get(number)
        if found is not None and not found[1].interrupt(found[0], error):
            self._loop.call_later(_AGAIN_S, self._interrupt, number, error)

    async def _run(self, job: Job) -> None:
        self._report(JobBegan(job, time.time(), 0))
        report: Report
        try:
            report = JobEnded(await self._runner.run(job))
        except asyncio.CancelledError:
            report = JobCancelled(job)  # nothing awaits this asyncio task
        except GeneratorExit:
            raise
        except BaseException as error:  # a task may raise anything, and the loop runs other tasks
            report = RunnerFailed(job, error)
        finally:
            del self._tasks[job.number]
        self._report(report)
        del report  # its error's traceback refers to this frame


class _Interruptible(Coroutine[Any, Any, None]):
    """A coroutine in which one of our exceptions can be raised where it waits.

    asyncio can only cancel. So the task is cancelled, and our exception is thrown in place of the plain
    CancelledError.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._coroutine = coroutine
        self._error: Interruption | None = None
        self._task: asyncio.Task[None] | None = None

    def interrupt(self, task: asyncio.Task[None], error: Interruption) -> bool:
        """Raise the error in the coroutine; return False if that is not possible now and the caller must
        retry.
        """
        if not _is_guarded(self._coroutine):
            return False
        if not task.cancelling():  # otherwise it is being cancelled already
            self._task, self._error = task, error
            task.cancel()
        return True

    def send(self, value: Any) -> Any:
        return self._coroutine.send(value)

    def throw(self, error: Any, value: Any = None, traceback: Any = None) -> Any:
        ours, self._error = self._error, None
        if ours is None or self._task is None:
            return self._coroutine.throw(error)
        self._task.uncancel()  # the task gets an exception and may continue
        return self._coroutine.throw(ours())

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, None]:
        return self._coroutine.__await__()


def _is_guarded(coroutine: Any) -> bool:
    """Return whether the coroutine waits inside a guarded call: elsewhere the exception would break Umbel's
    code.
    """
    while coroutine is not None and getattr(coroutine, "cr_code", None) is not await_guarded.__code__:
        coroutine = getattr(coroutine, "cr_await", None)
    return coroutine is not None
