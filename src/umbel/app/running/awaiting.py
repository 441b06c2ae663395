"""Awaiting: a coroutine run to its end from code that is not async.

A child keeps one loop for all its async tasks, so that clients made on it (connections, sessions)
can be kept too; where tasks run in threads, each thread has its own. Where a loop already runs in
this thread (eager mode inside async code, an errback in the worker's main process), the coroutine
gets a separate loop.

asyncio is imported when the first coroutine comes: with the TLS library that it brings along it is
a quarter of what a child would take, and most apps have no async task.
"""

import contextvars
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import TYPE_CHECKING, Any, NoReturn

from umbel.errors import SoftTimeLimitExceeded, TaskCancelled, TaskError
from umbel.pools.guard import on_loops

if TYPE_CHECKING:
    import asyncio


class LastingLoop:
    """A loop for each thread, made when it is first needed; lasts until `close`."""

    def __init__(self) -> None:
        self._runners: dict[int, asyncio.Runner] = {}  # by thread, of which a pool has so many

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        if _a_loop_runs_here():
            return run_to_end(coroutine)
        here = get_ident()
        runner = self._runners.get(here)
        if runner is None:
            import asyncio

            runner = self._runners[here] = asyncio.Runner()
        awaited = _Awaited(coroutine, runner.get_loop())
        on_loops[here] = awaited.interrupt
        try:
            with cancelled_is_failed():
                return runner.run(awaited.coroutine, context=contextvars.copy_context())
        except (SoftTimeLimitExceeded, TaskCancelled):
            awaited.interrupted = True  # where greenlets are, wherever it was
            raise
        finally:
            del on_loops[here]
            # What it has started on the loop, and itself if the loop was hit, would go on during the next
            # task. Closing the loop cancels that.
            if awaited.interrupted:
                self._runners.pop(here).close()

    def close(self) -> None:
        """Close all of them; none may be running."""
        if (
            self._runners and _a_loop_runs_here()
        ):  # they ran in threads beside it, and a loop closes nowhere else
            from concurrent.futures import ThreadPoolExecutor

            with ThreadPoolExecutor(1) as thread:
                thread.submit(self._close_all).result()
        else:
            self._close_all()

    def _close_all(self) -> None:
        while self._runners:
            self._runners.popitem()[1].close()


class _Awaited:
    """A coroutine on its loop, and how it is interrupted there."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], loop: "asyncio.AbstractEventLoop") -> None:
        from umbel.pools.interruptible import Interruptible

        self.coroutine = Interruptible(coroutine)
        self.interrupted = False
        self._loop = loop

    def interrupt(self, error: Exception) -> bool:
        self.interrupted = True
        if self.coroutine.runs:
            return False
        self._loop.call_soon_threadsafe(self.coroutine.interrupt, error)
        return True


def run_to_end(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run it on a separate loop, with the context variables of the caller."""
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

    context = contextvars.copy_context()
    with cancelled_is_failed():
        if not _a_loop_runs_here():
            return context.run(asyncio.run, coroutine)
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(context.run, asyncio.run, coroutine).result()


@contextmanager
def cancelled_is_failed() -> Iterator[None]:
    """Around users' code: what it cancelled itself is its failure.

    CancelledError is no Exception and would end the process that runs the task. Nobody else can
    have cancelled it, because these loops run nothing but the task.
    """
    try:
        yield
    except cancelled_type() as error:
        raise_meaning_of(error)


def raise_meaning_of(cancelled: BaseException) -> NoReturn:
    """The pool's interruptions are cancellations for the task; from here on they are what they mean."""
    meaning: Exception | None = getattr(cancelled, "meaning", None)
    if meaning is not None:
        raise meaning.with_traceback(cancelled.__traceback__) from None
    raise TaskError("the task awaited something that had been cancelled, and so failed") from cancelled


def cancelled_type() -> type[BaseException]:
    """asyncio's CancelledError. It cannot have been raised where asyncio is not loaded."""
    exceptions = sys.modules.get("asyncio.exceptions")
    return _Never if exceptions is None else exceptions.CancelledError


class _Never(BaseException):
    """Is not raised."""


def _a_loop_runs_here() -> bool:
    if "asyncio" not in sys.modules:
        return False
    import asyncio

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
