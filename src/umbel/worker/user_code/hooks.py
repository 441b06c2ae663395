"""Hooks: calls what users wrote for a worker's own life: `worker_init`, `worker_ready`, `worker_shutdown`.

What happens in between is told by `notices.py`.

Each call runs in a new daemon thread, which does not keep the process from ending. The worker waits for
it up to a time, and no longer than until somebody asks it to stop (once more): users' code cannot
make a worker deaf to signals. What then still runs goes on until the process ends.
"""

import asyncio
import logging
import threading
from collections.abc import Callable

import msgspec

from umbel.pools.guard import Raised, call_guarded

log = logging.getLogger("umbel.worker.hooks")
SLOW_S = 1.0  # a hook that takes longer is mentioned


Hook = Callable[[], None]


def _nothing() -> None:
    return None


class LifeHooks(msgspec.Struct, frozen=True):
    """What is called before a worker connects, when it takes tasks, and when it was asked to stop.

    `worker_init` of an app whose children are forked belongs into the process that forks them: see
    `pools.interface.PreparedHost`.
    """

    init: Hook = _nothing
    ready: Hook = _nothing
    shutdown: Hook = _nothing
    timeout_s: float = 10.0  # for each


class HookRun:
    """One call that has begun. Made on the loop; `ended` is awaited at most once."""

    def __init__(self, name: str, hook: Hook, *, timeout_s: float) -> None:
        self._name = name
        self._hook = hook
        self._loop = asyncio.get_running_loop()
        self._began_at = self._loop.time()
        self._deadline = self._began_at + timeout_s
        self._returned = False
        self._over = asyncio.Event()
        threading.Thread(target=self._work, name=f"umbel-{name}", daemon=True).start()

    def let_go(self) -> None:
        """Do not wait for it any longer."""
        self._over.set()

    async def ended(self) -> None:
        why = "interrupted by a signal"
        try:
            async with asyncio.timeout_at(self._deadline):
                await self._over.wait()
        except TimeoutError:
            why = "exceeded worker_hook_timeout_s"
        waited_s = round(self._loop.time() - self._began_at, 1)
        fields = {"hook": self._name, "waited_s": waited_s}
        if not self._returned:
            log.error("hook timed out; worker continues without it", extra={**fields, "why": why})
        elif waited_s > SLOW_S:
            log.warning("hook was slow", extra=fields)

    def _work(self) -> None:
        happened = call_guarded(self._hook)
        if isinstance(happened, Raised):
            log.error("hook raised an exception", extra={"hook": self._name}, exc_info=happened.error)
        call_guarded(self._loop.call_soon_threadsafe, self._note_return)  # the loop may have ended

    def _note_return(self) -> None:
        self._returned = True
        self._over.set()
