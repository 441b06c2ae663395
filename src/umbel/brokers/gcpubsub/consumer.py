"""Consumer: the messages of one queue on their way from Pub/Sub into this process.

A claim pulls the messages that it lacks and does not wait. A waiting worker has one pull in flight that waits
at the server, for one message: a message delivered to a pull whose process has died comes back only when its
deadline is over. A pull is never cancelled while the broker is open, so a caller that stops waiting loses
nothing: the message arrives here and waits for the next claim. When the broker closes, closing the connection
shows Pub/Sub that nothing waits any more. The emulator does not notice that, so its pulls are short, and are
awaited.

A message that is due soon waits here. Any other delayed message is left at Pub/Sub with a deadline of up to
ten minutes, and comes again then. It is published again before Pub/Sub would drop it for its age.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from math import ceil
from time import monotonic
from uuid import uuid4

import msgspec

from umbel.backoff import Backoff
from umbel.brokers.gcpubsub import api, posts
from umbel.brokers.gcpubsub.api import Received
from umbel.brokers.gcpubsub.http import NotFound
from umbel.brokers.gcpubsub.posts import ROUTING_KEY, MessageState, Place, checked_name
from umbel.brokers.gcpubsub.service import Service
from umbel.brokers.interface import Broadcast
from umbel.brokers.links import LinkWatch, link_of
from umbel.clock import cluster_now
from umbel.errors import BrokerError
from umbel.protocol.shutdown import LinkChange
from umbel.wire.control import REQUEST_EXCHANGE
from umbel.wire.envelope_redis import unseal
from umbel.wire.message import Message

FULL_PULL = 50  # if a pull returns so many, there may be more
HOLD_S = 30.0  # a message that is due within this time waits here
HELD_MAX = 1000
TIMER_S = 0.002  # a timer may end a moment early
FRESH_S = 6 * 3600.0  # a delayed message older than this is sent again: Pub/Sub keeps one for a day


class Arrived(msgspec.Struct):
    """A message that this process has, until its deadline."""

    message: Message
    ack_id: str
    state: MessageState
    redelivered: bool
    data: bytes
    deadline: float  # by the monotonic clock

    @property
    def priority(self) -> int:
        """Its priority, 0 to 9; 0 is first."""
        return min(max(self.message.priority, 0), 9)


class Consumer:
    """The pulls of one queue, and the messages that no owner has claimed yet."""

    def __init__(self, service: Service, place: Place, given_s: int, on_arrival: Callable[[], None]) -> None:
        self.place = place
        self.is_left = False
        self._service = service
        self._ack_deadline_s = service.topology.ack_deadline_s
        self._given_s = given_s  # the ack deadline that the subscription gives at delivery
        self._on_arrival = on_arrival
        self._buffers: dict[int, deque[Arrived]] = {}
        self._held: dict[str, Arrived] = {}
        self._waiting: asyncio.Task[int] | None = None
        self._pulls: set[asyncio.Task[int]] = set()
        self._lock = asyncio.Lock()

    @property
    def buffered(self) -> int:
        """How many messages wait here to be claimed."""
        return sum(map(len, self._buffers.values()))

    def unclaimed(self) -> Iterator[Arrived]:
        """Yield all messages of the queue that this process has and no owner has claimed."""
        for buffer in self._buffers.values():
            yield from buffer
        yield from self._held.values()

    def priorities(self) -> list[int]:
        """Return the priorities of the messages that wait here to be claimed."""
        return [priority for priority, buffer in self._buffers.items() if buffer]

    def take(self, priority: int, limit: int) -> list[Arrived]:
        """Take up to `limit` messages of this priority whose deadlines are not over."""
        buffer, now, taken = self._buffers.get(priority), monotonic(), list[Arrived]()
        while buffer and len(taken) < limit:
            arrived = buffer.popleft()
            if arrived.deadline > now:  # otherwise Pub/Sub delivers it again
                taken.append(arrived)
        return taken

    # -- fetching --------------------------------------------------------------------------------

    async def fetch(self, limit: int) -> None:
        """Pull the messages that a claim of so many lacks. A cancelled claimer loses nothing.

        Concurrent claimers of one queue take turns, so that two of them do not pull the same number twice.
        """
        self.is_left = False
        async with self._lock:
            while (lacking := limit - self.buffered) > 0:
                pulling = asyncio.create_task(self._pull(lacking, waits=False))
                self._pulls.add(pulling)
                pulling.add_done_callback(self._pulls.discard)
                count = await asyncio.shield(pulling)
                if count < min(lacking, FULL_PULL):  # the queue has no more
                    return

    def wait(self) -> "asyncio.Task[int]":
        """Return the pull in flight that waits for a message; start one if needed."""
        if self._waiting is None or self._waiting.done():
            self._waiting = asyncio.create_task(self._pull(1, waits=True))
        return self._waiting

    @property
    def waiting(self) -> "asyncio.Task[int] | None":
        """The pull in flight that waits for a message, if there is one."""
        return self._waiting if self._waiting is not None and not self._waiting.done() else None

    async def close(self) -> None:
        """Return the unclaimed messages, also those that pulls in flight still bring."""
        self.is_left = True
        pulls = [*self._pulls, *([self._waiting] if self._waiting is not None else [])]
        if pulls:
            _, late = await asyncio.wait(pulls, timeout=self._service.cut_off_s)
            for pulling in late:
                pulling.cancel()
            await asyncio.wait(pulls)
        await self.leave()

    async def leave(self) -> None:
        """Return the unclaimed messages."""
        self.is_left = True
        if returned := [arrived.ack_id for arrived in self.drop()]:
            await self._service.set_deadline(self.place.subscription, returned, 0)

    def drop(self) -> list[Arrived]:
        """Drop the unclaimed messages, and return them to be acknowledged."""
        dropped = list(self.unclaimed())
        self._buffers.clear()
        self._held.clear()
        return dropped

    async def _pull(self, count: int, *, waits: bool) -> int:
        began = monotonic()
        pulled = await self._service.pull(self.place.subscription, count, waits=waits)
        if not pulled:
            return 0
        if waits:
            began = monotonic()  # the deadline starts at the delivery, which was just now
        deadline = began + min(self._ack_deadline_s, self._given_s)
        ids = [received.ack_id for received in pulled]
        if self.is_left and waits:
            await self._service.set_deadline(self.place.subscription, ids, 0)
            return 0
        if self._given_s != self._ack_deadline_s:
            began = monotonic()
            await self._service.set_deadline(self.place.subscription, ids, self._ack_deadline_s)
            deadline = began + self._ack_deadline_s
        for received in pulled:
            await self._admit(received, deadline)
        self._on_arrival()
        return len(pulled)

    async def _admit(self, received: Received, deadline: float) -> None:
        data = received.message.data
        opened, state = unseal(data), posts.read_state(received.message.attributes)
        starts, ran = max(state.starts, opened.starts), state.ran or opened.redelivered
        state = MessageState(starts, ran, state.due)
        redelivered = ran or received.deliveries > 1
        arrived = Arrived(opened.message, received.ack_id, state, redelivered, data, deadline)
        wait_s = state.due - cluster_now() if state.due else 0.0
        if wait_s <= 0:
            self._buffers.setdefault(arrived.priority, deque()).append(arrived)
        elif wait_s <= HOLD_S and len(self._held) < HELD_MAX:
            self._held[arrived.ack_id] = arrived
            asyncio.get_running_loop().call_later(wait_s + TIMER_S, self._release, arrived)
        else:
            await self._postpone(arrived, received, wait_s)

    def _release(self, arrived: Arrived) -> None:
        if self._held.pop(arrived.ack_id, None) is not None:
            self._buffers.setdefault(arrived.priority, deque()).append(arrived)
            self._on_arrival()

    async def _postpone(self, arrived: Arrived, received: Received, wait_s: float) -> None:
        """Leave the message at Pub/Sub with a later deadline, or publish it again before it gets too old."""
        published = posts.moment(received.message.published)
        if published and cluster_now() - published > FRESH_S:
            fresh = posts.copy_of(arrived.data, self.place.queue, self._service.names, arrived.state)
            if not await self._service.try_send([fresh]):
                await self._service.acknowledge(self.place.subscription, [arrived.ack_id])
                return
        later = max(api.ACK_DEADLINE_MIN_S, min(ceil(wait_s), api.ACK_DEADLINE_MAX_S))
        await self._service.set_deadline(self.place.subscription, [arrived.ack_id], later)


# ---- subscription ----------------------------------------------------------------------------------
#
# The broadcasts of one exchange, for one listener.
#
# Requests go to a topic to which every node has a subscription. Replies go to one topic with the asking
# client's id as their routing key. An emulator ignores the filter of a subscription, so the key is compared
# here again. Each listener has separate subscriptions, removed when it leaves and by Pub/Sub a day after its
# process died.

ACK_DEADLINE_S = 10
AT_ONCE = 100
ID_DIGITS_MAX = 20  # of a message id


class PubsubSubscription:
    """The broadcasts of one exchange, for one listener; iterating retries after lost connections."""

    def __init__(
        self,
        service: Service,
        exchange: str,
        patterns: Sequence[str],
        *,
        on_link: Callable[[LinkChange], None],
    ) -> None:
        self._service = service
        self._exchange = exchange
        self._keys = frozenset(patterns)
        self._to_all = exchange == REQUEST_EXCHANGE
        self._watch = LinkWatch(link_of(exchange), on_link)
        self._places = [self._place(pattern) for pattern in patterns]
        self._entering: asyncio.Task[None] | None = None

    def _place(self, pattern: str) -> Place:
        name = self._service.names.subscription(f"{pattern}.{self._exchange}")
        if self._to_all:
            name = f"{name}-{uuid4()}"
        return Place(pattern, self._exchange, pattern, checked_name(name, pattern))

    async def enter(self) -> None:
        """Create the subscriptions; broadcasts from now on arrive."""
        self._entering = asyncio.create_task(self._make())
        await asyncio.shield(self._entering)

    async def leave(self) -> None:
        """Delete the subscriptions, once Pub/Sub has answered `enter`: a request that is cut off may be
        executed later.
        """
        if self._entering is not None:
            await asyncio.gather(self._entering, return_exceptions=True)
        for place in self._places:
            with suppress(BrokerError):
                await self._service.link.call(api.remove(self._service.project, place.subscription))

    async def __aiter__(self) -> AsyncIterator[Broadcast]:
        inbox: asyncio.Queue[list[Received]] = asyncio.Queue(maxsize=1)
        listeners = [asyncio.create_task(self._listen(place, inbox)) for place in self._places]
        try:
            while True:
                for message in await inbox.get():
                    if (broadcast := self._read(message)) is not None:
                        yield broadcast
        finally:
            for listener in listeners:
                listener.cancel()

    async def _make(self) -> None:
        retention_s = float(api.FAN_OUT_RETENTION_S)
        for place in self._places:
            await self._service.make_topic(self._exchange)
            call = api.make_subscription(
                self._service.project,
                place,
                ack_deadline_s=ACK_DEADLINE_S,
                retention_s=retention_s,
                expires_s=self._service.topology.expires_s,
                is_filtered=not self._to_all,
            )
            try:
                await self._service.link.call(call)
            except NotFound:  # the topic was deleted
                await self._service.make_again(self._exchange)
                await self._service.link.call(call)

    async def _listen(self, place: Place, inbox: "asyncio.Queue[list[Received]]") -> None:
        """Pull broadcasts into the inbox, through lost connections.

        A broadcast is acknowledged before it is read: one that makes its reader fail does not come again.
        """
        backoff = Backoff()
        while True:
            try:
                found = await self._service.pull(place.subscription, AT_ONCE, waits=True)
                if found:
                    ids = [message.ack_id for message in found]
                    await self._service.acknowledge(place.subscription, ids)
            except BrokerError as error:
                self._watch.lost(str(error))
                await backoff.pause()
                if isinstance(error, NotFound):  # deleted, or expired while this machine slept
                    with suppress(BrokerError):
                        await self._make()
                continue
            backoff.reset()
            self._watch.restored()
            if found:
                await inbox.put(sorted(found, key=_order))

    def _read(self, received: Received) -> Broadcast | None:
        message = unseal(received.message.data).message
        key = received.message.attributes.get(ROUTING_KEY, message.routing_key)
        if not self._to_all and key not in self._keys:
            return None
        return Broadcast(self._exchange, "" if self._to_all else key, message.body, message.headers)


def _order(received: Received) -> tuple[str, int]:
    message, number = received.message, received.message.message_id
    is_number = number.isdecimal() and len(number) <= ID_DIGITS_MAX
    return message.published, int(number) if is_number else 0
