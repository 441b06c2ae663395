"""Listener: hears every event and every control command of a cluster, and counts them by kind.

It is one subscriber among the nodes, so that what it hears once was published once.
"""

import asyncio
import threading
from collections import Counter
from types import TracebackType
from typing import Self

from umbel.brokers.interface import BrokerSettings, Subscription
from umbel.brokers.registry import open_broker
from umbel.wire.control import REQUEST_EXCHANGE, decode_request
from umbel.wire.event import EXCHANGE, decode_events


class Listener:
    def __init__(self, url: str) -> None:
        self._settings = BrokerSettings(url)
        self._counted: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._listen()))

    def take(self) -> Counter[str]:
        """What was heard since the last time."""
        with self._lock:
            counted, self._counted = self._counted, Counter()
        return counted

    def seen(self) -> Counter[str]:
        with self._lock:
            return Counter(self._counted)

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._ready.wait(30):
            raise TimeoutError("the listener could not subscribe within 30 s")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._loop.close()

    async def _listen(self) -> None:
        broker = open_broker(self._settings)
        await broker.open()
        try:
            async with (
                broker.subscribe(EXCHANGE, ["#"]) as events,
                broker.subscribe(REQUEST_EXCHANGE, ["listener@bench"]) as commands,
            ):
                self._ready.set()
                counting = (self._count_events(events), self._count_commands(commands))
                tasks = [asyncio.create_task(count) for count in counting]
                await self._stop.wait()
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
        finally:
            await broker.close()

    async def _count_events(self, events: Subscription) -> None:
        async for broadcast in events:
            for event in decode_events(broadcast.body):
                self._note(event["type"])

    async def _count_commands(self, commands: Subscription) -> None:
        async for broadcast in commands:
            self._note(f"command {decode_request(broadcast.headers, broadcast.body).method}")

    def _note(self, kind: str) -> None:
        with self._lock:
            self._counted[kind] += 1
