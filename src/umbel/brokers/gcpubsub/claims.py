"""Claims: which worker holds which messages, until when, and how claims end.

The ack deadline is the lease at Pub/Sub. It is extended here while the owner is alive. A process that is dead
or cut off loses its messages when the deadline is over, after ten seconds at least. An owner that is silent
for `lease_s` while its process lives loses its claims, as on every broker.

Pub/Sub does not tell whether an acknowledgement came in time, except on exactly-once subscriptions. So a
claim counts as ended as soon as its deadline is over by this process's clock.

Everything that a verdict sends is published and confirmed before the message is acknowledged; a crash in
between repeats work. If the acknowledgement fails, the next verdict on the message does not send it again.
"""

import asyncio
import logging
from collections.abc import Sequence
from itertools import count
from time import monotonic

import msgspec

from umbel.brokers.gcpubsub import posts
from umbel.brokers.gcpubsub.consumer import Arrived, Consumer
from umbel.brokers.gcpubsub.posts import MessageState, Post
from umbel.brokers.gcpubsub.service import Service, run_together
from umbel.brokers.interface import Ack, Bury, Delivery, Refused, Return, Settled, Started, Tag, Verdict
from umbel.brokers.links import Owner, next_in_turn
from umbel.errors import BrokerError, BrokerRefused
from umbel.wire.envelope_redis import seal
from umbel.wire.message import Outgoing

log = logging.getLogger("umbel.brokers.gcpubsub")

LATE_WAIT_S = 0.05  # for a message that a waiting pull of this process is just receiving
RENEWALS_PER_DEADLINE = 4
NO_RESULTS = "Pub/Sub stores no results; set 'backend'"

_tags = count(1)


class Claimed(msgspec.Struct):
    """One claim that is in force."""

    owner: str
    consumer: Consumer
    arrived: Arrived
    starts: int
    is_posted: bool = False  # its verdict's messages were sent, but the acknowledgement failed


class Claims:
    """The claims of this process, and the consumers that feed them."""

    def __init__(self, service: Service, lease_s: float) -> None:
        self.active: dict[Tag, Claimed] = {}
        self.lost = 0  # claims of silent owners that ended and are not reported yet
        self._service = service
        self._lease_s = lease_s
        self._owners: dict[str, Owner] = {}
        self._consumers: dict[str, Consumer] = {}
        self._arrivals = asyncio.Event()
        self._renewed_at = monotonic()

    # -- owners ----------------------------------------------------------------------------------

    def touch(self, name: str) -> Owner:
        """Extend the lease of an owner that is alive."""
        ends = monotonic() + self._lease_s
        owner = self._owners.get(name)
        if owner is None:
            owner = self._owners[name] = Owner(name, ends)
        owner.ends = ends
        return owner

    async def forget(self, name: str) -> int:
        """End the owner's claims; return the number of returned messages."""
        self._owners.pop(name, None)
        return await self._release({name})

    async def run(self) -> None:
        """End the claims of silent owners and extend the others' deadlines, while the broker is open."""
        deadline_s = self._service.topology.ack_deadline_s
        while True:
            await asyncio.sleep(min(self._lease_s, deadline_s) / RENEWALS_PER_DEADLINE)
            try:
                await self.end_silent()
                if monotonic() - self._renewed_at > deadline_s / RENEWALS_PER_DEADLINE:
                    await self._extend_deadlines()
            except BrokerError as error:
                log.warning(
                    "cannot extend the ack deadlines of messages; retrying", extra={"why": str(error)}
                )

    async def end_silent(self) -> None:
        """End the claims of owners whose leases are over, and return their messages."""
        now = monotonic()
        silent = {name for name, owner in self._owners.items() if owner.ends < now}
        for name in silent:
            del self._owners[name]
        if silent:
            self.lost += await self._release(silent)

    async def _extend_deadlines(self) -> None:
        """Extend the deadlines of all messages that this process has.

        A new deadline counts from before the request, because it is unknown when Pub/Sub has handled it.
        """
        self._end_late()
        began = self._renewed_at = monotonic()
        deadline_s = self._service.topology.ack_deadline_s
        held: dict[Consumer, list[Arrived]] = {}
        for claimed in self.active.values():
            held.setdefault(claimed.consumer, []).append(claimed.arrived)
        for consumer in self._consumers.values():
            held.setdefault(consumer, []).extend(consumer.unclaimed())
        for consumer, arrived in held.items():
            ids = [message.ack_id for message in arrived if message.deadline > began]
            if not ids:
                continue
            late = await self._service.set_deadline(consumer.place.subscription, ids, deadline_s)
            for message in arrived:
                is_late = message.ack_id in late
                message.deadline = 0.0 if is_late else max(message.deadline, began + deadline_s)

    def _end_late(self) -> None:
        """End claims whose deadline is over: Pub/Sub redelivers their messages."""
        now = monotonic()
        for tag in [tag for tag, claimed in self.active.items() if claimed.arrived.deadline <= now]:
            claimed = self.active.pop(tag)
            if (owner := self._owners.get(claimed.owner)) is not None:
                owner.is_new = True
            self.lost += 1

    async def _release(self, names: set[str]) -> int:
        ended = {tag: claimed for tag, claimed in self.active.items() if claimed.owner in names}
        for tag in ended:
            del self.active[tag]
        await self._give_back(list(ended.values()))
        return len(ended)

    async def _give_back(self, ended: Sequence[Claimed]) -> None:
        """Return messages. Pub/Sub counts deliveries, not starts, so a message with a counted start is
        published again with its count.
        """
        returned: dict[str, list[str]] = {}
        for claimed in ended:
            place, arrived = claimed.consumer.place, claimed.arrived
            if claimed.starts > arrived.state.starts:
                state = MessageState(claimed.starts, True)
                copy = posts.copy_of(arrived.data, place.queue, self._service.names, state)
                if not await self._service.try_send([copy]):
                    await self._service.acknowledge(place.subscription, [arrived.ack_id])
                    continue
            returned.setdefault(place.subscription, []).append(arrived.ack_id)
        for subscription, ids in returned.items():
            await self._service.set_deadline(subscription, ids, 0)

    # -- claiming --------------------------------------------------------------------------------

    async def consumer(self, queue: str) -> Consumer:
        """Return the consumer of this queue, created with the queue if needed."""
        found = self._consumers.get(queue)
        if found is None:
            given_s = await self._service.make_queue(queue)
            found = self._consumers.get(queue)
            if found is None:
                place = self._service.names.place(queue)
                found = Consumer(self._service, place, given_s, self._arrivals.set)
                self._consumers[queue] = found
        return found

    async def claim(self, name: str, queues: Sequence[str], limit: int) -> list[Delivery]:
        """Claim up to `limit` messages of these queues for the owner, without waiting."""
        owner = self.touch(name)
        self._end_late()
        consumers = [await self.consumer(queue) for queue in queues]
        if limit > 0:
            await run_together([each.fetch(limit) for each in consumers if each.buffered < limit])
            if not any(consumer.buffered for consumer in consumers):
                await self._wait_for_late(consumers)
        return self._deliver(owner, consumers, limit)

    async def _wait_for_late(self, consumers: Sequence[Consumer]) -> None:
        """Wait a moment for a pull in flight: Pub/Sub gives its message to that pull, not to this claim's."""
        pulls = [pull for consumer in consumers if (pull := consumer.waiting) is not None]
        if pulls:
            await asyncio.wait(pulls, timeout=LATE_WAIT_S, return_when=asyncio.FIRST_COMPLETED)

    def _deliver(self, owner: Owner, consumers: Sequence[Consumer], limit: int) -> list[Delivery]:
        deliveries: list[Delivery] = []
        for priority in sorted({each for consumer in consumers for each in consumer.priorities()}):
            while len(deliveries) < limit and (found := next_in_turn(owner, consumers, priority)):
                consumer, arrived, tag = consumers[found[0]], found[1], next(_tags)
                starts = arrived.state.starts
                self.active[tag] = Claimed(owner.name, consumer, arrived, starts)
                queue = consumer.place.queue
                deliveries.append(Delivery(tag, queue, arrived.message, starts, arrived.redelivered))
        return deliveries

    def find(self, tag: Tag) -> Claimed | None:
        """Return the claim, if it is in force."""
        claimed = self.active.get(tag)
        return claimed if claimed is not None and claimed.arrived.deadline > monotonic() else None

    # -- waiting and leaving ---------------------------------------------------------------------

    async def wait(self, queues: Sequence[str], timeout_s: float) -> None:
        """Return when a message has arrived, at the latest after `timeout_s`; raise what the pulls raise."""
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
                    for task in done:
                        task.result()  # raises a refusal to the caller
        except TimeoutError:
            return

    async def leave(self, queue: str) -> None:
        """Return the messages of the queue that were fetched and not claimed."""
        if (consumer := self._consumers.get(queue)) is not None:
            await consumer.leave()

    def drop_waiting(self, queue: str) -> list[Arrived]:
        """Drop the messages that were fetched and not claimed; the caller acknowledges them."""
        consumer = self._consumers.get(queue)
        return [] if consumer is None else consumer.drop()

    async def close(self) -> None:
        """Return all messages that are here, claimed or not."""
        for consumer in self._consumers.values():
            await consumer.close()
        await self._give_back(list(self.active.values()))
        self.active.clear()


# ---- verdicts --------------------------------------------------------------------------------------


async def settle(service: Service, claims: Claims, batch: Sequence[Verdict], now: float) -> Settled:
    """Send everything that the verdicts ask for, then acknowledge the messages."""
    judged = _Judgement(service, now)
    for verdict in batch:
        claimed = None if verdict.tag in judged.finished else claims.find(verdict.tag)
        if claimed is None:
            judged.conflicts.add(verdict.tag)
        else:
            await judged.add(verdict, claimed)
            claims.touch(claimed.owner)
    await judged.send()
    late = await judged.acknowledge(claims)
    return Settled(judged.applied - len(late), frozenset(judged.conflicts | late), tuple(judged.refused))


async def bury(service: Service, refused: Sequence[Refused], now: float) -> None:
    """Make dead letters of the messages among these; raise BrokerRefused if one is refused."""
    letters = [
        _letter_of(refusal.part, refusal.reason, now)
        for refusal in refused
        if isinstance(refusal.part, Outgoing)
    ]
    if letters:
        await service.make_dead()
        await _send_all(service, letters)


class _Judgement:
    """What a batch of verdicts sends and acknowledges."""

    def __init__(self, service: Service, now: float) -> None:
        self.applied = 0
        self.conflicts: set[Tag] = set()
        self.refused: list[Refused] = []
        self.finished: dict[Tag, Claimed] = {}
        self._posts: list[Post] = []
        self._follow_ups: dict[int, Outgoing] = {}  # by the places of their posts
        self._service = service
        self._now = now

    async def add(self, verdict: Verdict, claimed: Claimed) -> None:
        """Sort a verdict into what is to be sent and what ends."""
        self.applied += 1
        if isinstance(verdict, Started):
            claimed.starts += 1
            return
        self.finished[verdict.tag] = claimed
        if claimed.is_posted:
            return
        arrived, queue = claimed.arrived, claimed.consumer.place.queue
        if isinstance(verdict, Return):
            starts = max(0, claimed.starts + int(verdict.charged))
            ran = arrived.redelivered or verdict.ran or starts > 0
            state = MessageState(starts, ran, max(verdict.not_before, 0.0))
            self._posts.append(posts.copy_of(arrived.data, queue, self._service.names, state))
            return
        self.refused += [Refused(result, NO_RESULTS) for result in verdict.results]
        await self._add_follow_ups(verdict.follow_ups)
        if isinstance(verdict, Bury):
            starts = claimed.starts + int(verdict.charged)
            self._posts.append(posts.letter(queue, arrived.data, verdict.reason, starts, self._now))
        else:
            assert isinstance(verdict, Ack)

    async def _add_follow_ups(self, follow_ups: Sequence[Outgoing]) -> None:
        refused = await self._service.make_for(follow_ups) if follow_ups else {}
        for place, why in refused.items():
            self._refuse(follow_ups[place], why)
        for place, outgoing in enumerate(follow_ups):
            if place not in refused:
                try:
                    post = posts.task(outgoing, self._service.names, self._now)
                except BrokerRefused as error:
                    self._refuse(outgoing, str(error))
                else:
                    self._follow_ups[len(self._posts)] = outgoing
                    self._posts.append(post)

    def _refuse(self, outgoing: Outgoing, why: str) -> None:
        self.refused.append(Refused(outgoing, why))
        self._posts.append(_letter_of(outgoing, why, self._now))

    async def send(self) -> None:
        """Send the posts; follow-ups that Pub/Sub refuses become dead letters."""
        if self._posts:
            await self._service.make_dead()
            letters: list[Post] = []
            for place, why in (await self._service.try_send(self._posts)).items():
                if (follow_up := self._follow_ups.get(place)) is None:
                    raise BrokerRefused(why)
                self.refused.append(Refused(follow_up, why))
                letters.append(_letter_of(follow_up, why, self._now))
            if letters:
                await _send_all(self._service, letters)
        for claimed in self.finished.values():
            claimed.is_posted = True

    async def acknowledge(self, claims: Claims) -> set[Tag]:
        """Acknowledge the finished messages and end their claims; return those that were too late."""
        by_subscription: dict[str, dict[str, Tag]] = {}
        for tag, claimed in self.finished.items():
            ids = by_subscription.setdefault(claimed.consumer.place.subscription, {})
            ids[claimed.arrived.ack_id] = tag
        late: set[Tag] = set()
        for subscription, ids in by_subscription.items():
            late |= {ids[ack_id] for ack_id in await self._service.acknowledge(subscription, list(ids))}
            for tag in ids.values():
                claims.active.pop(tag, None)
        return late


async def _send_all(service: Service, letters: Sequence[Post]) -> None:
    if problems := await service.try_send(letters):
        raise BrokerRefused(next(iter(problems.values())))


def _letter_of(outgoing: Outgoing, reason: str, now: float) -> Post:
    letter = outgoing.as_letter()
    message = letter.message
    data = (
        seal(message, letter.queue, "", exchange=message.exchange, routing_key=message.routing_key)
        if message.headers
        else message.body
    )
    return posts.letter(letter.queue, data, reason, 0, now)
