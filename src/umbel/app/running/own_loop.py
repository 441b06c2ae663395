"""OwnLoop: an event loop that can be interrupted while no task's code runs.

An exception that is raised in asyncio's code is logged and lost, or breaks the callback of a timer, and a
task waits for ever. So it is kept until the loop next asks what there is to do. There it comes out of
`run`, as a Ctrl-C does, and leaves what was on the loop in good order: closing the loop cancels that.
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


class OwnLoop:
    def __init__(self) -> None:
        self._selector = _Selector()
        self._loop = asyncio.new_event_loop()
        # Another kind of loop, if the app has chosen one, is interrupted wherever it is.
        self._is_ours = type(self._loop) is asyncio.SelectorEventLoop
        if self._is_ours:
            self._loop.close()
            self._loop = asyncio.SelectorEventLoop(self._selector)
        self._runner = asyncio.Runner(loop_factory=lambda: self._loop)
        asyncio.set_event_loop(self._loop)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        on_loops[get_ident()] = self._interrupt
        try:
            return self._runner.run(coroutine, context=contextvars.copy_context())
        finally:
            del on_loops[get_ident()]
            self._selector.raise_error()  # it came when the coroutine had ended

    def close(self) -> None:
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
        """Whether the code of a task runs at this moment, and not asyncio's before or after it."""
        task = asyncio.current_task(self._loop)
        return task is not None and getattr(task.get_coro(), "cr_running", True)


def _wake() -> None:
    pass
