"""Clients: what an app has open for each event loop that uses it.

A connection, a lock or a future belongs to the loop it was made on, so each loop has its own: opened when
it is first needed, in whatever thread that loop runs. It is closed by `app.aclose()`, or when the loop ends:
an async generator waits at its `yield` for that, because every runner (`asyncio.run`, uvloop, uvicorn,
pytest's plugins) ends those of its loop. A loop that was closed without that is noticed when the next one
comes.

What has no async way (the embedded broker's chords, the files of certificates) runs in a few threads beside
the loop. A call that nobody waits for any more keeps its thread until it ends, and counts until then.

A client that is closed stays closed: who comes after that asks the app for another one. What is being sent
then is sent to its end, within its time, and the last of them closes the connection.
"""

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from threading import Lock
from typing import ParamSpec, Protocol, TypeVar

from umbel.app.aio.event_feed import EventFeed
from umbel.app.aio.gate import Gate, Turns
from umbel.app.aio.sent_teller import SentTeller
from umbel.app.configuration.settings import Settings
from umbel.backends.interface import Backend, Lasting
from umbel.brokers.interface import AsyncProducer, BrokerSettings
from umbel.brokers.registry import open_async_producer
from umbel.errors import BrokerUnavailable
from umbel.wire.message import Outgoing

P = ParamSpec("P")
R = TypeVar("R")
THREADS_MAX = 4
TELL_EVERY_S = 1.0


class ConnectedApp(Protocol):
    """What a loop's client needs of its app."""

    @property
    def settings(self) -> Settings: ...
    def broker_settings(self) -> BrokerSettings: ...
    @property
    def backend(self) -> Backend: ...
    def tell_sent(self, sent: Sequence[tuple[Sequence[Outgoing], float]]) -> None: ...


class LoopClient:
    """The connections and threads of one event loop; every method is called on it."""

    def __init__(self, app: ConnectedApp, on_end: "Callable[[LoopClient], None]") -> None:
        self.loop = asyncio.get_running_loop()
        self._on_end = on_end
        self.gate = Gate()
        self.turns = Turns()
        self.events = EventFeed(app.broker_settings)
        self.sent = SentTeller(app.tell_sent)
        self._app = app
        self._process = os.getpid()
        self._opening = asyncio.Lock()
        self._producer: AsyncProducer | None = None
        self._sending = 0  # those who use the producer
        self._backend: Backend | None = None
        self._kept: Lasting | None = None
        self._threads = ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="umbel client")
        self._free = asyncio.Semaphore(THREADS_MAX)
        self._guard: AsyncGenerator[None, None] | None = None
        self._tell_again_at = 0.0
        self.is_closed = False

    @asynccontextmanager
    async def producer(self) -> AsyncIterator[AsyncProducer]:
        """For the block it stays open, also when the client is closed meanwhile."""
        producer = await self._opened()
        self._sending += 1
        try:
            yield producer
        finally:
            self._sending -= 1
            if self.is_closed and not self._sending:
                await producer.close()

    async def backend(self) -> Backend:
        """The app's result backend, with its connection kept for this loop where it can do that."""
        self.check_open()
        if self._backend is None:
            async with self._opening:
                if self._backend is None:
                    await self._begin()
                    backend = await self.in_thread(lambda: self._app.backend)
                    self.check_open()
                    if isinstance(backend, Lasting):
                        backend.hold_connection()
                        self._kept = backend
                    self._backend = backend
        return self._backend

    async def in_thread(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call what blocks, beside the loop; at most THREADS_MAX at once."""
        await self._free.acquire()
        try:
            self.check_open()
            future = self._threads.submit(function, *args, **kwargs)
        except BaseException:
            self._free.release()
            raise
        future.add_done_callback(self._thread_is_free)
        return await asyncio.wrap_future(future)

    async def load(self) -> None:
        """What sending needs; connections are opened later."""
        await self._opened()
        await self.backend()

    def check_open(self) -> None:
        if self.is_closed:
            raise BrokerUnavailable(
                "the app's client for this event loop was closed; call again for a new one"
            )

    def may_tell_of_outage(self) -> bool:
        """Hundreds of sends may fail at once: one of them a second is logged."""
        now = self.loop.time()
        if now < self._tell_again_at:
            return False
        self._tell_again_at = now + TELL_EVERY_S
        return True

    async def close(self) -> None:
        if self._guard is not None:
            await self._guard.aclose()
        else:
            await self._end()

    def abandon(self) -> None:
        """Its loop is closed, or another process's: let go of what can be let go of without it."""
        self.is_closed = True
        if self._process == os.getpid():
            if self._producer is not None:
                self._producer.abandon()
            if self._kept is not None:
                self._kept.abandon_connection(self.loop)
            self.sent.abandon()
            self._threads.shutdown(wait=False)

    @property
    def is_ended(self) -> bool:
        """Its loop runs nothing any more: it is closed, or of the process that this one was forked from."""
        return self.loop.is_closed() or self._process != os.getpid()

    def _thread_is_free(self, _: "Future[R]") -> None:
        with suppress(RuntimeError):  # the loop has been closed meanwhile
            self.loop.call_soon_threadsafe(self._free.release)

    async def _opened(self) -> AsyncProducer:
        self.check_open()
        if self._producer is None:
            async with self._opening:
                if self._producer is None:
                    await self._begin()
                    # It imports the broker's modules, which takes a while the first time.
                    opened = await self.in_thread(open_async_producer, self._app.broker_settings())
                    if self.is_closed:
                        await opened.close()
                    self.check_open()
                    self._producer = opened
        return self._producer

    async def _begin(self) -> None:
        if self._guard is None:
            self._guard = self._until_the_loop_ends()
            await anext(self._guard)

    async def _until_the_loop_ends(self) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            await self._end()

    async def _end(self) -> None:
        self.is_closed = True
        self._on_end(self)
        producer, self._producer = self._producer, None
        kept, self._kept, self._backend = self._kept, None, None
        await self.events.close()
        await self.sent.close(self._app.settings.connect_timeout_s)
        if kept is not None:
            kept.release_connection()
        if producer is not None and not self._sending:
            await producer.close()
        self._threads.shutdown(wait=False)
        await asyncio.sleep(0)  # a transport closes its socket in the next round of the loop


class Clients:
    """Those of one app, by their loops."""

    def __init__(self, app: ConnectedApp) -> None:
        self._app = app
        self._clients: dict[asyncio.AbstractEventLoop, LoopClient] = {}
        self._changing = Lock()

    def here(self) -> LoopClient:
        """That of the running loop."""
        loop = asyncio.get_running_loop()
        found = self._clients.get(loop)
        if found is not None and not found.is_closed:
            return found
        made = LoopClient(self._app, self._forget)
        with self._changing:
            ended = [one for one in self._clients if one.is_closed()]
            gone = [self._clients.pop(one) for one in ended]
            self._clients[loop] = made
        for client in gone:
            client.abandon()
        return made

    @property
    def are_open(self) -> bool:
        """Whether a loop of this process, which still runs, has one."""
        with self._changing:
            return any(not (one.is_closed or one.is_ended) for one in self._clients.values())

    async def close_here(self) -> None:
        with self._changing:
            client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.close()

    def close(self) -> None:
        """All of them. What runs in another thread closes as soon as its loop comes to it."""
        with self._changing:
            clients, self._clients = self._clients, {}
        for client in clients.values():
            if client.is_closed:
                continue
            if client.is_ended:
                client.abandon()
                continue
            with suppress(RuntimeError):  # closed in this moment
                client.loop.call_soon_threadsafe(_close_soon, client)

    def _forget(self, client: LoopClient) -> None:
        with self._changing:
            if self._clients.get(client.loop) is client:
                del self._clients[client.loop]


_closing: set[asyncio.Task[None]] = set()


def _close_soon(client: LoopClient) -> None:
    task = client.loop.create_task(client.close())
    _closing.add(task)
    task.add_done_callback(_closing.discard)
