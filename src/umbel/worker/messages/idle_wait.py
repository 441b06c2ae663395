"""IdleWait: waits at the broker until a claim may find something; `end` ends the wait at once.

How long one wait may last is the broker's: as long as it tells of every change itself.
"""

import asyncio
from collections.abc import Sequence

from umbel.brokers.interface import Messages


class IdleWait:
    def __init__(self, broker: Messages, owner: str) -> None:
        self._broker = broker
        self._owner = owner
        self._longest_s = broker.capabilities.idle_wait_s
        self._waiting: asyncio.Timeout | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # that of who waits

    async def until_ready(self, queues: Sequence[str]) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as self._waiting:
                await self._broker.wait_ready(queues, self._longest_s, owner=self._owner)
        except TimeoutError:  # `end`
            pass
        finally:
            self._waiting = None

    def end(self) -> None:
        """From any thread."""
        waiting, loop = self._waiting, self._loop
        if waiting is not None and loop is not None:
            loop.call_soon_threadsafe(self._end, waiting, loop)

    def _end(self, waiting: asyncio.Timeout, loop: asyncio.AbstractEventLoop) -> None:
        if waiting is self._waiting and not waiting.expired():
            waiting.reschedule(loop.time())
