"""Link: one connection to RabbitMQ on the event loop, and its channels.

A link is opened once: when the connection or a channel ends, everything that waits on it fails with the
reason, and the caller opens a new link. Nothing is sent twice without the caller's knowledge.

The server refuses a request by closing the channel; `channel_refusal` interprets that. Both sides send
heartbeats: a link that receives nothing for two of them is dead, whatever the network reports. An overdue
confirmation does not end a link whose server answers other requests: the messages written on it are confirmed
later, and would arrive twice if they were sent on another link meanwhile.

The link owns the bytes and the channels. Which messages the server has answered for is kept by `confirms.py`;
the content of messages belongs to `publishing.py`.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import TYPE_CHECKING, Any, cast

from umbel.brokers.amqp.confirms import AllSent, Batch, Unconfirmed
from umbel.brokers.amqp.frames import (
    HEARTBEAT_FRAME,
    PROTOCOL_HEADER,
    BadFrames,
    FrameReader,
    Incoming,
    Method,
    encode_method,
)
from umbel.brokers.amqp.handshake import (
    REPLY_TIMEOUT_S,
    ChannelClosed,
    Handshake,
    Location,
    blocked_by,
    channel_refusal,
    confirm_timeout_s,
    connection_refusal,
    unconfirmed,
    unreachable,
)
from umbel.errors import BrokerError, BrokerUnavailable

if TYPE_CHECKING:
    from umbel.brokers.amqp.topology import Call

READ_BYTES = 64 * 1024
PROBE_S = 5.0  # how long a server that does not confirm in time has to answer another request
BATCHES_MAX = 10_000  # unconfirmed on a channel: beyond that the link ends
_DELIVER, _ACK, _NACK = int(Method.BASIC_DELIVER), int(Method.BASIC_ACK), int(Method.BASIC_NACK)


class Link(asyncio.BufferedProtocol):
    """One connection; `open_link` creates it."""

    def __init__(self, location: Location, handshake: Handshake) -> None:
        self.location = location
        self.error: BrokerError | None = None
        self.blocked = ""  # why the server accepts no messages now, in its words
        self.ended = asyncio.Event()
        self.on_end: Callable[[BrokerError], None] = _drop
        self._handshake = handshake
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._reader = FrameReader()
        # With a plain Protocol asyncio allocates a quarter of a megabyte for each read.
        self._received = memoryview(bytearray(READ_BYTES))
        self._transport: asyncio.Transport | None = None
        self._unwritten: list[bytes] = []
        self._channels: dict[int, Channel] = {}
        self._numbers = count(1)
        self._free: deque[int] = deque()
        self._has_received = self._has_sent = False
        self._silent_beats = 0
        self._beat: asyncio.TimerHandle | None = None

    @property
    def heartbeat_s(self) -> int:
        """The agreed heartbeat: the server closes a link after two to three of them without data from us."""
        return self._handshake.heartbeat_s

    async def opened(self) -> None:
        """Wait until the handshake is over; raise the error that ended it."""
        await self._opened

    async def channel(self, *, confirms: bool = False) -> "Channel":
        """Open a new channel; with `confirms`, one to publish on. Raises at once if the server is blocked,
        since it reads nothing.
        """
        if self.blocked:
            raise blocked_by(self.location, self.blocked)
        number = self._free.popleft() if self._free else next(self._numbers)
        channel = self._channels[number] = Channel(self, number)
        try:
            await channel.call(Method.CHANNEL_OPEN, "")
            if confirms:
                await channel.call(Method.CONFIRM_SELECT, False)
        except asyncio.CancelledError:
            channel.close_later()
            raise
        return channel

    @asynccontextmanager
    async def temporary_channel(self) -> AsyncIterator["Channel"]:
        """Open a channel for one piece of work, and close it, also when the work fails or is cancelled.

        Messages that the channel has and that were not acknowledged go back to their queue.
        """
        channel = await self.channel()
        try:
            yield channel
        except BaseException:
            channel.close_later()
            raise
        await channel.close()

    async def run(self, *calls: "Call") -> list[Incoming]:
        """Make these calls on a new channel, close it, and return the answers."""
        async with self.temporary_channel() as channel:
            asked = [channel.ask(method, *fields) for method, fields in calls]
            return [await channel.answer(future) for future in asked]

    def send(self, data: bytes) -> None:
        """Write at the end of this turn of the event loop; raise the error that ended the link."""
        if self.error is not None:
            raise self.error
        self._has_sent = True
        if not self._unwritten:
            asyncio.get_running_loop().call_soon(self._write)
        self._unwritten.append(data)

    def discard(self, channel: "Channel") -> None:
        """Free the number of a channel that both sides have closed."""
        if self._channels.pop(channel.number, None) is not None:
            self._free.append(channel.number)

    async def close(self) -> None:
        """Close the connection, waiting at most a second for the server's answer."""
        if self.error is None:
            self.send(encode_method(0, Method.CONNECTION_CLOSE, 200, "bye", 0, 0))
            try:
                async with asyncio.timeout(1.0):
                    await self.ended.wait()
            except TimeoutError:
                pass
        self.abort("this process closed it, at shutdown or by close()")

    def abort(self, why: str) -> None:
        """End the connection at once; everything that waits on it fails with this reason."""
        self.end(BrokerUnavailable(f"the connection to RabbitMQ at {self.location} was closed: {why}"))

    def end(self, error: BrokerError) -> None:
        """End the connection at once; everything that waits on it fails with this error."""
        self._fail(error)
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio.BufferedProtocol ----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the handshake."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports are no subclass
        self._transport.write(PROTOCOL_HEADER)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the one buffer that all reads use."""
        return self._received

    def buffer_updated(self, nbytes: int) -> None:
        """Cut the received bytes into methods, and pass each to its channel."""
        self._has_received = True
        try:
            incoming = self._reader.feed(bytes(self._received[:nbytes]))
            channels = self._channels
            for method in incoming:
                if not method.channel:
                    self._receive(method)
                elif (channel := channels.get(method.channel)) is not None:
                    channel.receive(method)
        except BadFrames as error:
            self.abort(str(error))
        except BrokerUnavailable as error:
            self._fail(error)
            assert self._transport is not None
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail everything that waits, with the reason for which the connection ended."""
        if not self._opened.done():
            self._fail(unreachable(self.location, exc or ConnectionResetError()))
        why = str(exc) if exc is not None else "the server closed it"
        self._fail(BrokerUnavailable(f"the connection to RabbitMQ at {self.location} was lost: {why}"))

    # -- the connection itself -------------------------------------------------------------------

    def _receive(self, incoming: Incoming) -> None:
        assert self._transport is not None
        if not self._handshake.is_done():
            self._transport.write(self._handshake.step(incoming))
            if not self._opened.done() and self._handshake.is_done():
                self._opened.set_result(None)
                self._schedule_beat()
            return
        match incoming.method:
            case Method.CONNECTION_CLOSE:
                code, text, _, _ = incoming.fields
                self._transport.write(encode_method(0, Method.CONNECTION_CLOSE_OK))
                raise connection_refusal(self.location, code, text)
            case Method.CONNECTION_CLOSE_OK:
                self.ended.set()
            case Method.CONNECTION_BLOCKED:
                self.blocked = incoming.fields[0] or "a resource alarm"
            case Method.CONNECTION_UNBLOCKED:
                self.blocked = ""

    def _write(self) -> None:
        """Write everything that was sent in one turn of the loop in one piece: the server confirms it with
        one flush.
        """
        unwritten, self._unwritten = self._unwritten, []
        if self.error is None and self._transport is not None:
            self._transport.write(b"".join(unwritten))

    def _schedule_beat(self) -> None:
        if self._handshake.heartbeat_s:
            loop = asyncio.get_running_loop()
            self._beat = loop.call_later(self._handshake.heartbeat_s / 2, self._on_beat)

    def _on_beat(self) -> None:
        """Twice per heartbeat: send one unless something was sent; count the silence of the server."""
        self._silent_beats = 0 if self._has_received else self._silent_beats + 1
        if self._silent_beats >= 4:
            self.abort(f"no data received for {2 * self._handshake.heartbeat_s} s (two heartbeats missed)")
            return
        if not self._has_sent and self._transport is not None:
            self._transport.write(HEARTBEAT_FRAME)
        self._has_received = self._has_sent = False
        self._schedule_beat()

    def _fail(self, error: BrokerError) -> None:
        if self.error is not None:
            return
        self.error = error
        if self._beat is not None:
            self._beat.cancel()
        if not self._opened.done():
            self._opened.set_exception(error)
            self._opened.exception()  # retrieved, or asyncio logs it if the caller was cancelled
        for channel in list(self._channels.values()):
            channel.fail(error)
        self._channels.clear()
        self.ended.set()
        self.on_end(error)


class Channel:
    """One conversation on a link. Calls are answered in the order in which they were made."""

    def __init__(self, link: Link, number: int) -> None:
        self.link = link
        self.number = number
        self.error: BrokerError | None = None
        self.on_delivery: Callable[[Incoming], None] = _drop
        self.on_end: Callable[[BrokerError], None] = _drop
        self._calls: deque[asyncio.Future[Incoming]] = deque()
        self._unconfirmed = Unconfirmed()

    async def call(self, method: Method, *fields: Any) -> Incoming:
        """Send a call and return the server's answer; an overdue answer ends the link."""
        return await self.answer(self.ask(method, *fields))

    def ask(self, method: Method, *fields: Any) -> asyncio.Future[Incoming]:
        """Send a call; its answer comes later, after the answers of earlier calls."""
        self.send(encode_method(self.number, method, *fields))
        future: asyncio.Future[Incoming] = asyncio.get_running_loop().create_future()
        self._calls.append(future)
        return future

    async def answer(self, future: asyncio.Future[Incoming]) -> Incoming:
        """Wait for the answer of `ask`; an overdue one ends the link."""
        try:
            async with asyncio.timeout(REPLY_TIMEOUT_S):
                return await future
        except TimeoutError:
            raise self._overdue("no answer in time") from None

    def send(self, data: bytes) -> None:
        """Write without waiting; raise the error that ended the channel."""
        if self.error is not None:
            raise self.error
        self.link.send(data)

    def publish(self, frames: Sequence[bytes], sent: AllSent) -> Batch:
        """Write messages; `answered` waits until the server has answered for them."""
        if not frames:
            return Batch(0, 0, sent, None)
        if len(self._unconfirmed) >= BATCHES_MAX:
            self.link.abort(f"the server has not confirmed {BATCHES_MAX:,} batches of messages")
        self.send(b"".join(frames))
        return self._unconfirmed.add(len(frames), sent, object())

    async def answered(self, batch: Batch) -> None:
        """Return when the server has answered for the whole batch; after an error answers may still come."""
        if batch.is_under_way:
            done = asyncio.Event()
            batch.waiters.append(done.set)
            try:
                async with asyncio.timeout(confirm_timeout_s(batch.missing)):
                    await done.wait()
            except TimeoutError:
                error = await self._not_confirmed()
                if batch.is_under_way:
                    raise error from None
            finally:
                batch.waiters.remove(done.set)
        if batch.error is not None:
            raise batch.error

    async def _not_confirmed(self) -> BrokerUnavailable:
        """Return the error for an overdue confirmation. If the server answers another request, it is alive,
        and so are the claims that end with this link.
        """
        if not self.link.blocked and self.error is None:
            question = self.ask(Method.BASIC_QOS, 0, 0, False)
            await asyncio.wait([question], timeout=PROBE_S)
            if question.done():
                return unconfirmed(self.link.location)
        return self._overdue("the server did not confirm in time")

    def _overdue(self, why: str) -> BrokerUnavailable:
        """End the link, unless the server has a resource alarm: then it is alive."""
        if self.link.blocked:
            return blocked_by(self.link.location, self.link.blocked, is_written=True)
        self.link.abort(why)
        return BrokerUnavailable(f"RabbitMQ at {self.link.location} did not answer in time: {why}")

    async def close(self) -> None:
        """Close the channel, unless it has ended."""
        if self.error is None:
            await self.call(Method.CHANNEL_CLOSE, 200, "", 0, 0)

    def close_later(self) -> None:
        """Close the channel without waiting for the server's answer."""
        if self.error is None:
            self.ask(Method.CHANNEL_CLOSE, 200, "", 0, 0)

    def receive(self, incoming: Incoming) -> None:
        """Handle one method: a delivery, a confirmation, an answer, or the end of the channel."""
        method = incoming.method
        if self.error is not None:  # it only waits for the server's CHANNEL_CLOSE_OK
            if method in (Method.CHANNEL_CLOSE_OK, Method.CHANNEL_CLOSE):
                self.link.discard(self)
        elif method == _DELIVER:
            self.on_delivery(incoming)
        elif method in (_ACK, _NACK):
            number, multiple, *_ = incoming.fields
            self._unconfirmed.answer(number, multiple=multiple, accepted=method == _ACK)
        elif method == Method.CHANNEL_CLOSE:
            code, text, group, method = incoming.fields
            self.link.send(encode_method(self.number, Method.CHANNEL_CLOSE_OK))
            self.link.discard(self)
            self.fail(channel_refusal(self.link.location, code, text, group << 16 | method))
        elif method == Method.BASIC_CANCEL:
            self.link.send(encode_method(self.number, Method.CHANNEL_CLOSE, 200, "", 0, 0))
            self.fail(ChannelClosed(ChannelClosed.NOT_FOUND, "the queue was deleted while it was consumed"))
        elif method == Method.CHANNEL_FLOW:
            self.send(encode_method(self.number, Method.CHANNEL_FLOW_OK, incoming.fields[0]))
        elif method == Method.BASIC_RETURN:
            self._unconfirmed.take_back(incoming)
        elif self._calls:
            future = self._calls.popleft()
            if not future.done():
                future.set_result(incoming)
            if method == Method.CHANNEL_CLOSE_OK:
                self.link.discard(self)
                self.fail(BrokerUnavailable("this process has already closed this AMQP channel"))

    def fail(self, error: BrokerError) -> None:
        """Fail everything that waits on the channel with this error."""
        if self.error is not None:
            return
        self.error = error
        calls, self._calls = self._calls, deque()
        for future in calls:
            _refuse(future, error)
        self._unconfirmed.fail(error)
        self.on_end(error)


async def open_link(location: Location, *, timeout_s: float, heartbeat_s: int, name: str) -> Link:
    """Connect and log in; raise BrokerUnavailable with one line that says what to do."""
    loop = asyncio.get_running_loop()
    handshake = Handshake(location, heartbeat_s=heartbeat_s, name=name)
    # In a thread, because it reads the files of certificates.
    context = await asyncio.to_thread(location.tls_context) if location.tls else None
    link = Link(location, handshake)
    try:
        async with asyncio.timeout(timeout_s):
            await loop.create_connection(lambda: link, location.host, location.port, ssl=context)
            await link.opened()
    except BrokerUnavailable:
        raise
    except (OSError, TimeoutError) as error:
        link.abort("cannot be opened")
        raise unreachable(location, error) from None
    except asyncio.CancelledError:
        link.abort("cancelled")
        raise
    return link


def _refuse(future: asyncio.Future[Any], error: BrokerError) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # retrieved, or asyncio logs it if the caller was cancelled


def _drop(_: object) -> None:
    """Ignore it: the default callback."""
