"""AfterSettling: work that must come after a message is settled, as data for who knows what it means.

A chord's part that was counted elsewhere than in the broker is marked as done here, for example. The work
blocks, so it is done off the loop, in the order of the settles, many at a time. What fails is tried again,
ATTEMPTS_MAX times, and then dropped with an error in the log. A worker that dies leaves it undone:
what is done here must be of the kind that may be missing.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from umbel.chance import random
from umbel.pools.guard import Raised
from umbel.pools.off_loop import OffLoop
from umbel.protocol.retry import reconnect_wait_s

log = logging.getLogger("umbel.worker.settling")
ATTEMPTS_MAX = 5
TIMEOUT_S = 30.0  # for one attempt
BATCH_MAX = 500

AfterSettle = Callable[[Sequence[bytes]], None]


class AfterSettling:
    """What waits counts as unsettled, so a worker that cannot keep up takes nothing new."""

    def __init__(self, do: AfterSettle | None) -> None:
        self._do = do
        self.waiting: list[bytes] = []
        self._gathered = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def add(self, work: Sequence[bytes]) -> None:
        if work and self._do is not None:
            self.waiting += work
            self._idle.clear()
            self._gathered.set()

    async def drained(self) -> None:
        await self._idle.wait()

    async def run(self) -> None:
        while self._do is not None:
            await self._gathered.wait()
            self._gathered.clear()
            while batch := tuple(self.waiting[:BATCH_MAX]):
                await self._attempt(self._do, batch)
                del self.waiting[: len(batch)]
            self._idle.set()

    async def _attempt(self, do: AfterSettle, batch: Sequence[bytes]) -> None:
        attempts = 1
        while (error := await _done(do, batch)) is not None and attempts < ATTEMPTS_MAX:
            await asyncio.sleep(reconnect_wait_s(attempts, random()))
            attempts += 1
        if error is None:
            return
        fields = {"count": len(batch), "attempts": ATTEMPTS_MAX}
        log.error(
            "chords of finished tasks cannot be updated in the result backend; giving up",
            extra=fields,
            exc_info=error,
        )


async def _done(do: AfterSettle, batch: Sequence[bytes]) -> BaseException | None:
    try:
        happened = await OffLoop("umbel-after", lambda: do(batch)).ended(TIMEOUT_S)
    except TimeoutError as error:
        return error
    return happened.error if isinstance(happened, Raised) else None
