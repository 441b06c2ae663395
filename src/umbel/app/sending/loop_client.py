"""Loop client: the broker and result backend connections that one event loop uses, and sending on them
without blocking it: which sends begin now (`SendTurns`, `InFlightLimit`), how a batch is published, and
its `task-sent` events.
"""

import asyncio
import logging
import os
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from threading import Lock
from time import monotonic
from typing import ParamSpec, Protocol, TypeVar

from umbel.app.event_feed import EventFeed
from umbel.app.request import Request
from umbel.app.sending.publication import Publication
from umbel.app.settings import Settings
from umbel.app.waiting import Patience
from umbel.backends.interface import Backend
from umbel.brokers.interface import BATCH_MAX, AsyncProducer, Attempt, BrokerSettings
from umbel.brokers.registry import open_async_producer
from umbel.errors import BrokerError, BrokerUnavailable, BufferFull, SendUnknown, TooLarge
from umbel.wire.message import Outgoing

# ---- gate and turns --------------------------------------------------------------------------------
#
# How many messages an event loop has in flight to the broker, and how many sends begin at once.
#
# `Turns` limits the sends that begin in one round of the loop. Each takes a part of a millisecond to make
# its message, so a thousand that are started together would block the loop until the last one is made.
#
# `Gate` limits messages in flight. Without it a slow broker would let messages pile up in the buffers of a
# connection. Sends wait here in order of arrival, within their time, and at most WAITING_MAX do: past that
# a send fails at once, which tells the caller to slow down while there is still memory.

MESSAGES_MAX = 1000
BYTES_MAX = 16 * 2**20
WAITING_MAX = 10_000
BEGIN_MAX = 32


class SendTurns:
    """Lets at most `begin_max` sends begin in one round of the event loop."""

    def __init__(self, begin_max: int = BEGIN_MAX) -> None:
        self._loop = asyncio.get_running_loop()
        self._begin_max = begin_max
        self._begun = 0  # in this round of the loop
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self) -> None:
        """Wait for this send's turn: no time, or until a later round of the loop."""
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


class InFlightLimit:
    """Limits the messages and bytes that are on their way to the broker."""

    def __init__(
        self, *, messages_max: int = MESSAGES_MAX, bytes_max: int = BYTES_MAX, waiting_max: int = WAITING_MAX
    ) -> None:
        self._messages_max, self._bytes_max, self._waiting_max = messages_max, bytes_max, waiting_max
        self._messages = self._bytes = 0
        self._waiting: deque[tuple[asyncio.Future[None], int, int]] = deque()

    @asynccontextmanager
    async def room(self, batch: Sequence[Outgoing]) -> AsyncIterator[None]:
        """The block in which these messages are in flight. One batch alone may exceed the limit.

        BufferFull: too many sends wait already.
        """
        count = len(batch)
        size = sum(len(outgoing.message.body) + len(outgoing.message.headers) for outgoing in batch)
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


# ---- sent teller -----------------------------------------------------------------------------------
#
# Sends the events of awaited sends (`task_send_sent_event`) in a thread, after them.
#
# The task is sent already, so its sender does not wait for this, nor for earlier events: what has gathered
# meanwhile is sent in one step. When more waits than WAITING_MESSAGES_MAX or WAITING_BYTES_MAX, because the
# broker takes events more slowly than tasks, the events of further sends are dropped, and their number is
# logged.
#
# The thread outlives the loop: events that wait then are sent, if that succeeds in time.

log = logging.getLogger("umbel.events")
WAITING_MESSAGES_MAX = 10_000
WAITING_BYTES_MAX = 16 * 2**20


class SentEventSender:
    """A queue of batches whose events a thread sends with `tell`, which blocks."""

    def __init__(self, tell: "Callable[[Sequence[tuple[Sequence[Outgoing], float]]], None]") -> None:
        self._tell = tell
        self._waiting: list[tuple[Sequence[Outgoing], float]] = []
        self._messages = self._bytes = self._dropped = 0
        self._is_closed = False
        self._changing = Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="umbel client events")
        self._telling: Future[None] | None = None

    def add(self, batch: Sequence[Outgoing], at: float) -> None:
        """Queue a batch with the time at which its sending began; dropped when the queue is full."""
        size = sum(len(outgoing.message.body) + len(outgoing.message.headers) for outgoing in batch)
        with self._changing:
            fits = (
                self._messages + len(batch) <= WAITING_MESSAGES_MAX
                and self._bytes + size <= WAITING_BYTES_MAX
            )
            if self._is_closed or (self._waiting and not fits):
                self._dropped += len(batch)
                return
            self._waiting.append((batch, at))
            self._messages += len(batch)
            self._bytes += size
            if self._telling is None or self._telling.done():
                self._telling = self._thread.submit(self._tell_all)

    async def close(self, timeout_s: float) -> None:
        """Wait this long for the queue to empty; the rest is dropped."""
        telling = self._telling
        if telling is not None:
            await asyncio.wait([asyncio.wrap_future(telling)], timeout=timeout_s)
        self.abandon()

    def abandon(self) -> None:
        """Drop the queue, log how much was dropped, and let the thread end."""
        with self._changing:
            self._is_closed = True
            self._dropped += self._messages
            self._take()
            dropped, self._dropped = self._dropped, 0
        _log_dropped(dropped)
        self._thread.shutdown(wait=False)

    def _tell_all(self) -> None:
        while True:
            with self._changing:
                batches, (dropped, self._dropped) = self._take(), (self._dropped, 0)
                if not batches:
                    self._telling = None
                    return
            _log_dropped(dropped)
            try:
                self._tell(batches)
            except BrokerError as error:  # the broker cannot be opened
                log.warning(
                    "tasks sent, but their task-sent events could not be sent", extra={"why": str(error)}
                )

    def _take(self) -> list[tuple[Sequence[Outgoing], float]]:
        taken, self._waiting = self._waiting, []
        self._messages = self._bytes = 0
        return taken


def _log_dropped(count: int) -> None:
    if count:
        log.warning("too many task-sent events are waiting; some were dropped", extra={"count": count})


# ---- clients ---------------------------------------------------------------------------------------
#
# The connections that an app has open for each event loop.
#
# A connection, a lock or a future belongs to the loop it was made on, so each loop has its own client:
# opened when it is first needed, in whatever thread that loop runs. It is closed by `app.aclose()`, or when
# the loop ends: an async generator waits at its `yield` for that, because every runner (`asyncio.run`,
# uvloop, uvicorn, pytest's plugins) finalizes the generators of its loop. A loop that was closed without
# that is noticed when the next client is made.
#
# Blocking work (the embedded broker's chords, certificate files) runs in a few threads. A call whose caller
# was cancelled occupies its thread until it ends.
#
# A closed client stays closed: later callers get another one from the app. Sends that are under way
# continue within their time, and the last of them closes the connection.

P = ParamSpec("P")
R = TypeVar("R")
THREADS_MAX = 4
TELL_EVERY_S = 1.0


class ConnectedApp(Protocol):
    """What a loop's client needs of its app."""

    @property
    def settings(self) -> Settings:
        """The app's settings, read for timeouts."""

    def broker_settings(self) -> BrokerSettings:
        """The settings with which the broker is opened."""

    @property
    def backend(self) -> Backend:
        """The result backend, shared by all loops."""

    def tell_sent(self, sent: Sequence[tuple[Sequence[Outgoing], float]]) -> None:
        """Send the events `task-sent` for batches, each with the time at which its sending began."""


class LoopClient:
    """The connections and threads of one event loop; every method is called on it."""

    def __init__(self, app: ConnectedApp, on_end: "Callable[[LoopClient], None]") -> None:
        self.loop = asyncio.get_running_loop()
        self._on_end = on_end
        self.gate = InFlightLimit()
        self.turns = SendTurns()
        self.events = EventFeed(app.broker_settings)
        self.sent = SentEventSender(app.tell_sent)
        self._app = app
        self._process = os.getpid()
        self._opening = asyncio.Lock()
        self._producer: AsyncProducer | None = None
        self._sending = 0  # sends that use the producer
        self._backend: Backend | None = None
        self._threads = ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="umbel client")
        self._free = asyncio.Semaphore(THREADS_MAX)
        self._guard: AsyncGenerator[None, None] | None = None
        self._tell_again_at = 0.0
        self.is_closed = False

    @asynccontextmanager
    async def producer(self) -> AsyncIterator[AsyncProducer]:
        """The loop's producer; inside the block it stays open, even if the client is closed meanwhile."""
        producer = await self._opened()
        self._sending += 1
        try:
            yield producer
        finally:
            self._sending -= 1
            if self.is_closed and not self._sending:
                await producer.close()

    async def backend(self) -> Backend:
        """The app's result backend, with a lasting connection for this loop where it supports that."""
        self.check_open()
        if self._backend is None:
            async with self._opening:
                if self._backend is None:
                    await self._begin()
                    backend = await self.in_thread(lambda: self._app.backend)
                    self.check_open()
                    backend.hold_connection()
                    self._backend = backend
        return self._backend

    async def in_thread(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a blocking call in a thread; at most THREADS_MAX at once."""
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
        """Load the modules that sending needs; connections are opened later."""
        await self._opened()
        await self.backend()

    def check_open(self) -> None:
        """Raise BrokerUnavailable if this client was closed."""
        if self.is_closed:
            raise BrokerUnavailable(
                "the app's client for this event loop was closed; call again for a new one"
            )

    def may_tell_of_outage(self) -> bool:
        """Whether an outage may be logged now: hundreds of sends may fail at once, one a second is logged."""
        now = self.loop.time()
        if now < self._tell_again_at:
            return False
        self._tell_again_at = now + TELL_EVERY_S
        return True

    async def close(self) -> None:
        """Close the connections, once the sends under way have ended."""
        if self._guard is not None:
            await self._guard.aclose()
        else:
            await self._end()

    def abandon(self) -> None:
        """Release what can be released without the loop, which is closed or belongs to another process."""
        self.is_closed = True
        if self._process == os.getpid():
            if self._producer is not None:
                self._producer.abandon()
            if self._backend is not None:
                self._backend.abandon_connection(self.loop)
            self.sent.abandon()
            self._threads.shutdown(wait=False)

    @property
    def is_ended(self) -> bool:
        """Whether its loop runs no more: it is closed, or belongs to the process that this one was forked
        from.
        """
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
        backend, self._backend = self._backend, None
        await self.events.close()
        await self.sent.close(self._app.settings.connect_timeout_s)
        if backend is not None:
            backend.release_connection()
        if producer is not None and not self._sending:
            await producer.close()
        self._threads.shutdown(wait=False)
        await asyncio.sleep(0)  # a transport closes its socket in the next round of the loop


class Clients:
    """The clients of one app, by event loop."""

    def __init__(self, app: ConnectedApp) -> None:
        self._app = app
        self._clients: dict[asyncio.AbstractEventLoop, LoopClient] = {}
        self._changing = Lock()

    def here(self) -> LoopClient:
        """The client of the running loop; made when it is first needed."""
        loop = asyncio.get_running_loop()
        found = self._clients.get(loop)
        if found is not None and not found.is_closed:
            return found
        made = LoopClient(self._app, self._forget)
        with self._changing:
            ended = [other for other in self._clients if other.is_closed()]
            gone = [self._clients.pop(other) for other in ended]
            self._clients[loop] = made
        for client in gone:
            client.abandon()
        return made

    @property
    def are_open(self) -> bool:
        """Whether a running loop of this process has an open client."""
        with self._changing:
            return any(not (client.is_closed or client.is_ended) for client in self._clients.values())

    async def close_here(self) -> None:
        """Close the client of the running loop."""
        with self._changing:
            client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.close()

    def close(self) -> None:
        """Close all clients. Those of other threads close as soon as their loops get to it."""
        with self._changing:
            clients, self._clients = self._clients, {}
        for client in clients.values():
            if client.is_closed:
                continue
            if client.is_ended:
                client.abandon()
                continue
            with suppress(RuntimeError):  # the loop was closed at this moment
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


# ---- publishing without blocking -------------------------------------------------------------------
#
# The decisions of `Publication`, awaited.
#
# A send has `publish_timeout_s` for all of it: the result backend, its turn, the connection, the answer.
# What fails before anything was written to the broker is retried until then. After that the outcome is
# unknown: a broker that remembers what it was sent gets it again; elsewhere the sender gets `SendUnknown`
# at once.

T = TypeVar("T")


async def publish(
    client: LoopClient, batch: Sequence[Outgoing], settings: Settings, request: Request | None, ends: float
) -> bool:
    """Publish a batch before the deadline. Returns False if it is buffered until the running task ends."""
    if len(batch) > BATCH_MAX:
        raise TooLarge(
            f"{len(batch)} messages in one batch, over the limit of {BATCH_MAX}; send smaller batches"
        )
    publication = Publication(batch, settings, request)
    if publication.must_wait():
        return False
    try:
        left_s = _left_s(ends)
        await _send(client, publication.messages, left_s, patience_s=min(publication.timeout_s, left_s))
    except BrokerUnavailable as error:
        return publication.failed(error)
    return publication.succeeded()


async def patiently(work: Callable[[], Awaitable[T]], ends: float, what: str) -> T:
    """Retry while the broker is unavailable and time is left; BrokerUnavailable at the deadline."""
    timeout_s = _left_s(ends)
    patience = Patience(timeout_s)
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    return await work()
                except BrokerUnavailable as error:
                    pause_s = patience.pause_s(error)
                await asyncio.sleep(pause_s)
    except TimeoutError:
        raise BrokerUnavailable(
            f"{what}: the server did not answer within {timeout_s:.3g} s; check it, or raise "
            "'publish_timeout_s'"
        ) from None


def _left_s(ends: float) -> float:
    left_s = ends - monotonic()
    if left_s <= 0:
        raise BrokerUnavailable(
            "nothing was sent: 'publish_timeout_s' ran out first; check the broker, or raise it"
        )
    return left_s


async def _send(
    client: LoopClient, batch: Sequence[Outgoing], timeout_s: float, *, patience_s: float
) -> None:
    attempt, patience = Attempt(), Patience(patience_s, client.may_tell_of_outage)
    try:
        async with asyncio.timeout(timeout_s), client.gate.room(batch), client.producer() as producer:
            while True:
                try:
                    return await producer.publish(batch, attempt)
                except BrokerUnavailable as error:
                    if attempt.is_out and not producer.repeats:
                        raise
                    pause_s = patience.pause_s(error)
                await asyncio.sleep(pause_s)
                client.check_open()
    except TimeoutError:
        if not attempt.is_out:
            raise BrokerUnavailable(f"the broker could not be reached within {timeout_s:.3g} s") from None
        raise _unknown(batch, f"the broker did not answer within {timeout_s:.3g} s") from None
    except BrokerUnavailable as error:
        if not attempt.is_out:
            raise
        raise _unknown(batch, str(error)) from error


def _unknown(batch: Sequence[Outgoing], why: str) -> SendUnknown:
    return SendUnknown([outgoing.message.correlation_id for outgoing in batch], why)
