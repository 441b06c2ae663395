"""InterruptibleLoop: an event loop that can be interrupted while no task's code runs.

An exception that is raised inside asyncio's own code is logged and lost, or breaks the callback of a timer,
and a task waits for ever. So the exception is stored until the loop next selects. There it leaves `run`, like
a Ctrl-C, and the loop stays consistent: closing it cancels what was running.
"""

import asyncio
import contextvars
from collections.abc import Coroutine
from contextlib import suppress
from selectors import DefaultSelector, SelectorKey
from threading import get_ident
from typing import Any

from umbel.pools.guard import on_loops


class _Selector(DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self.error: Exception | None = None

    def select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        self.raise_error()
        return super().select(timeout)

    def raise_error(self) -> None:
        error, self.error = self.error, None
        if error is not None:
            raise error


class InterruptibleLoop:
    """An event loop of a child for its async tasks, which time limits and cancellations can interrupt."""

    def __init__(self) -> None:
        self._selector = _Selector()
        self._loop = asyncio.new_event_loop()
        # A loop of another kind, which the app has chosen, can be interrupted anywhere.
        self._is_ours = type(self._loop) is asyncio.SelectorEventLoop
        if self._is_ours:
            self._loop.close()
            self._loop = asyncio.SelectorEventLoop(self._selector)
        self._runner = asyncio.Runner(loop_factory=lambda: self._loop)
        asyncio.set_event_loop(self._loop)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine to its end, in a copy of the caller's context."""
        on_loops[get_ident()] = self._interrupt
        try:
            return self._runner.run(coroutine, context=contextvars.copy_context())
        finally:
            del on_loops[get_ident()]
            self._selector.raise_error()  # the interruption may have come after the coroutine ended

    def close(self) -> None:
        """Cancel what still runs on the loop, and close it."""
        self._runner.close()
        asyncio.set_event_loop(None)

    def _interrupt(self, error: Exception) -> bool:
        if not self._is_ours or self._runs_code():
            return False
        self._selector.error = error
        with suppress(RuntimeError):  # it was closed meanwhile
            self._loop.call_soon_threadsafe(_wake)
        return True

    def _runs_code(self) -> bool:
        """Whether code of a task runs at this moment, and not the code of asyncio around it."""
        task = asyncio.current_task(self._loop)
        return task is not None and getattr(task.get_coro(), "cr_running", True)


def _wake() -> None:
    pass
