"""OffLoop: one call that blocks, in a thread that the end of the process does not wait for.

Who waits for it does so for a time, and may wait again: the call is made once. What nobody waits for any
more goes on unheard until it returns.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from umbel.pools.guard import Raised, Returned, call_guarded

R = TypeVar("R")


class OffLoop(Generic[R]):
    """Made on the loop; the call begins at once. Its name is that of the thread."""

    def __init__(self, name: str, function: Callable[[], R]) -> None:
        self._function = function
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[Returned[R] | Raised] = self._loop.create_future()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    async def ended(self, timeout_s: float | None = None) -> Returned[R] | Raised:
        """What became of it; TimeoutError when it has not returned in time."""
        async with asyncio.timeout(timeout_s):
            return await asyncio.shield(self._done)

    def _work(self) -> None:
        happened = call_guarded(self._function)
        with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody is there to hear it
            self._loop.call_soon_threadsafe(self._tell, happened)

    def _tell(self, happened: Returned[R] | Raised) -> None:
        if not self._done.done():
            self._done.set_result(happened)
