"""Link: one connection to RabbitMQ on the event loop, and its channels.

A link lives once: when the connection or a channel ends, everything that waits on it fails with
the reason, and the caller opens a new link. Nothing is sent twice without the caller's knowledge.

The server closes a channel as its way of saying no; `refusals.py` says what it means. Both sides
send heartbeats: a link that hears nothing for two of them is dead, whatever the network says.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any, cast

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
from umbel.brokers.amqp.handshake import REPLY_TIMEOUT_S, Handshake, confirm_timeout_s
from umbel.brokers.amqp.location import Location
from umbel.brokers.amqp.refusals import (
    ChannelClosed,
    blocked_by,
    channel_refusal,
    connection_refusal,
    unreachable,
)
from umbel.errors import BrokerError, BrokerUnavailable

READ_BYTES = 64 * 1024
_DELIVER, _ACK, _NACK = int(Method.BASIC_DELIVER), int(Method.BASIC_ACK), int(Method.BASIC_NACK)


class Link(asyncio.BufferedProtocol):
    """Use `open_link`."""

    def __init__(self, location: Location, handshake: Handshake) -> None:
        self.location = location
        self.error: BrokerError | None = None
        self.blocked = ""  # why the server takes no messages now, in its words
        self.ended = asyncio.Event()
        self.on_end: Callable[[BrokerError], None] = _drop
        self._handshake = handshake
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._reader = FrameReader()
        # A plain Protocol gets a new quarter of a megabyte for each read.
        self._received = memoryview(bytearray(READ_BYTES))
        self._transport: asyncio.Transport | None = None
        self._unwritten: list[bytes] = []
        self._channels: dict[int, Channel] = {}
        self._numbers = count(1)
        self._free: deque[int] = deque()
        self._heard = self._sent = False
        self._silent_beats = 0
        self._beat: asyncio.TimerHandle | None = None

    @property
    def heartbeat_s(self) -> int:
        """As agreed: the server lets go of a link after two to three of them without a word from us."""
        return self._handshake.heartbeat_s

    async def opened(self) -> None:
        await self._opened

    async def channel(self, *, confirms: bool = False) -> "Channel":
        """A new channel; with `confirms`, one to publish on."""
        number = self._free.popleft() if self._free else next(self._numbers)
        channel = self._channels[number] = Channel(self, number)
        await channel.call(Method.CHANNEL_OPEN, "")
        if confirms:
            await channel.call(Method.CONFIRM_SELECT, False)
        return channel

    def send(self, data: bytes) -> None:
        if self.error is not None:
            raise self.error
        self._sent = True
        if not self._unwritten:
            asyncio.get_running_loop().call_soon(self._write)
        self._unwritten.append(data)

    def discard(self, channel: "Channel") -> None:
        if self._channels.pop(channel.number, None) is not None:
            self._free.append(channel.number)

    async def close(self) -> None:
        """Say goodbye, and do not wait long for the answer."""
        if self.error is None:
            self.send(encode_method(0, Method.CONNECTION_CLOSE, 200, "bye", 0, 0))
            try:
                async with asyncio.timeout(1.0):
                    await self.ended.wait()
            except TimeoutError:
                pass
        self.abort("this process closed it, at shutdown or by close()")

    def abort(self, why: str) -> None:
        self.end(BrokerUnavailable(f"the connection to RabbitMQ at {self.location} was closed: {why}"))

    def end(self, error: BrokerError) -> None:
        self._fail(error)
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio.BufferedProtocol ----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass of it
        self._transport.write(PROTOCOL_HEADER)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._received

    def buffer_updated(self, nbytes: int) -> None:
        self._heard = True
        try:
            incoming = self._reader.feed(bytes(self._received[:nbytes]))
            channels = self._channels
            for one in incoming:
                if not one.channel:
                    self._receive(one)
                elif (channel := channels.get(one.channel)) is not None:
                    channel.receive(one)
        except BadFrames as error:
            self.abort(str(error))
        except BrokerUnavailable as error:
            self._fail(error)
            assert self._transport is not None
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
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
        """All that was sent in one turn of the loop, in one piece: the server confirms it with one flush."""
        unwritten, self._unwritten = self._unwritten, []
        if self.error is None and self._transport is not None:
            self._transport.write(b"".join(unwritten))

    def _schedule_beat(self) -> None:
        if self._handshake.heartbeat_s:
            loop = asyncio.get_running_loop()
            self._beat = loop.call_later(self._handshake.heartbeat_s / 2, self._on_beat)

    def _on_beat(self) -> None:
        """Twice per heartbeat: send one unless something was sent; count the silence."""
        self._silent_beats = 0 if self._heard else self._silent_beats + 1
        if self._silent_beats >= 4:
            self.abort(f"no data received for {2 * self._handshake.heartbeat_s} s (two heartbeats missed)")
            return
        if not self._sent and self._transport is not None:
            self._transport.write(HEARTBEAT_FRAME)
        self._heard = self._sent = False
        self._schedule_beat()

    def _fail(self, error: BrokerError) -> None:
        if self.error is not None:
            return
        self.error = error
        if self._beat is not None:
            self._beat.cancel()
        if not self._opened.done():
            self._opened.set_exception(error)
            self._opened.exception()  # who was cancelled meanwhile does not ask
        for channel in list(self._channels.values()):
            channel.fail(error)
        self._channels.clear()
        self.ended.set()
        self.on_end(error)


class Channel:
    """One conversation. Calls are answered in the order they were made."""

    def __init__(self, link: Link, number: int) -> None:
        self.link = link
        self.number = number
        self.error: BrokerError | None = None
        self.on_delivery: Callable[[Incoming], None] = _drop
        self.on_end: Callable[[BrokerError], None] = _drop
        self._calls: deque[asyncio.Future[Incoming]] = deque()
        self._unconfirmed = Unconfirmed()

    async def call(self, method: Method, *fields: Any) -> Incoming:
        return await self.answer(self.ask(method, *fields))

    def ask(self, method: Method, *fields: Any) -> asyncio.Future[Incoming]:
        """Send a call; its answer comes later, after those of earlier calls."""
        self.send(encode_method(self.number, method, *fields))
        future: asyncio.Future[Incoming] = asyncio.get_running_loop().create_future()
        self._calls.append(future)
        return future

    async def answer(self, future: asyncio.Future[Incoming]) -> Incoming:
        try:
            async with asyncio.timeout(REPLY_TIMEOUT_S):
                return await future
        except TimeoutError:
            raise self._overdue("no answer in time") from None

    def send(self, data: bytes) -> None:
        if self.error is not None:
            raise self.error
        self.link.send(data)

    async def publish(self, frames: Iterable[bytes], sent: AllSent) -> Batch:
        """Publish messages and wait until the server has answered for all."""
        parts, done = list(frames), asyncio.Event()
        if not parts:
            return Batch(0, 0, sent, done.set)
        self.send(b"".join(parts))
        batch = self._unconfirmed.add(len(parts), sent, done.set)
        try:
            async with asyncio.timeout(confirm_timeout_s(len(parts))):
                await done.wait()
        except TimeoutError:
            raise self._overdue("the server did not confirm in time") from None
        if batch.error is not None:
            raise batch.error
        return batch

    def _overdue(self, why: str) -> BrokerUnavailable:
        """A server that says it is blocked lives, and so do the claims that end with this link."""
        if self.link.blocked:
            return blocked_by(self.link.location, self.link.blocked, is_written=True)
        self.link.abort(why)
        return BrokerUnavailable(f"RabbitMQ at {self.link.location} did not answer in time: {why}")

    async def close(self) -> None:
        if self.error is None:
            await self.call(Method.CHANNEL_CLOSE, 200, "", 0, 0)

    def receive(self, incoming: Incoming) -> None:
        method = incoming.method
        if self.error is not None:  # it waits for the server's goodbye
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
        if self.error is not None:
            return
        self.error = error
        calls, self._calls = self._calls, deque()
        for future in calls:
            _refuse(future, error)
        self._unconfirmed.fail(error)
        self.on_end(error)


async def open_link(location: Location, *, timeout_s: float, heartbeat_s: int, name: str) -> Link:
    """Connect and log in; raises BrokerUnavailable, with one line that says what to do."""
    loop = asyncio.get_running_loop()
    handshake = Handshake(location, heartbeat_s=heartbeat_s, name=name)
    # It reads the files of certificates.
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
        future.exception()  # who was cancelled meanwhile does not ask


def _drop(_: object) -> None:
    """Nobody listens."""
