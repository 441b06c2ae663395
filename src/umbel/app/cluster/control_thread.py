"""ControlThread: a connection for questions to workers, in a separate thread."""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from umbel.brokers.interface import Broker
from umbel.control.client import Asker
from umbel.errors import BrokerError, BrokerSilent, BrokerUnavailable
from umbel.protocol.pidbox import Answers

T = TypeVar("T")
CLOSE_S = 30.0


class ControlThread:
    """A thread with an event loop on which a broker is open; it dies with its process.

    A forked child must not use it: its app makes another.
    """

    def __init__(self, make_broker: Callable[[], Broker]) -> None:
        self.pid = os.getpid()
        self._make_broker = make_broker
        self._broker: Broker | None = None
        self._opening: asyncio.Task[tuple[Broker, Asker]] | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="umbel-control", daemon=True)
        self._thread.start()

    async def ask(
        self, command: str, arguments: dict[str, Any] | None, *, timeout_s: float, **options: Any
    ) -> Answers:
        began = self._loop.time()
        _, asker = await self.opened(timeout_s)
        left_s = max(0.0, timeout_s - (self._loop.time() - began))
        return await asker.ask(command, arguments, timeout_s=left_s, **options)

    async def opened(self, timeout_s: float) -> tuple[Broker, Asker]:
        """The connection, if it is there within the time. A broker that is silent is tried until then.

        One that refuses is not: that is an answer. An attempt under way continues for the next caller.
        """
        ends = self._loop.time() + timeout_s
        while True:
            if self._opening is None:
                self._opening = self._loop.create_task(self._open())
            opening = self._opening
            await asyncio.wait([opening], timeout=max(0.0, ends - self._loop.time()))
            if not opening.done():
                raise BrokerUnavailable(f"the broker did not answer within {timeout_s:g} s; is it reachable?")
            if opening.exception() is None:
                return opening.result()
            self._opening = None if self._opening is opening else self._opening
            if not isinstance(opening.exception(), BrokerSilent):
                return opening.result()

    async def _open(self) -> tuple[Broker, Asker]:
        broker = self._make_broker()
        try:
            await broker.open()
        except (BrokerError, asyncio.CancelledError):
            await broker.close()
            raise
        self._broker = broker
        return broker, Asker(broker)

    def wait_for(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            if future.done():  # the work's own
                raise
            future.cancel()
            raise BrokerUnavailable(
                f"the broker did not answer within {timeout_s:g} s; is it reachable?"
            ) from None

    def close(self) -> None:
        if self.pid != os.getpid():
            return
        self.wait_for(self._close(), CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)

    async def _close(self) -> None:
        if self._opening is not None and not self._opening.done():
            self._opening.cancel()
            await asyncio.wait([self._opening])
        if self._broker is not None:
            await self._broker.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()
