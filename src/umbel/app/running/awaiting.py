"""Awaiting: runs a coroutine to its end from code that is not async.

A child has one loop for all its async tasks, so that clients that were made on it (connections, sessions) can
be reused. If tasks run in threads, each thread has its own loop. If a loop already runs in this thread (eager
mode inside async code, an errback in the worker's main process), the coroutine runs on a separate loop in
another thread.

asyncio is imported with the first coroutine. Together with the TLS library that it imports it is a quarter of
a child's memory, and most apps have no async task.
"""

import contextvars
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import TYPE_CHECKING, Any

from umbel.errors import SoftTimeLimitExceeded, TaskCancelled, TaskError

if TYPE_CHECKING:
    from umbel.app.running.own_loop import InterruptibleLoop


class ThreadLoops:
    """One event loop for each thread, made when it is first needed and open until `close`."""

    def __init__(self) -> None:
        self._loops: dict[int, InterruptibleLoop] = {}  # by thread; bounded by the pool's threads

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on this thread's loop; its cancellation by users' code is a TaskError."""
        if _a_loop_runs_here():
            return run_to_end(coroutine)
        here = get_ident()
        loop = self._loops.get(here)
        if loop is None:
            from umbel.app.running.own_loop import InterruptibleLoop

            loop = self._loops[here] = InterruptibleLoop()
        try:
            with cancelled_is_failed():
                return loop.run(coroutine)
        except (SoftTimeLimitExceeded, TaskCancelled):
            # The exception may have left the loop while the coroutine waited. The coroutine is then still
            # pending and would continue during the next task. Closing the loop cancels it.
            self._loops.pop(here).close()
            raise

    def close(self) -> None:
        """Close all loops; none may be running."""
        # A loop cannot be closed in a thread where another one runs.
        if self._loops and _a_loop_runs_here():
            from concurrent.futures import ThreadPoolExecutor

            with ThreadPoolExecutor(1) as thread:
                thread.submit(self._close_all).result()
        else:
            self._close_all()

    def _close_all(self) -> None:
        while self._loops:
            self._loops.popitem()[1].close()


def run_to_end(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine on a separate loop, with the context variables of the caller."""
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
    """A block around code of users, in which a cancellation by that code is a failure of the task.

    CancelledError is no Exception and would end the process that runs the task. Only the task can have caused
    it, because these loops run nothing else.
    """
    try:
        yield
    except cancelled_type() as error:
        raise cancelled_from_within() from error


def cancelled_from_within() -> TaskError:
    """The failure of a task that awaited something that was cancelled."""
    return TaskError("the task awaited something that had been cancelled, and so failed")


def cancelled_type() -> type[BaseException]:
    """asyncio's CancelledError; without asyncio, a class that is never raised."""
    exceptions = sys.modules.get("asyncio.exceptions")
    return _Never if exceptions is None else exceptions.CancelledError


class _Never(BaseException):
    """Is never raised."""


def _a_loop_runs_here() -> bool:
    if "asyncio" not in sys.modules:
        return False
    import asyncio

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
