"""Line: a connection for questions to workers, kept by a thread of its own."""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from umbel.brokers.interface import Broker
from umbel.control.client import Asker
from umbel.errors import BrokerError, BrokerUnavailable
from umbel.protocol.pidbox import Answers

T = TypeVar("T")
CLOSE_S = 30.0


class Line:
    """A thread with an event loop on which a broker is open; it dies with its process.

    A forked child must not use it: its app makes another.
    """

    def __init__(self, make_broker: Callable[[], Broker]) -> None:
        self.pid = os.getpid()
        self._make_broker = make_broker
        self._asker: Asker | None = None
        self._broker: Broker | None = None
        self._opening = asyncio.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="umbel-control", daemon=True)
        self._thread.start()

    async def ask(self, command: str, arguments: dict[str, Any] | None, **options: Any) -> Answers:
        _, asker = await self.opened()
        return await asker.ask(command, arguments, **options)

    async def opened(self) -> tuple[Broker, Asker]:
        async with self._opening:
            if self._asker is None or self._broker is None:
                broker = self._make_broker()
                try:
                    await broker.open()
                except BrokerError:
                    await broker.close()
                    raise
                self._broker, self._asker = broker, Asker(broker)
            return self._broker, self._asker

    def wait_for(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            if future.done():  # the work's own
                raise
            future.cancel()
            raise BrokerUnavailable(f"the broker kept a question for over {timeout_s:g} s") from None

    def close(self) -> None:
        if self.pid != os.getpid():
            return
        self.wait_for(self._close(), CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)

    async def _close(self) -> None:
        if self._broker is not None:
            await self._broker.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()
