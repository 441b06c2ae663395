"""Claims: which owner holds which messages, on one connection.

The connection is the lease: when it ends, RabbitMQ requeues its messages, flagged as redelivered. In addition
an owner that is silent for `lease_s` while its connection lives loses its claims, as on every broker.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import TypeVar

import msgspec

from umbel.brokers.amqp.consumer import BARRIERS_MAX, Arrived, Consumer
from umbel.brokers.amqp.frames import Incoming
from umbel.brokers.amqp.handshake import REPLY_TIMEOUT_S, ChannelClosed, QueueRefused
from umbel.brokers.amqp.link import Link
from umbel.brokers.amqp.signature_view import SignatureUse
from umbel.brokers.amqp.streams import StartsView
from umbel.brokers.interface import Delivery, Tag
from umbel.brokers.links import Owner, next_in_turn
from umbel.clock import cluster_now

T = TypeVar("T")

claim_tags = count(1)


class Claimed(msgspec.Struct):
    """One claim that is in force."""

    owner: str
    consumer: Consumer
    delivery_tag: int
    delivery: Delivery
    starts: int
    is_again: bool  # flagged as redelivered by RabbitMQ: another owner had it before
    since: float  # when it was learned that it may have run; 0: it has not
    used: SignatureUse | None = None  # the entry by which the claim has its signature


class AmqpOwner(Owner):
    """An owner with its consumers."""

    def __init__(self, name: str, ends: float) -> None:
        super().__init__(name, ends)
        self.consumers: dict[str, Consumer] = {}
        self.waits = False  # it waits between claims, and an arrival wakes it
        self.was_served = False  # its last claim found something
        self.lock = asyncio.Lock()


class Claims:
    """The claims on one connection. `on_deleted` gets each queue that was deleted while it was consumed, and
    the claims on it.
    """

    def __init__(
        self,
        link: Link,
        lease_s: float,
        *,
        starts: StartsView,
        prefetch_floor: int = 0,
        needs_own_limit: Callable[[str], bool],
        expires_all: Callable[[str], bool] = lambda _: False,
        on_deleted: Callable[[str, set[Tag]], None],
        may_park: Callable[[], bool] = lambda: True,
    ) -> None:
        self.active: dict[Tag, Claimed] = {}
        self.lost = 0  # taken from silent owners and not reported yet
        self.lost_uses: list[SignatureUse] = []  # the signatures of claims that ended without a verdict
        self.on_lost_uses: Callable[[], None] = lambda: None
        self._link = link
        self._lease_s = lease_s
        self._starts = starts
        self._prefetch_floor = prefetch_floor
        self._needs_own_limit = needs_own_limit
        self._expires_all = expires_all
        self._on_deleted = on_deleted
        self._may_park = may_park
        self._owners: dict[str, AmqpOwner] = {}
        self._arrivals = asyncio.Event()

    # -- owners ----------------------------------------------------------------------------------

    def touch(self, name: str) -> None:
        """Extend the lease of an owner that is alive."""
        loop = asyncio.get_running_loop()
        owner = self._owners.get(name)
        if owner is not None:
            owner.ends = loop.time() + self._lease_s
            return
        owner = self._owners[name] = AmqpOwner(name, loop.time() + self._lease_s)
        loop.call_at(owner.ends, self._watch, owner)

    def renew(self, name: str) -> bool:
        """Extend the owner's lease; False if it had ended before. A loss is reported once."""
        self.touch(name)
        return self._owners[name].had_lease()

    async def forget(self, name: str) -> int:
        """End the owner's consumers and claims; return the number of returned claims."""
        owner = self._owners.pop(name, None)
        if owner is None:
            return 0
        held, ending = self._release(owner)
        if ending:
            await asyncio.wait(ending, timeout=REPLY_TIMEOUT_S)
        return held

    @asynccontextmanager
    async def leaving(self, name: str, queue: str, *, is_busy: bool) -> AsyncIterator[Sequence[Arrived]]:
        """Yield the messages that the owner has fetched and not claimed; they return to the queue at the end
        of the block.
        """
        owner = self._owners.get(name)
        if owner is None or (consumer := owner.consumers.get(queue)) is None or not consumer.is_open:
            yield ()
            return
        async with owner.lock:
            fetched = await consumer.stop_fetching(is_busy=is_busy)
            try:
                yield fetched
            finally:
                if consumer.is_open:
                    for arrived in fetched:
                        consumer.give_back(arrived.delivery_tag)
                    if is_busy:
                        await consumer.fetch_last()

    def queues_of(self, name: str) -> list[str]:
        """Return the queues that the owner consumes."""
        owner = self._owners.get(name)
        return [] if owner is None else list(owner.consumers)

    def consumers(self) -> list[Consumer]:
        """Return the open consumers of all owners."""
        return [
            consumer
            for owner in self._owners.values()
            for consumer in owner.consumers.values()
            if consumer.is_open
        ]

    def _watch(self, owner: AmqpOwner) -> None:
        if self._owners.get(owner.name) is not owner or self._link.error is not None:
            return
        loop = asyncio.get_running_loop()
        if loop.time() < owner.ends:
            loop.call_at(owner.ends, self._watch, owner)
            return
        del self._owners[owner.name]
        held, _ = self._release(owner)
        self.lost += held

    def _release(self, owner: AmqpOwner) -> tuple[int, list[asyncio.Future[Incoming]]]:
        ended = [tag for tag, claimed in self.active.items() if claimed.owner == owner.name]
        self._end_without_verdict(ended)
        ending = [consumer.release() for consumer in owner.consumers.values()]
        return len(ended), [future for future in ending if future is not None]

    # -- claiming --------------------------------------------------------------------------------

    async def claim(self, name: str, queues: Sequence[str], limit: int) -> list[tuple[Consumer, Arrived]]:
        """Take up to `limit` messages for this owner; `deliver` turns them into claims.

        While enough messages have arrived, or the server could have sent more and had none, this only takes
        from a buffer. Otherwise the server is asked until it is certain which messages there are.
        """
        self.touch(name)
        owner = self._owners[name]
        async with owner.lock:
            consumers = [await self._consumer(owner, queue) for queue in queues]
            here = sum(consumer.buffered for consumer in consumers)
            streams = all(consumer.streams(limit) for consumer in consumers)
            if here < limit and not (here and streams):
                await self._fetch(consumers, limit)
            taken = self._pick(owner, consumers, limit)
            owner.was_served = bool(taken)
            return taken

    def will_be_woken(self, name: str, queues: Sequence[str], limit: int) -> bool:
        """Whether a claim would find nothing and need not ask the server, as after a claim that found
        something.

        The server may send as much as is wanted, and the owner waits between its claims: a message on its way
        wakes it.
        """
        owner = self._owners.get(name)
        if owner is None or not owner.waits or not owner.was_served or not limit:
            return False
        consumers = [owner.consumers.get(queue) for queue in queues]
        owner.was_served = any(consumer is not None and consumer.buffered for consumer in consumers)
        return not owner.was_served and all(
            consumer is not None and consumer.is_open and consumer.streams(limit) for consumer in consumers
        )

    def has_arrived(self, name: str, queues: Sequence[str]) -> bool:
        """Whether a claim would be served from the buffers, and nothing waits to be parked."""
        owner = self._owners.get(name)
        if owner is None:
            return False
        consumers = [owner.consumers.get(queue) for queue in queues]
        return any(consumer is not None and consumer.buffered for consumer in consumers) and not any(
            consumer is None or consumer.early or not consumer.is_open for consumer in consumers
        )

    def put_back(self, taken: Sequence[tuple[Consumer, Arrived]]) -> None:
        """Put messages back into the buffers, because the claimer was cancelled."""
        for consumer, arrived in reversed(taken):
            consumer.undo_take(arrived)

    def deliver(
        self,
        name: str,
        taken: Sequence[tuple[Consumer, Arrived]],
        unstarted: Collection[tuple[str, str]] = (),
    ) -> list[Delivery]:
        """Return the deliveries of new claims.

        `unstarted`: by queue and id, redelivered messages that are known not to have started.
        """
        unstarted = set(unstarted)
        deliveries = []
        active, known, now = self.active, self._starts, cluster_now()
        may_be_copies = known.knows_copies
        for consumer, arrived in taken:
            message, starts, since = arrived.message, 0, 0.0
            if may_be_copies and known.is_copy(consumer.queue, message):
                since = now
            elif arrived.state.ran:
                since = arrived.state.since or now
            if arrived.redelivered:
                key = (consumer.queue, message.correlation_id)
                if key not in unstarted or known.count(*key):
                    since = now
                unstarted.discard(key)  # each record counts for one message
            if redelivered := since > 0:
                starts = known.count(consumer.queue, message.correlation_id)
            tag = next(claim_tags)
            delivery = Delivery(tag, consumer.queue, message, starts, redelivered)
            active[tag] = Claimed(
                name, consumer, arrived.delivery_tag, delivery, starts, arrived.redelivered, since
            )
            deliveries.append(delivery)
        return deliveries

    async def _consumer(self, owner: AmqpOwner, queue: str) -> Consumer:
        found = owner.consumers.get(queue)
        if found is not None and found.is_open:
            return found
        if found is not None:
            self._forget_claims_of(found)
        consumer = Consumer(
            self._link,
            queue,
            self._arrivals.set,
            self._deleted,
            per_consumer=self._needs_own_limit(queue),
            prefetch_floor=self._prefetch_floor,
            expires_all=self._expires_all(queue),
        )
        await consumer.open()
        owner.consumers[queue] = consumer
        return consumer

    def _forget_claims_of(self, consumer: Consumer) -> set[Tag]:
        ended = {tag for tag, claimed in self.active.items() if claimed.consumer is consumer}
        self._end_without_verdict(ended)
        return ended

    def _end_without_verdict(self, tags: Collection[Tag]) -> None:
        ended = [self.active.pop(tag) for tag in tags]
        if lost := [claimed.used for claimed in ended if claimed.used is not None]:
            self.lost_uses += lost
            self.on_lost_uses()

    def _deleted(self, consumer: Consumer) -> None:
        self._on_deleted(consumer.queue, self._forget_claims_of(consumer))

    async def _fetch(self, consumers: Sequence[Consumer], limit: int) -> None:
        """Let messages come until `limit` are here or the queues are empty."""
        for _ in range(BARRIERS_MAX):
            for consumer in consumers:
                await _for_queue(consumer, consumer.want(limit))
            ready = [await _for_queue(consumer, consumer.settled()) for consumer in consumers]
            if sum(consumer.buffered for consumer in consumers) >= limit or not any(ready):
                return

    def _pick(
        self, owner: AmqpOwner, consumers: list[Consumer], limit: int
    ) -> list[tuple[Consumer, Arrived]]:
        taken: list[tuple[Consumer, Arrived]] = []
        if len(consumers) == 1:
            (only,) = consumers
            for priority in sorted(only.priorities, reverse=True):
                taken += [(only, arrived) for arrived in only.take(priority, limit - len(taken))]
            return taken
        for priority in sorted(
            {each for consumer in consumers for each in consumer.priorities}, reverse=True
        ):
            while len(taken) < limit and (found := next_in_turn(owner, consumers, priority)):
                taken.append((consumers[found[0]], found[1]))
        return taken

    # -- waiting ---------------------------------------------------------------------------------

    def watches(self, queues: Sequence[str]) -> bool:
        """Whether an arrival in any of these queues would be noticed; a paused queue is not consumed."""
        fetching = {consumer.queue for consumer in self.consumers() if consumer.prefetch}
        return fetching.issuperset(queues)

    def wake(self) -> None:
        """Let waiting callers check again."""
        self._arrivals.set()

    def note_waiting(self, name: str) -> None:
        """Note that the owner waits between claims, and that an arrival wakes it."""
        if (owner := self._owners.get(name)) is not None:
            owner.waits = True

    async def wait(
        self, queues: Sequence[str], timeout_s: float, *, is_over: Callable[[], bool] = lambda: False
    ) -> None:
        """Return when something can be claimed or parked, a consumer ended, or `is_over` is true; at the
        latest after `timeout_s`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not is_over() and not self._anything(queues):
                    self._arrivals.clear()
                    await self._arrivals.wait()
        except TimeoutError:
            return

    def _anything(self, queues: Sequence[str]) -> bool:
        if self._link.error is not None:
            return True
        may_park = self._may_park()
        return any(
            consumer.buffered or (consumer.early and may_park) or not consumer.is_open
            for owner in self._owners.values()
            for queue in queues
            if (consumer := owner.consumers.get(queue)) is not None
        )


async def _for_queue(consumer: Consumer, asked: Awaitable[T]) -> T:
    """Name the queue in the error, so that the others can be consumed without it."""
    try:
        return await asked
    except ChannelClosed as refused:
        raise QueueRefused(consumer.queue, refused) from None
