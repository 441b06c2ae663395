"""Consumer: messages of one queue on their way from Pub/Sub to a claim.

A claim pulls what it lacks and does not wait. Who waits has one pull under way that waits at the server,
for one message: what is given to a pull whose process has died comes back only when its deadline is over.
A pull is never cut off while the broker is open, so nobody who stops waiting loses a message: it arrives
here and waits for the next claim.

A message that is not due is held here if it is due soon. Otherwise it is left at Pub/Sub with a deadline
of up to ten minutes, and comes again then. Before Pub/Sub would drop it for its age it is sent again.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from math import ceil
from time import monotonic

import msgspec

from umbel.brokers.gcpubsub import api, posts
from umbel.brokers.gcpubsub.api import Received
from umbel.brokers.gcpubsub.names import Place
from umbel.brokers.gcpubsub.posts import Mark
from umbel.brokers.gcpubsub.service import Service
from umbel.clock import cluster_now
from umbel.wire.envelope_redis import unseal
from umbel.wire.message import Message

FULL_PULL = 50  # where a pull brings so many, there may be more
HOLD_S = 30.0  # a message that is due within this time waits here
HELD_MAX = 1000
TIMER_S = 0.002  # a timer may end a moment early
FRESH_S = 6 * 3600.0  # a delayed message older than this is sent again: Pub/Sub keeps one for a day


class Arrived(msgspec.Struct):
    """A message that this process has, until its deadline."""

    message: Message
    ack_id: str
    mark: Mark
    redelivered: bool
    data: bytes
    deadline: float  # by the monotonic clock

    @property
    def priority(self) -> int:
        return min(max(self.message.priority, 0), 9)


class Consumer:
    def __init__(
        self,
        service: Service,
        place: Place,
        ack_deadline_s: int,
        given_s: int,
        on_arrival: Callable[[], None],
    ) -> None:
        self.place = place
        self.is_left = False
        self._service = service
        self._ack_deadline_s = ack_deadline_s
        self._given_s = given_s  # by the subscription, when it delivers
        self._on_arrival = on_arrival
        self._buffers: dict[int, deque[Arrived]] = {}
        self._held: dict[str, Arrived] = {}
        self._waiting: asyncio.Task[int] | None = None
        self._pulls: set[asyncio.Task[int]] = set()
        self._lock = asyncio.Lock()

    @property
    def buffered(self) -> int:
        return sum(map(len, self._buffers.values()))

    def here(self) -> Iterator[Arrived]:
        """All that this process has of the queue and nobody has claimed."""
        for buffer in self._buffers.values():
            yield from buffer
        yield from self._held.values()

    def priorities(self) -> list[int]:
        return [priority for priority, buffer in self._buffers.items() if buffer]

    def take(self, priority: int) -> Arrived | None:
        buffer = self._buffers.get(priority)
        now = monotonic()
        while buffer:
            arrived = buffer.popleft()
            if arrived.deadline > now:  # or it is back at Pub/Sub
                return arrived
        return None

    def untake(self, arrived: Arrived) -> None:
        self._buffers.setdefault(arrived.priority, deque()).appendleft(arrived)

    # -- fetching --------------------------------------------------------------------------------

    async def fetch(self, limit: int) -> None:
        """Pull what is missing for a claim of so many. A claimer that goes away loses nothing."""
        self.is_left = False
        async with self._lock:
            while (lacking := limit - self.buffered) > 0:
                pulling = asyncio.create_task(self._pull(lacking, waits=False))
                self._pulls.add(pulling)
                pulling.add_done_callback(self._pulls.discard)
                count = await asyncio.shield(pulling)
                if count < min(lacking, FULL_PULL):  # that was all
                    return

    def wait(self) -> "asyncio.Task[int]":
        """Have a pull under way that waits for a message."""
        if self._waiting is None or self._waiting.done():
            self._waiting = asyncio.create_task(self._pull(1, waits=True))
        return self._waiting

    @property
    def waiting(self) -> "asyncio.Task[int] | None":
        return self._waiting if self._waiting is not None and not self._waiting.done() else None

    async def close(self) -> None:
        """Give back what nobody has claimed."""
        pulls = [*self._pulls, *([self._waiting] if self._waiting is not None else [])]
        for pulling in pulls:
            pulling.cancel()
        if pulls:
            await asyncio.wait(pulls)
        await self.leave()

    async def leave(self) -> None:
        self.is_left = True
        returned = [arrived.ack_id for arrived in self.here()]
        self._buffers.clear()
        self._held.clear()
        if returned:
            await self._service.set_deadline(self.place.subscription, returned, 0)

    def drop(self) -> list[str]:
        """Forget what is here; the ids to acknowledge."""
        dropped = [arrived.ack_id for arrived in self.here()]
        self._buffers.clear()
        self._held.clear()
        return dropped

    async def _pull(self, count: int, *, waits: bool) -> int:
        began = monotonic()
        pulled = await self._service.pull(self.place.subscription, count, waits=waits)
        if not pulled:
            return 0
        if waits:
            began = monotonic()  # the deadline begins with the delivery, and that was just now
        deadline = began + min(self._ack_deadline_s, self._given_s)
        ids = [one.ack_id for one in pulled]
        if self.is_left and waits:
            await self._service.set_deadline(self.place.subscription, ids, 0)
            return 0
        if self._given_s != self._ack_deadline_s:
            began = monotonic()
            await self._service.set_deadline(self.place.subscription, ids, self._ack_deadline_s)
            deadline = began + self._ack_deadline_s
        for one in pulled:
            await self._admit(one, deadline)
        self._on_arrival()
        return len(pulled)

    async def _admit(self, received: Received, deadline: float) -> None:
        opened, mark = unseal(received.data), posts.read_mark(received.attributes)
        starts = max(mark.starts, opened.starts)
        ran = mark.ran or opened.redelivered
        mark = Mark(starts, ran, mark.due)
        arrived = Arrived(
            opened.message, received.ack_id, mark, ran or received.deliveries > 1, received.data, deadline
        )
        wait_s = mark.due - cluster_now() if mark.due else 0.0
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
        published = posts.moment(received.published)
        if published and cluster_now() - published > FRESH_S:
            fresh = posts.again(arrived.data, self.place.queue, self._service.names, arrived.mark)
            if not await self._service.try_send([fresh]):
                await self._service.acknowledge(self.place.subscription, [arrived.ack_id])
                return
        later = max(api.ACK_DEADLINE_MIN_S, min(ceil(wait_s), api.ACK_DEADLINE_MAX_S))
        await self._service.set_deadline(self.place.subscription, [arrived.ack_id], later)
