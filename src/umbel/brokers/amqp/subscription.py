"""Subscription: one listener's exclusive queue on an exchange, declared again after a lost connection.

The queue is removed with its connection, so broadcasts are missed while the link is down; a reader that needs
all events reads the event log. At most PREFETCH broadcasts wait in this process; the others wait in the queue
until its TTL. The server reports a deleted queue but not a deleted exchange, so a listener that receives
nothing binds its queue again from time to time.
"""

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from uuid import uuid4

from umbel.brokers.amqp import topology
from umbel.brokers.amqp.envelope import decode_broadcast
from umbel.brokers.amqp.frames import Incoming, Method, encode_ack
from umbel.brokers.amqp.link import Channel
from umbel.brokers.amqp.session import Sessions
from umbel.brokers.interface import Broadcast
from umbel.brokers.links import LastingSubscription, LinkWatch, link_of
from umbel.errors import BrokerError

PREFETCH = 500
BIND_AGAIN_S = 5.0


class AmqpSubscription(LastingSubscription):
    """The broadcasts of one exchange, for one listener."""

    def __init__(
        self, sessions: Sessions, exchange: str, patterns: Sequence[str], unread_ttl_s: float | None
    ) -> None:
        super().__init__()
        self._sessions = sessions
        self._exchange = exchange
        self._patterns = tuple(patterns)
        self._unread_ttl_s = unread_ttl_s
        self._channel: Channel | None = None
        self._queue: topology.Queue | None = None  # the queue that the channel consumes
        self._watch = LinkWatch(link_of(exchange), sessions.on_link)
        self._is_left = False
        self._waiting: deque[Incoming] = deque()

    async def enter(self) -> None:
        """Declare, bind and consume the queue; broadcasts from now on arrive.

        If this fails or is cancelled, `leave` closes the channel.
        """
        self._queue = None
        session = await self._sessions.get()
        self._channel = channel = await session.link.channel()
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
        self._queue = queue
        self._watch.restored()

    async def leave(self) -> None:
        """Close the channel; the queue is removed with its consumer."""
        channel, self._is_left = self._channel, True
        self._watch.given_up()
        if channel is not None:
            with suppress(BrokerError):  # the connection ended meanwhile
                await channel.close()

    def next_broadcast(self) -> Broadcast | None:
        """Return the next broadcast that has arrived, if any, and acknowledge it."""
        if not self._waiting:
            return None
        incoming, channel = self._waiting.popleft(), self._channel
        if channel is not None and channel.error is None:
            channel.send(encode_ack(channel.number, incoming.fields[1]))
        return decode_broadcast(incoming, self._exchange)

    async def wait_or_reconnect(self) -> None:
        """Wait for broadcasts. After a lost connection, consume a new queue; after silence, bind again."""
        if self._channel is None or self._queue is None or self._channel.error is not None:
            await self.enter()
        elif not await self.has_arrived(BIND_AGAIN_S):
            for method, fields in self._queue.binding_calls():
                await self._channel.call(method, *fields)

    def _note_ended(self, error: BrokerError) -> None:
        self.arrived.set()
        if not self._is_left:
            self._watch.lost(str(error))

    def _receive(self, incoming: Incoming) -> None:
        self._waiting.append(incoming)
        self.arrived.set()
