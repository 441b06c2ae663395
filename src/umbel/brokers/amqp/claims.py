"""Claims: who holds which messages, on one connection.

The connection is the lease: when it ends, RabbitMQ requeues its messages, marked as
redelivered. On top of that an owner that falls silent for `lease_s` while its connection lives is
put out here, by its own broker, so that the promise is the one every broker makes.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from typing import TypeVar

import msgspec

from umbel.brokers.amqp.consumer import BARRIERS_MAX, Arrived, Consumer
from umbel.brokers.amqp.frames import Incoming
from umbel.brokers.amqp.handshake import REPLY_TIMEOUT_S
from umbel.brokers.amqp.link import Link
from umbel.brokers.amqp.refusals import ChannelClosed, QueueRefused
from umbel.brokers.interface import Delivery, Tag

UNRUN_MAX = 10_000
T = TypeVar("T")

_tags = count(1)


class Claimed(msgspec.Struct):
    """One claim that stands."""

    owner: str
    consumer: Consumer
    delivery_tag: int
    delivery: Delivery
    starts: int
    is_again: bool  # by RabbitMQ's word: somebody had it before
    mark: str = ""  # of the signature that it has used


class Owner:
    def __init__(self, name: str, deadline: float) -> None:
        self.name = name
        self.deadline = deadline
        self.is_new = True  # and its owner does not know yet
        self.consumers: dict[str, Consumer] = {}
        self.turn = -1  # the place of the queue that was served last
        self.waits = False  # it waits between claims, and what arrives wakes it
        self.was_served = False  # by its last claim
        self.lock = asyncio.Lock()


class Claims:
    """`on_deleted` gets each queue that was deleted while it was consumed, and the claims on it."""

    def __init__(
        self,
        link: Link,
        lease_s: float,
        *,
        starts_of: Callable[[str, str], int],
        prefetch_floor: int = 0,
        needs_own_limit: Callable[[str], bool],
        on_deleted: Callable[[str, set[Tag]], None],
    ) -> None:
        self.standing: dict[Tag, Claimed] = {}
        self.lost = 0  # taken from silent owners and not reported yet
        self._link = link
        self._lease_s = lease_s
        self._starts_of = starts_of
        self._prefetch_floor = prefetch_floor
        self._needs_own_limit = needs_own_limit
        self._on_deleted = on_deleted
        self._owners: dict[str, Owner] = {}
        self._unrun: dict[str, None] = {}
        self._arrivals = asyncio.Event()

    # -- owners ----------------------------------------------------------------------------------

    def touch(self, name: str) -> None:
        """The owner is alive."""
        loop = asyncio.get_running_loop()
        owner = self._owners.get(name)
        if owner is not None:
            owner.deadline = loop.time() + self._lease_s
            return
        owner = self._owners[name] = Owner(name, loop.time() + self._lease_s)
        loop.call_at(owner.deadline, self._watch, owner)

    def renew(self, name: str) -> bool:
        """The owner is alive; whether its lease was still valid. A loss is reported once."""
        self.touch(name)
        owner = self._owners[name]
        stood, owner.is_new = not owner.is_new, False
        return stood

    async def forget(self, name: str) -> int:
        owner = self._owners.pop(name, None)
        if owner is None:
            return 0
        held, ending = self._release(owner)
        if ending:
            await asyncio.wait(ending, timeout=REPLY_TIMEOUT_S)
        return held

    async def leave(self, name: str, queue: str) -> None:
        owner = self._owners.get(name)
        if owner is None or (consumer := owner.consumers.get(queue)) is None or not consumer.is_open:
            return
        async with owner.lock:
            for arrived in await consumer.pause():
                if not arrived.redelivered:
                    self.remember_unrun(arrived.message.correlation_id)

    def consumers(self) -> list[Consumer]:
        return [
            consumer
            for owner in self._owners.values()
            for consumer in owner.consumers.values()
            if consumer.is_open
        ]

    def _watch(self, owner: Owner) -> None:
        if self._owners.get(owner.name) is not owner or self._link.error is not None:
            return
        loop = asyncio.get_running_loop()
        if loop.time() < owner.deadline:
            loop.call_at(owner.deadline, self._watch, owner)
            return
        del self._owners[owner.name]
        held, _ = self._release(owner)
        self.lost += held

    def _release(self, owner: Owner) -> tuple[int, list[asyncio.Future[Incoming]]]:
        ended = [tag for tag, claimed in self.standing.items() if claimed.owner == owner.name]
        for tag in ended:
            del self.standing[tag]
        ending = [consumer.release() for consumer in owner.consumers.values()]
        return len(ended), [future for future in ending if future is not None]

    # -- claiming --------------------------------------------------------------------------------

    async def claim(self, name: str, queues: Sequence[str], limit: int) -> list[tuple[Consumer, Arrived]]:
        """Up to `limit` messages, taken for this owner; `deliver` makes them claims.

        While enough has arrived, or the server could have sent more and had none, this is only
        popping from a buffer. Otherwise the server is asked until it is certain what there is.
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
        """Whether a claim finds nothing and need not ask the server, as once after one that found something.

        The server may send as much as is wanted, and the owner waits between its claims: what is on its way
        wakes it.
        """
        owner = self._owners.get(name)
        if owner is None or not owner.waits or not owner.was_served or not limit:
            return False
        consumers = [owner.consumers.get(queue) for queue in queues]
        owner.was_served = any(one is not None and one.buffered for one in consumers)
        return not owner.was_served and all(
            one is not None and one.is_open and one.streams(limit) for one in consumers
        )

    def has_arrived(self, name: str, queues: Sequence[str]) -> bool:
        """Whether a claim would be served from here, and nothing waits to be parked."""
        owner = self._owners.get(name)
        if owner is None:
            return False
        consumers = [owner.consumers.get(queue) for queue in queues]
        return any(one is not None and one.buffered for one in consumers) and not any(
            one is None or one.early or not one.is_open for one in consumers
        )

    def put_back(self, taken: Sequence[tuple[Consumer, Arrived]]) -> None:
        """The claimer was cancelled: these wait here again."""
        for consumer, arrived in reversed(taken):
            consumer.untake(arrived)

    def deliver(self, name: str, taken: Sequence[tuple[Consumer, Arrived]]) -> list[Delivery]:
        deliveries = []
        standing = self.standing
        for consumer, arrived in taken:
            message, starts, redelivered = arrived.message, 0, arrived.redelivered or arrived.mark.ran
            if redelivered:
                key = message.correlation_id
                starts = self._starts_of(consumer.queue, key)
                unrun = self._unrun.pop(key, _NEVER) is None
                redelivered = starts > 0 or arrived.mark.ran or not unrun
            tag = next(_tags)
            delivery = Delivery(tag, consumer.queue, message, starts, redelivered)
            standing[tag] = Claimed(
                name, consumer, arrived.delivery_tag, delivery, starts, arrived.redelivered
            )
            deliveries.append(delivery)
        return deliveries

    def note_unrun(self, claimed: Claimed) -> None:
        """RabbitMQ will mark it redelivered; we know that it has not run."""
        if not claimed.delivery.redelivered:
            self.remember_unrun(claimed.delivery.message.correlation_id)

    def remember_unrun(self, message_id: str) -> None:
        if message_id:
            self._unrun[message_id] = None
            if len(self._unrun) > UNRUN_MAX:
                del self._unrun[next(iter(self._unrun))]

    async def _consumer(self, owner: Owner, queue: str) -> Consumer:
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
        )
        await consumer.open()
        owner.consumers[queue] = consumer
        return consumer

    def _forget_claims_of(self, consumer: Consumer) -> set[Tag]:
        ended = {tag for tag, claimed in self.standing.items() if claimed.consumer is consumer}
        for tag in ended:
            del self.standing[tag]
        return ended

    def _deleted(self, consumer: Consumer) -> None:
        self._on_deleted(consumer.queue, self._forget_claims_of(consumer))

    async def _fetch(self, consumers: Sequence[Consumer], limit: int) -> None:
        for _ in range(BARRIERS_MAX):
            for consumer in consumers:
                await _for_queue(consumer, consumer.want(limit))
            ready = [await _for_queue(consumer, consumer.settled()) for consumer in consumers]
            if sum(consumer.buffered for consumer in consumers) >= limit or not any(ready):
                return

    def _pick(self, owner: Owner, consumers: list[Consumer], limit: int) -> list[tuple[Consumer, Arrived]]:
        taken: list[tuple[Consumer, Arrived]] = []
        if len(consumers) == 1:
            (only,) = consumers
            for priority in sorted(only.priorities, reverse=True):
                taken += [(only, arrived) for arrived in only.take(priority, limit - len(taken))]
            return taken
        for priority in sorted({one for consumer in consumers for one in consumer.priorities}, reverse=True):
            while len(taken) < limit and (found := _next_in_turn(owner, consumers, priority)) is not None:
                taken.append(found)
        return taken

    # -- waiting ---------------------------------------------------------------------------------

    def watches(self, queues: Sequence[str]) -> bool:
        """Whether an arrival in any of these queues would be noticed: of a paused one, none comes here."""
        fetching = {consumer.queue for consumer in self.consumers() if consumer.prefetch}
        return fetching.issuperset(queues)

    def wake(self) -> None:
        """Who waits looks again."""
        self._arrivals.set()

    def note_waiting(self, name: str) -> None:
        if (owner := self._owners.get(name)) is not None:
            owner.waits = True

    async def wait(
        self, queues: Sequence[str], timeout_s: float, *, is_over: Callable[[], bool] = lambda: False
    ) -> None:
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
        return any(
            consumer.buffered or consumer.early or not consumer.is_open
            for owner in self._owners.values()
            for queue in queues
            if (consumer := owner.consumers.get(queue)) is not None
        )


async def _for_queue(consumer: Consumer, asked: Awaitable[T]) -> T:
    """Let the error name the queue, so that the others can be consumed without it."""
    try:
        return await asked
    except ChannelClosed as refused:
        raise QueueRefused(consumer.queue, refused) from None


def _next_in_turn(
    owner: Owner, consumers: Sequence[Consumer], priority: int
) -> tuple[Consumer, Arrived] | None:
    """From the first queue that has one, beginning after the queue that was served last."""
    for place in range(owner.turn + 1, owner.turn + 1 + len(consumers)):
        consumer = consumers[place % len(consumers)]
        for arrived in consumer.take(priority, 1):
            owner.turn = place % len(consumers)
            return consumer, arrived
    return None


_NEVER = object()
