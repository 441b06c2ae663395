"""Claims: who holds which messages, until when.

The ack deadline is the lease at Pub/Sub: it is prolonged here while the owner is alive, and a process that
is dead or cut off loses its messages when the deadline is over, ten seconds at least. On top of that an
owner that falls silent for `lease_s` while its process lives is put out here, so that the promise is the
one every broker makes.

Pub/Sub does not say whether an acknowledgement came in time, except on exactly-once subscriptions. So a
claim counts as ended as soon as its deadline is over by this process's clock.
"""

import asyncio
import logging
from collections.abc import Sequence
from itertools import count
from time import monotonic

import msgspec

from umbel.brokers.gcpubsub import posts
from umbel.brokers.gcpubsub.consumer import Arrived, Consumer
from umbel.brokers.gcpubsub.posts import Mark
from umbel.brokers.gcpubsub.service import Service, together
from umbel.brokers.interface import Delivery, Tag
from umbel.errors import BrokerError

log = logging.getLogger("umbel.brokers.gcpubsub")

LATE_WAIT_S = 0.05  # for a message that an idle pull of this process has just been given
RENEWALS_PER_DEADLINE = 4

_tags = count(1)


class Claimed(msgspec.Struct):
    """One claim that stands."""

    owner: str
    consumer: Consumer
    arrived: Arrived
    starts: int
    is_posted: bool = False  # what its verdict sends was sent, and only its acknowledgement failed


class Owner:
    def __init__(self, name: str, ends: float) -> None:
        self.name = name
        self.ends = ends
        self.is_new = True  # and its owner does not know yet
        self.turn = -1  # the place of the queue that was served last


class Claims:
    def __init__(self, service: Service, lease_s: float) -> None:
        self.standing: dict[Tag, Claimed] = {}
        self.lost = 0  # taken from silent owners and not reported yet
        self._service = service
        self._lease_s = lease_s
        self._owners: dict[str, Owner] = {}
        self._consumers: dict[str, Consumer] = {}
        self._arrivals = asyncio.Event()
        self._renewed_at = monotonic()

    # -- owners ----------------------------------------------------------------------------------

    def touch(self, name: str) -> Owner:
        """The owner is alive."""
        ends = monotonic() + self._lease_s
        owner = self._owners.get(name)
        if owner is None:
            owner = self._owners[name] = Owner(name, ends)
        owner.ends = ends
        return owner

    def renew(self, name: str) -> bool:
        """The owner is alive; whether its lease was still valid. A loss is reported once."""
        owner = self.touch(name)
        stood, owner.is_new = not owner.is_new, False
        return stood

    async def forget(self, name: str) -> int:
        self._owners.pop(name, None)
        return await self._release({name})

    async def keep(self) -> None:
        """Put out the silent and prolong what the others hold, for as long as the broker is open."""
        deadline_s = self._service.topology.ack_deadline_s
        while True:
            await asyncio.sleep(min(self._lease_s, deadline_s) / RENEWALS_PER_DEADLINE)
            try:
                await self.put_out_silent()
                if monotonic() - self._renewed_at > deadline_s / RENEWALS_PER_DEADLINE:
                    await self.prolong()
            except BrokerError as error:
                log.warning("cannot prolong the deadlines of messages; retrying", extra={"why": str(error)})

    async def put_out_silent(self) -> None:
        now = monotonic()
        silent = {name for name, owner in self._owners.items() if owner.ends < now}
        for name in silent:
            del self._owners[name]
        if silent:
            self.lost += await self._release(silent)

    async def prolong(self) -> None:
        """Extend the deadlines of all messages held here."""
        self._end_late()
        began = self._renewed_at = monotonic()
        deadline_s = self._service.topology.ack_deadline_s
        held: dict[Consumer, list[Arrived]] = {}
        for claimed in self.standing.values():
            held.setdefault(claimed.consumer, []).append(claimed.arrived)
        for consumer in self._consumers.values():
            held.setdefault(consumer, []).extend(consumer.here())
        for consumer, arrived in held.items():
            ids = [one.ack_id for one in arrived if one.deadline > began]
            if not ids:
                continue
            late = await self._service.set_deadline(consumer.place.subscription, ids, deadline_s)
            for one in arrived:
                one.deadline = 0.0 if one.ack_id in late else max(one.deadline, began + deadline_s)

    def _end_late(self) -> None:
        """Claims whose deadline is over are Pub/Sub's again."""
        now = monotonic()
        for tag in [tag for tag, one in self.standing.items() if one.arrived.deadline <= now]:
            claimed = self.standing.pop(tag)
            if (owner := self._owners.get(claimed.owner)) is not None:
                owner.is_new = True
            self.lost += 1

    async def _release(self, names: set[str]) -> int:
        ended = {tag: one for tag, one in self.standing.items() if one.owner in names}
        for tag in ended:
            del self.standing[tag]
        await self._give_back(list(ended.values()))
        return len(ended)

    async def _give_back(self, ended: Sequence[Claimed]) -> None:
        """A start that was counted here goes with a new copy; Pub/Sub counts deliveries, not starts."""
        returned: dict[str, list[str]] = {}
        for claimed in ended:
            subscription = claimed.consumer.place.subscription
            if claimed.starts > claimed.arrived.mark.starts:
                copy = posts.again(
                    claimed.arrived.data,
                    claimed.consumer.place.queue,
                    self._service.names,
                    Mark(claimed.starts, True),
                )
                if not await self._service.try_send([copy]):
                    await self._service.acknowledge(subscription, [claimed.arrived.ack_id])
                    continue
            returned.setdefault(subscription, []).append(claimed.arrived.ack_id)
        for subscription, ids in returned.items():
            await self._service.set_deadline(subscription, ids, 0)

    # -- claiming --------------------------------------------------------------------------------

    async def consumer(self, queue: str) -> Consumer:
        found = self._consumers.get(queue)
        if found is None:
            given_s = await self._service.make_queue(queue)
            found = self._consumers.get(queue)
            if found is None:
                place = self._service.names.place(queue)
                deadline_s = self._service.topology.ack_deadline_s
                found = Consumer(self._service, place, deadline_s, given_s, self._arrivals.set)
                self._consumers[queue] = found
        return found

    async def claim(self, name: str, queues: Sequence[str], limit: int) -> list[Delivery]:
        owner = self.touch(name)
        self._end_late()
        consumers = [await self.consumer(queue) for queue in queues]
        if limit > 0:
            await together([one.fetch(limit) for one in consumers if one.buffered < limit])
            if not any(consumer.buffered for consumer in consumers):
                await self._wait_for_late(consumers)
        return self._deliver(owner, consumers, limit)

    async def _wait_for_late(self, consumers: Sequence[Consumer]) -> None:
        pulls = [pull for consumer in consumers if (pull := consumer.waiting) is not None]
        if pulls:
            await asyncio.wait(pulls, timeout=LATE_WAIT_S, return_when=asyncio.FIRST_COMPLETED)

    def _deliver(self, owner: Owner, consumers: Sequence[Consumer], limit: int) -> list[Delivery]:
        deliveries: list[Delivery] = []
        for priority in sorted({one for consumer in consumers for one in consumer.priorities()}):
            while len(deliveries) < limit:
                found = _next_in_turn(owner, consumers, priority)
                if found is None:
                    break
                consumer, arrived = found
                tag = next(_tags)
                self.standing[tag] = Claimed(owner.name, consumer, arrived, arrived.mark.starts)
                deliveries.append(
                    Delivery(
                        tag, consumer.place.queue, arrived.message, arrived.mark.starts, arrived.redelivered
                    )
                )
        return deliveries

    def find(self, tag: Tag) -> Claimed | None:
        """The claim, if it stands."""
        claimed = self.standing.get(tag)
        return claimed if claimed is not None and claimed.arrived.deadline > monotonic() else None

    # -- waiting and leaving -----------------------------------------------------------------------

    async def wait(self, queues: Sequence[str], timeout_s: float) -> None:
        consumers = [await self.consumer(queue) for queue in queues]
        try:
            async with asyncio.timeout(timeout_s):
                while not any(consumer.buffered for consumer in consumers):
                    self._arrivals.clear()
                    pulls = []
                    for consumer in consumers:
                        consumer.is_left = False
                        pulls.append(consumer.wait())
                    arrival = asyncio.create_task(self._arrivals.wait())
                    try:
                        done, _ = await asyncio.wait([arrival, *pulls], return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        arrival.cancel()
                    for one in done:
                        one.result()  # a refusal is the caller's to hear
        except TimeoutError:
            return

    async def leave(self, queue: str) -> None:
        if (consumer := self._consumers.get(queue)) is not None:
            await consumer.leave()

    def drop_waiting(self, queue: str) -> list[str]:
        consumer = self._consumers.get(queue)
        return [] if consumer is None else consumer.drop()

    async def close(self) -> None:
        for consumer in self._consumers.values():
            await consumer.close()
        await self._give_back(list(self.standing.values()))
        self.standing.clear()


def _next_in_turn(
    owner: Owner, consumers: Sequence[Consumer], priority: int
) -> tuple[Consumer, Arrived] | None:
    """From the first queue that has one, beginning after the queue that was served last."""
    for place in range(owner.turn + 1, owner.turn + 1 + len(consumers)):
        consumer = consumers[place % len(consumers)]
        if (arrived := consumer.take(priority)) is not None:
            owner.turn = place % len(consumers)
            return consumer, arrived
    return None
