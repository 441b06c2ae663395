"""Interruptible: a coroutine in which an exception of ours can be raised where it waits.

asyncio can only cancel. So it is cancelled, and gets our exception in place of the plain one. That is a
cancellation and what it means at once: a group or a time-out inside the task then cancels what it holds,
as it would for a plain cancellation, and the task may catch `SoftTimeLimitExceeded`.
"""

import asyncio
from collections.abc import Coroutine, Generator
from functools import cache
from typing import Any


class Interruption(asyncio.CancelledError):
    meaning: Exception


def interruption(meaning: Exception) -> Interruption:
    """A cancellation that is also of this exception's type."""
    kind: Any = type(meaning)
    error: Interruption = _type_of_both(kind)(*meaning.args)
    error.meaning = meaning
    return error


@cache
def _type_of_both(kind: Any) -> Any:
    return type(kind.__name__, (kind, Interruption), {"__module__": kind.__module__})


class Interruptible(Coroutine[Any, Any, Any]):
    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self.coroutine = coroutine
        self._task: asyncio.Task[Any] | None = None  # that runs it
        self._error: Interruption | None = None  # on its way

    @property
    def runs(self) -> bool:
        """Whether its code runs at this moment; if not, it waits, or asyncio is at work."""
        return bool(getattr(self.coroutine, "cr_running", False))

    def interrupt(self, meaning: Exception) -> None:
        if self._task is None:  # it has not begun, and will not
            self._error = interruption(meaning)
        elif not self._task.cancelling():  # else it is being cancelled already
            self._error = interruption(meaning)
            self._task.cancel()

    def send(self, value: Any) -> Any:
        if self._task is None:
            self._task = asyncio.current_task()
            if self._error is not None:
                return self.coroutine.throw(self._error)
        return self.coroutine.send(value)

    def throw(self, error: Any, value: Any = None, traceback: Any = None) -> Any:
        ours, self._error = self._error, None
        if ours is None or self._task is None:
            return self.coroutine.throw(error)
        self._task.uncancel()  # for the task it is an exception, not the end
        return self.coroutine.throw(ours)

    def close(self) -> None:
        self.coroutine.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self.coroutine.__await__()
