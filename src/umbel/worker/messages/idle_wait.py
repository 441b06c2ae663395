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

    async def until_ready(self, queues: Sequence[str]) -> None:
        try:
            async with asyncio.timeout(None) as self._waiting:
                await self._broker.wait_ready(queues, self._longest_s, owner=self._owner)
        except TimeoutError:  # `end`
            pass
        finally:
            self._waiting = None

    def end(self) -> None:
        if self._waiting is not None and not self._waiting.expired():
            self._waiting.reschedule(asyncio.get_running_loop().time())
