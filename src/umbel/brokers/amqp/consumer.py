"""Consumer: the messages of one queue that RabbitMQ has delivered to one owner.

A consumer has a separate channel, so that its prefetch can follow the demand: RabbitMQ delivers as many
messages as the owner asked for and has not settled, and no more. The limit is the channel's, which can be
changed at any time. Quorum queues refuse such a limit by ending the connection; for them (`per_consumer`) the
limit is the consumer's, which is restarted when the demand has grown.

Delivered messages wait in `buffered` until they are claimed. A message that is not due yet is either held for
the last few milliseconds or put on `early`, to be parked.

An owner that can start nothing for a while stops fetching, and returns the messages that it has not claimed.
With a prefetch floor it continues as the consumer with the lowest priority: RabbitMQ delivers to it only
messages that no other consumer has room for.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from umbel.brokers.amqp import topology
from umbel.brokers.amqp.envelope import MessageState
from umbel.brokers.amqp.frames import Incoming, Method, Table, encode_ack, encode_method
from umbel.brokers.amqp.handshake import ChannelClosed
from umbel.brokers.amqp.layouts import Layouts
from umbel.brokers.amqp.link import Channel, Link
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
LAST: Table = {"x-priority": -1}  # such a consumer is served after all others
TIMER_S = 0.002  # uvloop's timers count whole milliseconds, and may fire one too early


class Arrived(msgspec.Struct, gc=False):
    """A message that was delivered to this process and is not claimed."""

    message: Message
    delivery_tag: int
    redelivered: bool
    state: MessageState
    claim: int = 0  # the tag of the claim under which it is being parked


class Consumer:
    """The consumer of one queue for one owner. `on_deleted` is called when the queue was deleted while it was
    consumed.
    """

    def __init__(
        self,
        link: Link,
        queue: str,
        on_arrival: Callable[[], None],
        on_deleted: Callable[["Consumer"], None],
        *,
        per_consumer: bool,
        prefetch_floor: int = 0,
        expires_all: bool = False,
    ) -> None:
        self.queue = queue
        self.claimed = 0
        self.prefetch = 0
        self.early: list[Arrived] = []
        self.has_returned = False  # something was returned, and may be delivered again piecemeal
        self._link = link
        self._channel: Channel | None = None
        self._on_arrival = on_arrival
        self._on_deleted = on_deleted
        self._has_begun = False
        self._is_last = False  # consumes with the lowest priority
        self._held: dict[int, Arrived] = {}  # by delivery tag, until they are due in a moment
        self._buffers: dict[int, deque[Arrived]] = {}
        self._outstanding: dict[int, None] = {}
        self._layouts = Layouts()
        self._per_consumer = per_consumer
        self._prefetch_floor = prefetch_floor
        self._expires_all = expires_all  # the queue drops messages that have waited too long
        self._generation = 0

    @property
    def is_open(self) -> bool:
        """Whether its channel is open; if not, RabbitMQ has its messages again."""
        return self._channel is not None and self._channel.error is None

    @property
    def error(self) -> BrokerError | None:
        """The error that ended its channel, if it has ended."""
        return None if self._channel is None else self._channel.error

    @property
    def held(self) -> int:
        """How many messages wait here for the last milliseconds until they are due."""
        return len(self._held)

    @property
    def buffered(self) -> int:
        """How many messages wait here to be claimed."""
        return sum(map(len, self._buffers.values()))

    @property
    def priorities(self) -> list[int]:
        """The priorities of the messages that wait here to be claimed."""
        return [priority for priority, waiting in self._buffers.items() if waiting]

    def streams(self, limit: int) -> bool:
        """Whether the server may deliver `limit` more messages, and will do so in the order of the queue."""
        room = self.prefetch >= self.claimed + limit and not self._is_last
        return room and not self.has_returned and not self.early

    async def open(self) -> None:
        """Open its channel; nothing is consumed until `want`."""
        self._channel = await self._link.channel()
        self._channel.on_delivery = self._receive
        self._channel.on_end = self._end

    async def want(self, count: int) -> None:
        """Let `count` messages come in addition to the claimed ones; at most so many then wait here.

        More may come, up to the floor. RabbitMQ drops a message that expires in its queue without a trace; a
        message that waits here ends as a task that has expired.
        """
        wanted = max(self.claimed + self.held + len(self.early) + count, self._prefetch_floor)
        if self._is_last or self.prefetch < wanted or self.prefetch > 4 * wanted:
            await self._set_prefetch(wanted)

    async def settled(self) -> int:
        """Wait until everything that the server delivered before this call has arrived; return how many
        messages still wait in the queue.

        It makes two requests: the answer to the first may overtake a message that is on its way inside the
        server, the answer to the second cannot.
        """
        assert self._channel is not None
        self.has_returned = False
        method, fields = topology.passive(self.queue)
        await self._channel.call(method, *fields)
        ready: int = (await self._channel.call(method, *fields)).fields[1]
        return ready

    def take(self, priority: int, limit: int) -> list[Arrived]:
        """Take up to `limit` messages of this priority, which count as claimed."""
        waiting = self._buffers.get(priority)
        if not waiting:
            return []
        taken = [waiting.popleft() for _ in range(min(limit, len(waiting)))]
        self.claimed += len(taken)
        return taken

    def undo_take(self, arrived: Arrived) -> None:
        """Put back one taken message as the first of its priority."""
        self.claimed -= 1
        self._buffers[arrived.message.priority].appendleft(arrived)

    def waiting(self) -> Iterable[Arrived]:
        """Yield the messages that wait here and are not claimed, in the order of claims."""
        for priority in sorted(self._buffers, reverse=True):
            yield from self._buffers[priority]

    def drop_waiting(self) -> int:
        """Acknowledge the messages that wait here, because the queue is being purged; return their number."""
        dropped = [arrived.delivery_tag for arrived in self.waiting()]
        self._buffers.clear()
        self._ack(dropped)
        return len(dropped)

    def finish(self, tags: list[int]) -> None:
        """Acknowledge these claimed messages."""
        self.claimed -= len(tags)
        self._ack(tags)

    def finish_early(self, parked: Iterable[Arrived]) -> None:
        """Acknowledge messages that were parked on the delay ladder."""
        self._ack([arrived.delivery_tag for arrived in parked])

    def give_back(self, tag: int) -> None:
        """Return a claimed message to its queue, at its old place if possible."""
        assert self._channel is not None
        self.claimed -= 1
        self.has_returned = True
        self._outstanding.pop(tag, None)
        self._channel.send(encode_method(self._channel.number, Method.BASIC_NACK, tag, False, True))

    def reject(self, tag: int) -> None:
        """Reject a claimed message, so that the queue's dead letter exchange gets it."""
        assert self._channel is not None
        self.claimed -= 1
        self._outstanding.pop(tag, None)
        self._channel.send(encode_method(self._channel.number, Method.BASIC_NACK, tag, False, False))

    async def stop_fetching(self, *, is_busy: bool) -> list[Arrived]:
        """Stop fetching, and return the messages that are here and not claimed; they count as claimed until
        `give_back`.

        No more messages come until `want`. A busy owner with a floor continues as the last consumer to be
        served, and holds messages that can expire: RabbitMQ drops an expired message without a trace, and a
        held one ends as a task that has expired.
        """
        assert self._channel is not None
        stays = is_busy and self._prefetch_floor > 0
        is_full = self.prefetch <= self.claimed and not self._per_consumer  # then nothing more arrives anyway
        if self.prefetch and not (stays and self._is_last) and not (is_busy and is_full):
            await self._channel.call(Method.BASIC_CANCEL, str(self._generation), False)
            self.prefetch, self._is_last = 0, False
        fetched = [*self.early, *self._held.values(), *self.waiting()]
        if stays:
            fetched = [arrived for arrived in fetched if not self._expires(arrived)]
        gone = {arrived.delivery_tag for arrived in fetched}
        self.early = [arrived for arrived in self.early if arrived.delivery_tag not in gone]
        self._held = {tag: arrived for tag, arrived in self._held.items() if tag not in gone}
        for priority, waiting in self._buffers.items():
            self._buffers[priority] = deque(here for here in waiting if here.delivery_tag not in gone)
        self.claimed += len(fetched)
        return fetched

    async def fetch_last(self) -> None:
        """With a floor, fetch the messages that no other consumer has room for, after `stop_fetching`."""
        if self._prefetch_floor and not self._is_last and not self.prefetch:
            await self._set_prefetch(max(self.claimed, self._prefetch_floor), is_last=True)

    def _expires(self, arrived: Arrived) -> bool:
        return self._expires_all or arrived.message.expiration_ms is not None

    def release(self) -> asyncio.Future[Incoming] | None:
        """Return everything to the queue and close the channel; the future ends when that is done."""
        channel = self._channel
        if channel is None or channel.error is not None:
            return None
        # Returned before the channel ends, so that the queue has them in order before it is asked for more;
        # and after the consumer ended, or the queue would deliver them, and others, to it again.
        if self._generation:
            cancelled = str(self._generation)
            channel.send(encode_method(channel.number, Method.BASIC_CANCEL, cancelled, True))
        channel.send(encode_method(channel.number, Method.BASIC_NACK, 0, True, True))
        return channel.ask(Method.CHANNEL_CLOSE, 200, "", 0, 0)

    def _end(self, error: BrokerError) -> None:
        """Wake the waiting callers: the claims of this consumer are requeued, or gone with the queue."""
        if isinstance(error, ChannelClosed):
            what = _LATE_ACK if "acknowledgement" in error.text else "RabbitMQ ended a consumer"
            if error.code == ChannelClosed.NOT_FOUND and self._has_begun:
                self._on_deleted(self)
            else:
                log.warning(what, extra={"queue": self.queue, "returned": self.claimed, "why": error.text})
        self._on_arrival()

    def _ack(self, tags: list[int]) -> None:
        """Send one ack for the oldest messages if they end together, and one for each of the others."""
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
        message, state = self._layouts.read(incoming, exchange, key)
        arrived = Arrived(message, tag, redelivered, state)
        if state.due and (wait_s := state.due - cluster_now()) > 0:
            if wait_s > HOLD_S:
                self.early.append(arrived)
                self._on_arrival()
            else:
                self._held[tag] = arrived
                asyncio.get_running_loop().call_later(wait_s + TIMER_S, self._release_held, arrived)
            return
        self._admit(arrived)

    def _release_held(self, arrived: Arrived) -> None:
        if self._held.pop(arrived.delivery_tag, None) is not None and self.is_open:
            self._admit(arrived)

    def _admit(self, arrived: Arrived) -> None:
        buffer = self._buffers.get(arrived.message.priority)
        if buffer is None:
            buffer = self._buffers[arrived.message.priority] = deque()
        buffer.append(arrived)
        self._on_arrival()

    async def _set_prefetch(self, wanted: int, *, is_last: bool = False) -> None:
        assert self._channel is not None
        consumes, changes = self.prefetch > 0, is_last != self._is_last
        self.prefetch = wanted = min(wanted, 65_535)
        self._is_last = is_last
        if self._per_consumer:
            limit = (0, max(1, wanted - self.claimed), False)
        else:
            limit = (0, wanted, True)
        if consumes and not changes and not self._per_consumer:
            await self._channel.call(Method.BASIC_QOS, *limit)
            return
        if consumes:
            self._channel.ask(Method.BASIC_CANCEL, str(self._generation), False)
        self._channel.ask(Method.BASIC_QOS, *limit)
        await self._consume(LAST if is_last else {})

    async def _consume(self, arguments: Table) -> None:
        assert self._channel is not None
        self._generation += 1
        await self._channel.call(
            Method.BASIC_CONSUME, 0, self.queue, str(self._generation), False, False, False, False, arguments
        )
        self._has_begun = True
