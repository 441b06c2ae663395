"""Consumer: the messages of one queue that RabbitMQ has handed to one owner.

It has a channel to itself, so that its prefetch can follow the demand: RabbitMQ hands over as
many messages as the owner asked for and has not settled, and no more. The limit is the channel's,
which can be changed at any time. Quorum queues refuse that, by ending the connection; there
(`per_consumer`) the limit is the consumer's, which is restarted when the demand has grown.

What arrived waits in `buffered` until it is claimed. A message that is not due yet is either held
for the last few milliseconds or put on `early`, to be parked.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from umbel.brokers.amqp import topology
from umbel.brokers.amqp.envelope import Mark
from umbel.brokers.amqp.frames import Incoming, Method, encode_ack, encode_method
from umbel.brokers.amqp.layouts import Layouts
from umbel.brokers.amqp.link import Channel, Link
from umbel.brokers.amqp.refusals import ChannelClosed
from umbel.clock import cluster_now
from umbel.errors import BrokerError
from umbel.wire.message import Message

log = logging.getLogger("umbel.brokers.amqp")

_LATE_ACK = (
    "RabbitMQ requeued messages that were unacknowledged for longer than its consumer_timeout (30 minutes "
    "by default): they run again if another worker takes them; raise consumer_timeout in rabbitmq.conf, give "
    "such tasks acks_late=False, or make them shorter"
)
HOLD_S = topology.DELAY_STEPS_MS[0] / 1000
BARRIERS_MAX = 4
TIMER_S = 0.002  # timers of uvloop count whole milliseconds, and may come one too early


class Arrived(msgspec.Struct, gc=False):
    """A message that was handed to us and is not claimed."""

    message: Message
    delivery_tag: int
    redelivered: bool
    mark: Mark


class Consumer:
    """`on_deleted` is called when the queue was deleted while it was consumed."""

    def __init__(
        self,
        link: Link,
        queue: str,
        on_arrival: Callable[[], None],
        on_deleted: Callable[["Consumer"], None],
        *,
        per_consumer: bool,
        prefetch_floor: int = 0,
    ) -> None:
        self.queue = queue
        self.claimed = 0
        self.prefetch = 0
        self.early: list[Arrived] = []
        self.held = 0
        self.stirred = False  # something was given back, and may come again one by one
        self._link = link
        self._channel: Channel | None = None
        self._on_arrival = on_arrival
        self._on_deleted = on_deleted
        self._has_begun = False
        self._buffers: dict[int, deque[Arrived]] = {}
        self._outstanding: dict[int, None] = {}
        self._layouts = Layouts()
        self._per_consumer = per_consumer
        self._prefetch_floor = prefetch_floor
        self._generation = 0

    @property
    def is_open(self) -> bool:
        return self._channel is not None and self._channel.error is None

    @property
    def error(self) -> BrokerError | None:
        return None if self._channel is None else self._channel.error

    @property
    def buffered(self) -> int:
        return sum(map(len, self._buffers.values()))

    @property
    def priorities(self) -> list[int]:
        return [priority for priority, waiting in self._buffers.items() if waiting]

    def streams(self, limit: int) -> bool:
        """Whether the server may send so many more, and will, in the order of the queue."""
        return self.prefetch >= self.claimed + limit and not self.stirred and not self.early

    async def open(self) -> None:
        self._channel = await self._link.channel()
        self._channel.on_delivery = self._receive
        self._channel.on_end = self._end

    async def want(self, count: int) -> None:
        """Let `count` messages come beside those that are claimed; at most so many then wait here.

        Or more, up to the floor: a message that expires in a queue is dropped without a word, while one
        that waits here ends as a task that has expired.
        """
        wanted = max(self.claimed + self.held + len(self.early) + count, self._prefetch_floor)
        if self.prefetch < wanted or self.prefetch > 4 * wanted:
            await self._set_prefetch(wanted)

    async def settled(self) -> int:
        """When this returns, what the server handed over before it was called has arrived.

        Two questions: the answer to the first may overtake a message that is under way inside the
        server, the answer to the second cannot. Returns how many messages still wait there.
        """
        assert self._channel is not None
        self.stirred = False
        method, fields = topology.passive(self.queue)
        await self._channel.call(method, *fields)
        ready: int = (await self._channel.call(method, *fields)).fields[1]
        return ready

    def take(self, priority: int, limit: int) -> list[Arrived]:
        waiting = self._buffers.get(priority)
        if not waiting:
            return []
        taken = [waiting.popleft() for _ in range(min(limit, len(waiting)))]
        self.claimed += len(taken)
        return taken

    def untake(self, arrived: Arrived) -> None:
        self.claimed -= 1
        self._buffers[arrived.message.priority].appendleft(arrived)

    def waiting(self) -> Iterable[Arrived]:
        """What is here and not claimed, in the order of claims."""
        for priority in sorted(self._buffers, reverse=True):
            yield from self._buffers[priority]

    def drop_waiting(self) -> int:
        """Acknowledge what is here and not claimed: the queue is being emptied."""
        dropped = [arrived.delivery_tag for arrived in self.waiting()]
        self._buffers.clear()
        self._ack(dropped)
        return len(dropped)

    def finish(self, tags: list[int]) -> None:
        """These claimed messages are done with."""
        self.claimed -= len(tags)
        self._ack(tags)

    def finish_early(self, parked: Iterable[Arrived]) -> None:
        self._ack([arrived.delivery_tag for arrived in parked])

    def give_back(self, tag: int) -> None:
        """A claimed message stands in its queue again, at its old place if it can."""
        assert self._channel is not None
        self.claimed -= 1
        self.stirred = True
        self._outstanding.pop(tag, None)
        self._channel.send(encode_method(self._channel.number, Method.BASIC_NACK, tag, False, True))

    def reject(self, tag: int) -> None:
        """A claimed message goes where the queue sends its dead letters."""
        assert self._channel is not None
        self.claimed -= 1
        self._outstanding.pop(tag, None)
        self._channel.send(encode_method(self._channel.number, Method.BASIC_NACK, tag, False, False))

    async def pause(self) -> list[Arrived]:
        """Stop fetching, and give back what is not claimed, which this tells; `want` starts again."""
        assert self._channel is not None
        if not self._generation or not self.prefetch:
            return []
        self.prefetch = 0
        await self._channel.call(Method.BASIC_CANCEL, str(self._generation), False)
        returned = [*self.early, *self.waiting()]
        for arrived in returned:
            self.claimed += 1
            self.give_back(arrived.delivery_tag)
        self.early.clear()
        self._buffers.clear()
        return returned

    def release(self) -> asyncio.Future[Incoming] | None:
        """Everything goes back to the queue, and the channel ends; what tells when that is done."""
        channel = self._channel
        if channel is None or channel.error is not None:
            return None
        # Said before the end, so that the queue has them in order before anyone asks for more; and
        # after the consumer ended, or the queue would hand them, and others, to it again.
        if self._generation:
            cancelled = str(self._generation)
            channel.send(encode_method(channel.number, Method.BASIC_CANCEL, cancelled, True))
        channel.send(encode_method(channel.number, Method.BASIC_NACK, 0, True, True))
        return channel.ask(Method.CHANNEL_CLOSE, 200, "", 0, 0)

    def _end(self, error: BrokerError) -> None:
        """The claims of this consumer are requeued, or gone with the queue; wake the waiting callers."""
        if isinstance(error, ChannelClosed):
            what = _LATE_ACK if "acknowledgement" in error.text else "RabbitMQ ended a consumer"
            if error.code == ChannelClosed.NOT_FOUND and self._has_begun:
                self._on_deleted(self)
            else:
                log.warning(what, extra={"queue": self.queue, "returned": self.claimed, "why": error.text})
        self._on_arrival()

    def _ack(self, tags: list[int]) -> None:
        """One ack for the oldest ones if they end together, and one for each that is left."""
        if not tags:
            return
        assert self._channel is not None
        number, outstanding, ended = self._channel.number, self._outstanding, set(tags)
        last = 0
        for tag in outstanding:
            if tag not in ended:
                break
            last = tag
        frames = [encode_ack(number, last, multiple=True)] if last else []
        frames += [encode_ack(number, tag) for tag in tags if tag > last]
        for tag in tags:
            outstanding.pop(tag, None)
        self._channel.send(b"".join(frames))

    def _receive(self, incoming: Incoming) -> None:
        _, tag, redelivered, key, exchange = incoming.fields
        self._outstanding[tag] = None
        message, mark = self._layouts.read(incoming, exchange, key)
        arrived = Arrived(message, tag, redelivered, mark)
        if mark.due and (wait_s := mark.due - cluster_now()) > 0:
            if wait_s > HOLD_S:
                self.early.append(arrived)
                self._on_arrival()
            else:
                self.held += 1
                asyncio.get_running_loop().call_later(wait_s + TIMER_S, self._release_held, arrived)
            return
        self._admit(arrived)

    def _release_held(self, arrived: Arrived) -> None:
        self.held -= 1
        if self.is_open:
            self._admit(arrived)

    def _admit(self, arrived: Arrived) -> None:
        if not self.prefetch:  # paused meanwhile
            self.claimed += 1
            self.give_back(arrived.delivery_tag)
            return
        buffer = self._buffers.get(arrived.message.priority)
        if buffer is None:
            buffer = self._buffers[arrived.message.priority] = deque()
        buffer.append(arrived)
        self._on_arrival()

    async def _set_prefetch(self, wanted: int) -> None:
        assert self._channel is not None
        begun = self.prefetch
        self.prefetch = wanted = min(wanted, 65_535)
        if self._per_consumer:
            await self._begin_anew(max(1, wanted - self.claimed))
            return
        limited = self._channel.ask(Method.BASIC_QOS, 0, wanted, True)
        if begun:
            await self._channel.answer(limited)
        else:
            await self._consume()

    async def _begin_anew(self, prefetch: int) -> None:
        assert self._channel is not None
        if self._generation:
            self._channel.ask(Method.BASIC_CANCEL, str(self._generation), False)
        await self._channel.call(Method.BASIC_QOS, 0, prefetch, False)
        await self._consume()

    async def _consume(self) -> None:
        assert self._channel is not None
        self._generation += 1
        await self._channel.call(
            Method.BASIC_CONSUME, 0, self.queue, str(self._generation), False, False, False, False, {}
        )
        self._has_begun = True
