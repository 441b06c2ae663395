"""Gate: how much an event loop may have on its way to the broker at once; the rest waits for its turn.

Turns: how many sends begin in one round of the loop. Each takes a part of a millisecond to make its message,
so a thousand that are started together would keep everybody else from the loop until the last one is made.

Without it a broker that is slow would let messages pile up in the buffers of a connection. Who waits
here waits in the order of coming, within the time that a send has, and at most so many do: past that a
send fails at once, which tells the caller to slow down while there is still memory.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from umbel.errors import BufferFull
from umbel.wire.message import Outgoing

MESSAGES_MAX = 1000
BYTES_MAX = 16 * 2**20
WAITING_MAX = 10_000
BEGIN_MAX = 32


class Turns:
    def __init__(self, begin_max: int = BEGIN_MAX) -> None:
        self._loop = asyncio.get_running_loop()
        self._begin_max = begin_max
        self._begun = 0  # in this round of the loop
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self) -> None:
        """Return at once, or in a later round."""
        if self._waiting or self._begun >= self._begin_max:
            turn = self._loop.create_future()
            self._waiting.append(turn)
            await turn
            return
        if not self._begun:
            self._loop.call_soon(self._begin_round)
        self._begun += 1

    def _begin_round(self) -> None:
        self._begun = 0
        while self._waiting and self._begun < self._begin_max:
            turn = self._waiting.popleft()
            if not turn.done():  # else its sender was cancelled
                turn.set_result(None)
                self._begun += 1
        if self._begun:
            self._loop.call_soon(self._begin_round)


class Gate:
    def __init__(
        self, *, messages_max: int = MESSAGES_MAX, bytes_max: int = BYTES_MAX, waiting_max: int = WAITING_MAX
    ) -> None:
        self._messages_max, self._bytes_max, self._waiting_max = messages_max, bytes_max, waiting_max
        self._messages = self._bytes = 0
        self._waiting: deque[tuple[asyncio.Future[None], int, int]] = deque()

    @asynccontextmanager
    async def room(self, batch: Sequence[Outgoing]) -> AsyncIterator[None]:
        """The block in which these messages are on their way. One batch alone may exceed the limit."""
        count = len(batch)
        size = sum(len(one.message.body) + len(one.message.headers) for one in batch)
        await self._enter(count, size)
        try:
            yield
        finally:
            self._leave(count, size)

    async def _enter(self, count: int, size: int) -> None:
        if not self._waiting and self._fits(count, size):
            self._add(count, size)
            return
        if len(self._waiting) >= self._waiting_max:
            raise BufferFull(
                f"{self._messages} messages are on their way to the broker and {len(self._waiting)} sends "
                "wait, which is the limit; send fewer at once"
            )
        turn = asyncio.get_running_loop().create_future()
        entry = (turn, count, size)
        self._waiting.append(entry)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # its turn came in the same moment
                self._leave(count, size)
            elif entry in self._waiting:
                self._waiting.remove(entry)
            raise

    def _fits(self, count: int, size: int) -> bool:
        if not self._messages:
            return True
        return self._messages + count <= self._messages_max and self._bytes + size <= self._bytes_max

    def _add(self, count: int, size: int) -> None:
        self._messages += count
        self._bytes += size

    def _leave(self, count: int, size: int) -> None:
        self._add(-count, -size)
        while self._waiting and (self._waiting[0][0].done() or self._fits(*self._waiting[0][1:])):
            turn, count, size = self._waiting.popleft()
            if not turn.done():
                self._add(count, size)
                turn.set_result(None)
