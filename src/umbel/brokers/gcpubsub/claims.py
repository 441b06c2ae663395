"""Claims: which worker holds which messages, until when, and how claims end.

The ack deadline is the lease at Pub/Sub. It is extended here while the owner is alive; a process that is dead
or cut off loses its messages when the deadline is over, after ten seconds at least. An owner that is silent
for `lease_s` while its process lives loses its claims here, as on every broker.

Pub/Sub does not say whether an acknowledgement came in time, except on exactly-once subscriptions. So a claim
counts as ended as soon as its deadline is over by this process's clock.

Everything that a verdict sends is published and confirmed before the message is acknowledged; a crash in
between repeats work. A verdict whose acknowledgement failed does not send again what it has sent.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from time import monotonic

import msgspec

from umbel.brokers.gcpubsub import posts
from umbel.brokers.gcpubsub.consumer import Arrived, Consumer
from umbel.brokers.gcpubsub.posts import Mark, Post
from umbel.brokers.gcpubsub.service import Service, run_together
from umbel.brokers.interface import Ack, Bury, Delivery, Refused, Return, Settled, Started, Tag, Verdict
from umbel.errors import BrokerError, BrokerRefused
from umbel.wire.envelope_redis import seal
from umbel.wire.message import Outgoing

# ---- claims ----------------------------------------------------------------------------------------

log = logging.getLogger("umbel.brokers.gcpubsub")

LATE_WAIT_S = 0.05  # for a message that a waiting pull of this process is just receiving
RENEWALS_PER_DEADLINE = 4

_tags = count(1)


class Claimed(msgspec.Struct):
    """One claim that is in force."""

    owner: str
    consumer: Consumer
    arrived: Arrived
    starts: int
    is_posted: bool = False  # what its verdict sends was sent, but the acknowledgement failed


class Owner:
    """A worker that claims messages, and when its lease ends."""

    def __init__(self, name: str, ends: float) -> None:
        self.name = name
        self.ends = ends
        self.is_new = True  # its lease is new, which was not reported to the owner yet
        self.turn = -1  # the place of the queue that was served last


class Claims:
    """The claims of this process, and the consumers that feed them."""

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
        """The owner is alive: extend its lease."""
        ends = monotonic() + self._lease_s
        owner = self._owners.get(name)
        if owner is None:
            owner = self._owners[name] = Owner(name, ends)
        owner.ends = ends
        return owner

    def renew(self, name: str) -> bool:
        """Extend the owner's lease; False if it had ended before. A loss is reported once."""
        owner = self.touch(name)
        stood, owner.is_new = not owner.is_new, False
        return stood

    async def forget(self, name: str) -> int:
        """End the owner's claims; how many messages were returned."""
        self._owners.pop(name, None)
        return await self._release({name})

    async def keep(self) -> None:
        """End the claims of silent owners and extend the others' deadlines, for as long as the broker is
        open.
        """
        deadline_s = self._service.topology.ack_deadline_s
        while True:
            await asyncio.sleep(min(self._lease_s, deadline_s) / RENEWALS_PER_DEADLINE)
            try:
                await self.put_out_silent()
                if monotonic() - self._renewed_at > deadline_s / RENEWALS_PER_DEADLINE:
                    await self.prolong()
            except BrokerError as error:
                log.warning(
                    "cannot extend the ack deadlines of messages; retrying", extra={"why": str(error)}
                )

    async def put_out_silent(self) -> None:
        """End the claims of owners whose leases are over, and return their messages."""
        now = monotonic()
        silent = {name for name, owner in self._owners.items() if owner.ends < now}
        for name in silent:
            del self._owners[name]
        if silent:
            self.lost += await self._release(silent)

    async def prolong(self) -> None:
        """Extend the deadlines of all messages that this process has."""
        self._end_late()
        began = self._renewed_at = monotonic()
        deadline_s = self._service.topology.ack_deadline_s
        held: dict[Consumer, list[Arrived]] = {}
        for claimed in self.standing.values():
            held.setdefault(claimed.consumer, []).append(claimed.arrived)
        for consumer in self._consumers.values():
            held.setdefault(consumer, []).extend(consumer.here())
        for consumer, arrived in held.items():
            ids = [message.ack_id for message in arrived if message.deadline > began]
            if not ids:
                continue
            late = await self._service.set_deadline(consumer.place.subscription, ids, deadline_s)
            for message in arrived:
                message.deadline = (
                    0.0 if message.ack_id in late else max(message.deadline, began + deadline_s)
                )

    def _end_late(self) -> None:
        """End claims whose deadline is over: Pub/Sub redelivers their messages."""
        now = monotonic()
        for tag in [tag for tag, each in self.standing.items() if each.arrived.deadline <= now]:
            claimed = self.standing.pop(tag)
            if (owner := self._owners.get(claimed.owner)) is not None:
                owner.is_new = True
            self.lost += 1

    async def _release(self, names: set[str]) -> int:
        ended = {tag: claimed for tag, claimed in self.standing.items() if claimed.owner in names}
        for tag in ended:
            del self.standing[tag]
        await self._give_back(list(ended.values()))
        return len(ended)

    async def _give_back(self, ended: Sequence[Claimed]) -> None:
        """Return messages. A start that was counted here goes with a new copy: Pub/Sub counts deliveries, not
        starts.
        """
        returned: dict[str, list[str]] = {}
        for claimed in ended:
            subscription = claimed.consumer.place.subscription
            if claimed.starts > claimed.arrived.mark.starts:
                copy = posts.copy_of(
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
        """The consumer of this queue, created with the queue if needed."""
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
        """Up to `limit` messages of these queues, claimed for the owner; does not wait."""
        owner = self.touch(name)
        self._end_late()
        consumers = [await self.consumer(queue) for queue in queues]
        if limit > 0:
            await run_together([each.fetch(limit) for each in consumers if each.buffered < limit])
            if not any(consumer.buffered for consumer in consumers):
                await self._wait_for_late(consumers)
        return self._deliver(owner, consumers, limit)

    async def _wait_for_late(self, consumers: Sequence[Consumer]) -> None:
        pulls = [pull for consumer in consumers if (pull := consumer.waiting) is not None]
        if pulls:
            await asyncio.wait(pulls, timeout=LATE_WAIT_S, return_when=asyncio.FIRST_COMPLETED)

    def _deliver(self, owner: Owner, consumers: Sequence[Consumer], limit: int) -> list[Delivery]:
        deliveries: list[Delivery] = []
        for priority in sorted({each for consumer in consumers for each in consumer.priorities()}):
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
        """The claim, if it is in force."""
        claimed = self.standing.get(tag)
        return claimed if claimed is not None and claimed.arrived.deadline > monotonic() else None

    # -- waiting and leaving -----------------------------------------------------------------------

    async def wait(self, queues: Sequence[str], timeout_s: float) -> None:
        """Return when a message waits here, at the latest after `timeout_s`; raises what the queues' pulls
        raise.
        """
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
        """Return what was fetched from the queue and not claimed."""
        if (consumer := self._consumers.get(queue)) is not None:
            await consumer.leave()

    def drop_waiting(self, queue: str) -> list[Arrived]:
        """Forget what was fetched from the queue and not claimed; the caller acknowledges it."""
        consumer = self._consumers.get(queue)
        return [] if consumer is None else consumer.drop()

    async def close(self) -> None:
        """Return everything that is here, claimed or not."""
        for consumer in self._consumers.values():
            await consumer.close()
        await self._give_back(list(self.standing.values()))
        self.standing.clear()


def _next_in_turn(
    owner: Owner, consumers: Sequence[Consumer], priority: int
) -> tuple[Consumer, Arrived] | None:
    """A message from the first queue that has one, starting after the queue that was served last."""
    for place in range(owner.turn + 1, owner.turn + 1 + len(consumers)):
        consumer = consumers[place % len(consumers)]
        if (arrived := consumer.take(priority)) is not None:
            owner.turn = place % len(consumers)
            return consumer, arrived
    return None


# ---- verdicts --------------------------------------------------------------------------------------

RESULTS = "Pub/Sub stores no results; set 'backend'"


@dataclass(slots=True)
class _Judged:
    """What a batch of verdicts asks for."""

    applied: int = 0
    conflicts: set[Tag] = field(default_factory=set)
    sent: list[Post] = field(default_factory=list)
    follow_ups: list[Outgoing | None] = field(
        default_factory=list
    )  # by place in `sent`: the follow-up in it, if any
    refused: list[Refused] = field(default_factory=list)
    finished: dict[Tag, Claimed] = field(default_factory=dict)


async def settle(service: Service, claims: Claims, batch: Sequence[Verdict], now: float) -> Settled:
    """Send what the verdicts ask for, then acknowledge the messages; a crash in between repeats work."""
    judged = _Judged()
    for verdict in batch:
        claimed = None if verdict.tag in judged.finished else claims.find(verdict.tag)
        if claimed is None:
            judged.conflicts.add(verdict.tag)
        else:
            await _judge(service, judged, verdict, claimed, now)
            claims.touch(claimed.owner)
    await _send(service, judged, now)
    for claimed in judged.finished.values():
        claimed.is_posted = True
    gone = await _acknowledge(service, claims, judged)
    return Settled(judged.applied - len(gone), frozenset(judged.conflicts | gone), tuple(judged.refused))


async def bury(service: Service, refused: Sequence[Refused], now: float) -> None:
    """Make dead letters of the messages among these; raises BrokerRefused if one is refused."""
    letters = [
        _letter_of(refusal.part, refusal.reason, now)
        for refusal in refused
        if isinstance(refusal.part, Outgoing)
    ]
    if letters:
        await service.make_dead()
        await _send_or_raise(service, letters)


async def _judge(service: Service, judged: _Judged, verdict: Verdict, claimed: Claimed, now: float) -> None:
    judged.applied += 1
    arrived, place = claimed.arrived, claimed.consumer.place
    if isinstance(verdict, Started):
        claimed.starts += 1
        return
    judged.finished[verdict.tag] = claimed
    if claimed.is_posted:
        return
    if isinstance(verdict, Return):
        starts = max(0, claimed.starts + int(verdict.charged))
        ran = arrived.redelivered or verdict.ran or starts > 0
        state = Mark(starts, ran, max(verdict.not_before, 0.0))
        _add(judged, posts.copy_of(arrived.data, place.queue, service.names, state))
        return
    judged.refused += [Refused(result, RESULTS) for result in verdict.results]
    for number, why in (await _refused_by_name(service, verdict.follow_ups)).items():
        judged.refused.append(Refused(verdict.follow_ups[number], why))
        _add(judged, _letter_of(verdict.follow_ups[number], why, now))
    for outgoing in verdict.follow_ups:
        if not any(refusal.part is outgoing for refusal in judged.refused):
            try:
                _add(judged, posts.task(outgoing, service.names, now), outgoing)
            except BrokerRefused as error:
                judged.refused.append(Refused(outgoing, str(error)))
                _add(judged, _letter_of(outgoing, str(error), now))
    if isinstance(verdict, Bury):
        starts = claimed.starts + int(verdict.charged)
        _add(judged, posts.letter(place.queue, arrived.data, verdict.reason, starts, now))
    else:
        assert isinstance(verdict, Ack)


async def _refused_by_name(service: Service, follow_ups: Sequence[Outgoing]) -> dict[int, str]:
    return await service.make_for(follow_ups) if follow_ups else {}


def _add(judged: _Judged, post: Post, follow_up: Outgoing | None = None) -> None:
    judged.sent.append(post)
    judged.follow_ups.append(follow_up)


async def _send(service: Service, judged: _Judged, now: float) -> None:
    if not judged.sent:
        return
    await service.make_dead()
    refused = await service.try_send(judged.sent)
    letters: list[Post] = []
    for place, why in refused.items():
        follow_up = judged.follow_ups[place]
        if follow_up is None:
            raise BrokerRefused(why)
        judged.refused.append(Refused(follow_up, why))
        letters.append(_letter_of(follow_up, why, now))
    if letters:
        await _send_or_raise(service, letters)


async def _send_or_raise(service: Service, letters: Sequence[Post]) -> None:
    if problems := await service.try_send(letters):
        raise BrokerRefused(next(iter(problems.values())))


async def _acknowledge(service: Service, claims: Claims, judged: _Judged) -> set[Tag]:
    by_subscription: dict[str, dict[str, Tag]] = {}
    for tag, claimed in judged.finished.items():
        ids = by_subscription.setdefault(claimed.consumer.place.subscription, {})
        ids[claimed.arrived.ack_id] = tag
    gone: set[Tag] = set()
    for subscription, ids in by_subscription.items():
        late = await service.acknowledge(subscription, list(ids))
        gone |= {ids[ack_id] for ack_id in late}
        for tag in ids.values():
            claims.standing.pop(tag, None)
    return gone


def _letter_of(outgoing: Outgoing, reason: str, now: float) -> Post:
    letter = outgoing.as_letter()
    message = letter.message
    data = (
        seal(message, letter.queue, "", exchange=message.exchange, routing_key=message.routing_key)
        if message.headers
        else message.body
    )
    return posts.letter(letter.queue, data, reason, 0, now)
