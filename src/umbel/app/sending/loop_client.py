"""Loop client: sends and reads results on an event loop without blocking it.

A connection, a lock or a future belongs to the loop on which it was made, so each loop has a separate client
(`LoopClient`). The client opens when it is first needed, in the thread of its loop. It is closed by
`app.aclose()` or at the end of its loop: an async generator waits at its `yield` for that end, because every
runner (`asyncio.run`, uvloop, uvicorn, pytest's plugins) finalizes the generators of its loop. The client of
a loop that was closed without that is released when the next client is made.

A closed client stays closed; later callers get another client from the app. Sends under way continue within
their time, and the last of them closes the connection.

A send has `publish_timeout_s` for everything: the result backend, its turn, the connection, the answer. An
attempt that fails before anything was written to the broker is retried until then. After something was
written the outcome is unknown: a broker that remembers message ids gets the messages again; for other brokers
the sender gets `SendUnknown` at once.
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
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from umbel.app.event_feed import EventFeed
from umbel.app.request import Request
from umbel.app.sending.preparation import collected_steps
from umbel.app.sending.publication import Batches, Publication
from umbel.app.sending.signing import read_cluster_id
from umbel.app.waiting import Patience
from umbel.backends.interface import Backend
from umbel.backends.registry import sends_results
from umbel.brokers.interface import BATCH_MAX, AsyncProducer, Attempt
from umbel.brokers.registry import open_async_producer
from umbel.errors import BrokerError, BrokerUnavailable, BufferFull, SendUnknown, TooLarge
from umbel.outbox import open_block
from umbel.wire.message import Outgoing

if TYPE_CHECKING:
    from umbel.app.app import App

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

# ---- how much is sent at once ----------------------------------------------------------------------
#
# `SendTurns` limits the sends that begin in one round of the loop. A thousand sends that begin together would
# block the loop until the last message is made.
#
# `InFlightLimit` limits the messages on their way to the broker. Without it a slow broker would let messages
# pile up in the buffers of a connection. Sends wait here in order of arrival, within their time, and at most
# WAITING_MAX do; past that a send fails at once, which tells the caller to slow down while there is still
# memory.

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
        """Wait for the turn of this send, which may come in a later round of the loop."""
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
    async def room(self, messages: Sequence[Outgoing]) -> AsyncIterator[None]:
        """The block in which these messages are in flight. A single batch may exceed the limit.

        BufferFull: too many sends wait already.
        """
        count, size = len(messages), _size_bytes(messages)
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


def _size_bytes(messages: Sequence[Outgoing]) -> int:
    return sum(len(outgoing.message.body) + len(outgoing.message.headers) for outgoing in messages)


# ---- events of awaited sends -----------------------------------------------------------------------

log = logging.getLogger("umbel.events")
WAITING_MESSAGES_MAX = 10_000
WAITING_BYTES_MAX = 16 * 2**20


class SentEventSender:
    """Sends the events `task-sent` of awaited sends in a thread, with `send`, which blocks.

    The task was sent already, so its sender waits neither for its event nor for earlier events. All waiting
    events are sent in one step. If the broker takes events more slowly than tasks, the events beyond
    WAITING_MESSAGES_MAX or WAITING_BYTES_MAX are dropped, and their number is logged.
    """

    def __init__(self, send: Callable[[Batches], None]) -> None:
        self._send = send
        self._waiting: list[tuple[Sequence[Outgoing], float]] = []
        self._messages = self._bytes = self._dropped = 0
        self._is_closed = False
        self._changing = Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="umbel client events")
        self._sending: Future[None] | None = None

    def add(self, messages: Sequence[Outgoing], at: float) -> None:
        """Queue a batch with the time at which its sending began; dropped when the queue is full."""
        count, size = len(messages), _size_bytes(messages)
        with self._changing:
            fits = self._messages + count <= WAITING_MESSAGES_MAX and self._bytes + size <= WAITING_BYTES_MAX
            if self._is_closed or (self._waiting and not fits):
                self._dropped += count
                return
            self._waiting.append((messages, at))
            self._messages += count
            self._bytes += size
            if self._sending is None or self._sending.done():
                self._sending = self._thread.submit(self._send_all)

    async def close(self, timeout_s: float) -> None:
        """Wait this long for the queue to empty; the rest is dropped."""
        sending = self._sending
        if sending is not None:
            await asyncio.wait([asyncio.wrap_future(sending)], timeout=timeout_s)
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

    def _send_all(self) -> None:
        while True:
            with self._changing:
                batches, (dropped, self._dropped) = self._take(), (self._dropped, 0)
                if not batches:
                    self._sending = None
                    return
            _log_dropped(dropped)
            try:
                self._send(batches)
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


# ---- the client of a loop --------------------------------------------------------------------------

THREADS_MAX = 4
LOG_OUTAGE_EVERY_S = 1.0


class LoopClient:
    """The connections and threads of one event loop. Every method is called on that loop."""

    def __init__(self, app: "App", on_end: "Callable[[LoopClient], None]") -> None:
        self.loop = asyncio.get_running_loop()
        self._on_end = on_end
        self._in_flight = InFlightLimit()
        self.turns = SendTurns()
        self.events = EventFeed(app.broker_settings)
        self.sent = SentEventSender(app.sent_events.send)
        self._app = app
        self._process = os.getpid()
        self._opening = asyncio.Lock()
        self._producer: AsyncProducer | None = None
        self._sending = 0  # sends that use the producer
        self._backend: Backend | None = None
        self._threads = ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="umbel client")
        self._free = asyncio.Semaphore(THREADS_MAX)
        self._guard: AsyncGenerator[None, None] | None = None
        self._log_outage_at = 0.0
        self.is_closed = False

    # -- sending ---------------------------------------------------------------------------------

    async def publish(self, messages: Sequence[Outgoing], request: Request | None, deadline: float) -> bool:
        """Publish messages before the deadline. False: they are buffered until the running task ends."""
        if len(messages) > BATCH_MAX:
            raise TooLarge(
                f"{len(messages)} messages in one batch, over the limit of {BATCH_MAX}; send smaller batches"
            )
        if request is None or request.called_directly:
            left_s = _left_s(deadline)
            await self._send(messages, left_s, min(self._app.settings.publish_timeout_s, left_s))
            return True
        publication = Publication(messages, self._app.settings, request)
        if publication.must_wait():
            return False
        try:
            left_s = _left_s(deadline)
            await self._send(publication.messages, left_s, min(publication.timeout_s, left_s))
        except BrokerUnavailable as error:
            return publication.failed(error)
        return publication.succeeded()

    async def patiently(self, work: Callable[[], Awaitable[T]], deadline: float, what: str) -> T:
        """Retry while the broker is unavailable and time is left; BrokerUnavailable at the deadline."""
        timeout_s = _left_s(deadline)
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

    async def _send(self, messages: Sequence[Outgoing], timeout_s: float, retry_s: float) -> None:
        attempt, patience = Attempt(), Patience(retry_s, self._may_log_outage)
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._in_flight.room(messages),
                self.producer() as producer,
            ):
                while True:
                    try:
                        return await producer.publish(messages, attempt)
                    except BrokerUnavailable as error:
                        if attempt.is_out and not producer.repeats:
                            raise
                        pause_s = patience.pause_s(error)
                    await asyncio.sleep(pause_s)
                    self.check_open()
        except TimeoutError:
            if not attempt.is_out:
                raise BrokerUnavailable(f"the broker could not be reached within {timeout_s:.3g} s") from None
            raise _unknown(messages, f"the broker did not answer within {timeout_s:.3g} s") from None
        except BrokerUnavailable as error:
            if not attempt.is_out:
                raise
            raise _unknown(messages, str(error)) from error

    def _may_log_outage(self) -> bool:
        """Whether an outage may be logged now. Hundreds of sends may fail at once; one a second is enough."""
        now = self.loop.time()
        if now < self._log_outage_at:
            return False
        self._log_outage_at = now + LOG_OUTAGE_EVERY_S
        return True

    async def learn_cluster(self, deadline: float) -> None:
        """Ask the broker once, in a thread, for the id that signatures are bound to."""
        settings = self._app.broker_settings()
        found = await self.patiently(
            lambda: self.in_thread(read_cluster_id, settings), deadline, "cannot read the cluster's id"
        )
        if found is not None:  # otherwise signing raises an error that says what to do
            self._app.signing_cluster.learn(found.id)

    async def on_backend(self, work: Callable[[Backend], object], what: str, deadline: float) -> None:
        """Run work on the result backend in a thread, with retries until the deadline."""
        backend = await self.backend()
        await self.patiently(lambda: self.in_thread(work, backend), deadline, what)

    # -- connections and threads -----------------------------------------------------------------

    @asynccontextmanager
    async def producer(self) -> AsyncIterator[AsyncProducer]:
        """The producer of the loop. In this block it stays open, even if the client is closed meanwhile."""
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
        """Run a blocking call in a thread, at most THREADS_MAX at once.

        If the caller is cancelled, the call still occupies its thread until it returns.
        """
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
        """Load the modules that sending needs, and open the connections."""
        await self._opened()
        await self.backend()

    def check_open(self) -> None:
        """Raise BrokerUnavailable if this client was closed."""
        if self.is_closed:
            raise BrokerUnavailable(
                "the app's client for this event loop was closed; call again for a new one"
            )

    async def close(self) -> None:
        """Close the connections once the sends under way have ended."""
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
        """Whether its loop will not run again: it is closed, or it belongs to the parent of this process."""
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
                    # In a thread, because the import of the broker's modules takes a while.
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


def _left_s(deadline: float) -> float:
    left_s = deadline - monotonic()
    if left_s <= 0:
        raise BrokerUnavailable(
            "nothing was sent: 'publish_timeout_s' ran out first; check the broker, or raise it"
        )
    return left_s


def _unknown(messages: Sequence[Outgoing], why: str) -> SendUnknown:
    return SendUnknown([outgoing.message.correlation_id for outgoing in messages], why)


# ---- the clients of an app -------------------------------------------------------------------------


class Clients:
    """The clients of one app, by event loop."""

    def __init__(self, app: "App") -> None:
        self._app = app
        self._clients: dict[asyncio.AbstractEventLoop, LoopClient] = {}
        self._changing = Lock()

    def here(self) -> LoopClient:
        """The client of the running loop, created when it is first needed."""
        loop = asyncio.get_running_loop()
        found = self._clients.get(loop)
        if found is not None and not found.is_closed:
            return found
        client = LoopClient(self._app, self._forget)
        with self._changing:
            ended = [self._clients.pop(other) for other in list(self._clients) if other.is_closed()]
            self._clients[loop] = client
        for other in ended:
            other.abandon()
        return client

    async def prepare(self, make: Callable[[], T], deadline: float) -> T:
        """Make messages when it is the turn of this send. Steps on the result backend run in a thread."""
        app, settings = self._app, self._app.settings
        if app.eager_backend is not None:
            return make()
        client = self.here()
        await client.turns.take()
        if app.signing_cluster.is_unknown() and open_block(app) is None:
            await client.learn_cluster(deadline)
        if sends_results(settings.backend) and not settings.task_ignore_result:
            await client.on_backend(
                lambda backend: backend.reply_to, "cannot get the address for results", deadline
            )
        with collected_steps() as steps:
            made = make()
        if steps:
            await client.on_backend(
                lambda backend: [step(backend) for step in steps],
                "cannot write to the result backend",
                deadline,
            )
        return made

    async def backend(self) -> Backend:
        """The result backend, ready to be awaited on the running loop."""
        return self._app.eager_backend or await self.here().backend()

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
        """Close all clients. Clients of other threads close when their loops have time for it."""
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
