"""AmqpSubscription: one listener's queue on an exchange, declared again after a lost connection.

The queue is exclusive and goes with its connection, so what is broadcast while the link is down
is missed: broadcasts are lossy; a reader that needs all events reads the event log. At most
PREFETCH broadcasts wait in this process; the rest waits in the queue until its TTL.

The server reports a deleted queue but not a deleted exchange, so a listener that hears nothing binds
its queue again from time to time.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from uuid import uuid4

from umbel.brokers.amqp import topology
from umbel.brokers.amqp.envelope import decode_broadcast
from umbel.brokers.amqp.frames import Incoming, Method, encode_ack
from umbel.brokers.amqp.link import Channel
from umbel.brokers.amqp.session import Sessions
from umbel.brokers.interface import Broadcast
from umbel.brokers.links import LinkWatch, link_of
from umbel.chance import random
from umbel.errors import BrokerError
from umbel.protocol.retry import reconnect_wait_s

PREFETCH = 500
BIND_AGAIN_S = 5.0


class AmqpSubscription:
    def __init__(
        self, sessions: Sessions, exchange: str, patterns: Sequence[str], unread_ttl_s: float | None = None
    ) -> None:
        self._unread_ttl_s = unread_ttl_s
        self._sessions = sessions
        self._exchange = exchange
        self._patterns = tuple(patterns)
        self._channel: Channel | None = None
        self._queue: topology.Queue | None = None  # that of the channel
        self._watch = LinkWatch(link_of(exchange), sessions.on_link)
        self._is_left = False
        self._waiting: deque[Incoming] = deque()
        self._arrived = asyncio.Event()

    async def enter(self) -> None:
        session = await self._sessions.get()
        channel = await session.link.channel()
        queue = topology.listening_queue(
            self._exchange, self._patterns, str(uuid4()), unread_ttl_s=self._unread_ttl_s
        )
        for answer in [channel.ask(method, *fields) for method, fields in queue.calls()]:
            await channel.answer(answer)
        self._waiting.clear()
        channel.on_delivery = self._receive
        channel.on_end = self._note_ended
        await channel.call(Method.BASIC_QOS, 0, PREFETCH, False)
        await channel.call(Method.BASIC_CONSUME, 0, queue.name, "s", False, False, False, False, {})
        self._channel, self._queue = channel, queue
        self._watch.restored()

    async def leave(self) -> None:
        channel, self._is_left = self._channel, True
        self._watch.given_up()
        if channel is None or channel.error is not None:
            return
        try:
            await channel.close()
        except BrokerError:
            return  # it ended by itself

    async def __aiter__(self) -> AsyncIterator[Broadcast]:
        failures = 0
        while True:
            while self._waiting:
                incoming = self._waiting.popleft()
                channel = self._channel
                if channel is not None and channel.error is None:
                    channel.send(encode_ack(channel.number, incoming.fields[1]))
                yield decode_broadcast(incoming, self._exchange)
            self._arrived.clear()
            try:
                if self._channel is None or self._channel.error is not None:
                    await self.enter()
                elif not await self._hears_within(BIND_AGAIN_S):
                    await self._bind()
                failures = 0
            except BrokerError:
                failures += 1
                await asyncio.sleep(reconnect_wait_s(failures, random()))

    async def _hears_within(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._arrived.wait()
        except TimeoutError:
            return False

    async def _bind(self) -> None:
        assert self._channel is not None
        assert self._queue is not None
        for method, fields in self._queue.binding_calls():
            await self._channel.call(method, *fields)

    def _note_ended(self, error: BrokerError) -> None:
        self._arrived.set()
        if not self._is_left:
            self._watch.lost(str(error))

    def _receive(self, incoming: Incoming) -> None:
        self._waiting.append(incoming)
        self._arrived.set()
