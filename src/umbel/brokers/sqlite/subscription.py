"""SqliteSubscription: one listener's place in the broadcasts, on the event loop.

Holds at most PAGE_MAX broadcasts in memory; the rest waits in the table until it is asked for.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future

from umbel.brokers.interface import Broadcast
from umbel.brokers.sqlite.cluster_store import ClusterStore
from umbel.brokers.sqlite.thread import StoreThread
from umbel.brokers.sqlite.wakeup import AsyncBell
from umbel.wire.control import patterns_on
from umbel.wire.topic import matches

PAGE_MAX = 500


class SqliteSubscription:
    def __init__(
        self,
        thread: StoreThread,
        store: ClusterStore,
        bell: AsyncBell,
        exchange: str,
        patterns: Sequence[str],
        *,
        keep_alive_s: float,
    ) -> None:
        self._thread = thread
        self._store = store
        self._bell = bell
        self._exchange = exchange
        self._patterns = [pattern.split(".") for pattern in patterns_on(exchange, patterns)]
        self._keep_alive_s = keep_alive_s
        self._number = 0
        self._offset = 0
        self._replacements = 0
        self._timer: asyncio.TimerHandle | None = None
        self._told: Future[object] | None = None

    async def enter(self) -> None:
        await self._subscribe()
        self._timer = asyncio.get_running_loop().call_later(self._keep_alive_s, self._keep_alive)

    async def _subscribe(self) -> None:
        self._number, self._offset, self._replacements = await self._thread.call_or(
            lambda entered: self._store.unsubscribe(entered[0]),
            self._store.subscribe,
            self._exchange,
            self._bell.address,
        )

    async def leave(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._thread.call(self._store.unsubscribe, self._number)

    def _keep_alive(self) -> None:
        """Tell the store that somebody still listens, also while the listener is busy."""
        if self._told is None or self._told.done():
            self._told = self._thread.post(
                self._store.prolong, self._number, self._exchange, self._bell.address, self._replacements
            )
        self._timer = asyncio.get_running_loop().call_later(self._keep_alive_s, self._keep_alive)

    async def __aiter__(self) -> AsyncIterator[Broadcast]:
        while True:
            rings = self._bell.rings
            page, self._offset = await self._thread.call(
                self._store.heard_since, self._exchange, self._offset, PAGE_MAX
            )
            if self._store.replacements != self._replacements:  # the offset was that of another file
                await self._subscribe()
                continue
            for broadcast in page:
                words = broadcast.routing_key.split(".")
                if any(matches(pattern, words) for pattern in self._patterns):
                    yield broadcast
            if not page:
                await self._bell.wait(rings, math.inf)
