"""AmqpBroker: the asynchronous face of RabbitMQ, on a connection that heals.

Every operation asks for the session that lives; when the last one died, that opens the next. So
there is no reconnecting in the background: who calls again after an error, as the worker does
with growing pauses, is connected as soon as RabbitMQ is back.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from time import monotonic

from umbel.brokers.amqp import dead_letters, locks, outbox, pauses, signatures, topology, verdicts
from umbel.brokers.amqp.capabilities import CAPABILITIES
from umbel.brokers.amqp.claims import Claims
from umbel.brokers.amqp.coordination import AmqpCoordination
from umbel.brokers.amqp.event_log import EventLog
from umbel.brokers.amqp.failures import KeptFailures
from umbel.brokers.amqp.outbox import Post
from umbel.brokers.amqp.records import encode_record
from umbel.brokers.amqp.refusals import BrokerStarting, ChannelClosed, QueueRefused
from umbel.brokers.amqp.session import Session, Sessions
from umbel.brokers.amqp.subscription import AmqpSubscription
from umbel.brokers.configured import ConfiguredBroker
from umbel.brokers.evidence import Evidence
from umbel.brokers.interface import (
    DEAD_LETTER_PEEK_MAX,
    Broadcast,
    BrokerSettings,
    Capabilities,
    Claim,
    DeadLetter,
    Delivery,
    Depth,
    EventLogState,
    LoggedEvent,
    Pause,
    Permit,
    Refused,
    Settled,
    Spend,
    Subscription,
    Tag,
    Verdict,
)
from umbel.brokers.refusals import unbound
from umbel.clock import cluster_now
from umbel.errors import NotSupported
from umbel.wire.message import Outgoing
from umbel.wire.revoke import Revoke

log = logging.getLogger("umbel.brokers.amqp")
STARTING_S = 30.0
STARTING_PAUSE_S = 0.5
UNUSABLE_S = 5.0  # a queue that cannot be consumed is left alone for so long
LOOK_EVERY_S = 0.05  # for messages in queues that nobody here consumes


class AmqpBroker(ConfiguredBroker, KeptFailures):
    def __init__(self, settings: BrokerSettings) -> None:
        super().__init__(settings)
        self._sessions = Sessions(
            settings,
            name=f"{settings.connection_name} {os.getpid()}",
            on_replaced=self._tell_replaced,
            on_link=self._tell_link,
        )
        self._coordination = AmqpCoordination(self._sessions, settings)
        self._event_log = EventLog(settings)
        self._failed = topology.failed_queue(settings)
        self._unusable: dict[str, float] = {}  # queues, and until when they are left alone

    @property
    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    @property
    def coordination(self) -> AmqpCoordination:
        return self._coordination

    async def open(self) -> None:
        """Connect. A server that answers but is still starting is waited for; who calls later tries on."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + STARTING_S
        while True:
            try:
                await self._sessions.get()
                return
            except BrokerStarting as error:
                if loop.time() > deadline:
                    raise
                log.info("RabbitMQ is still starting; waiting for it", extra={"why": str(error)})
            await asyncio.sleep(STARTING_PAUSE_S)

    async def reconnect(self) -> None:
        await self._sessions.get()
        await self._coordination.reconnect()

    async def close(self) -> None:
        await self._coordination.close()
        await self._sessions.close()

    async def publish(self, batch: Sequence[Outgoing]) -> None:
        session = await self._sessions.get()
        await session.send(outbox.tasks(batch, session.queues, cluster_now()))

    # -- claiming --------------------------------------------------------------------------------

    async def claim(self, owner: str, queues: Sequence[str], limit: int, *, revoked_after: int = 0) -> Claim:
        session = await self._sessions.get()
        claims, revokes = session.claims, session.views.revokes
        await pauses.leave_paused(session, owner, queues)
        usable = pauses.not_paused(session, self._usable(queues))
        will_be_woken = claims.will_be_woken(owner, usable, limit)
        try:
            if not will_be_woken and not claims.has_arrived(owner, usable):
                for queue in usable:
                    await session.make_queue(queue)
                await self._park_early(session, claims)
                await session.catch_up()
                usable = pauses.not_paused(session, usable)
            taken = [] if will_be_woken else await claims.claim(owner, usable, limit)
        except QueueRefused as refused:
            session.publisher.declared.discard(refused.queue)
            if refused.is_missing or len(usable) == 1:  # deleted by somebody: the next claim makes it
                raise
            log.error(
                "cannot consume from a queue; retrying, other queues continue",
                extra={"queue": refused.queue, "why": str(refused)},
            )
            self._unusable[refused.queue] = monotonic() + UNUSABLE_S
            return await self.claim(owner, queues, limit, revoked_after=revoked_after)
        try:
            if any(arrived.redelivered or arrived.mark.ran for _, arrived in taken):
                await session.catch_up()  # its starts must be known
        except BaseException:
            claims.put_back(taken)
            raise
        deliveries = claims.deliver(owner, taken)
        news = revokes.after(revoked_after, cluster_now())
        return Claim(deliveries, news, revokes.cursor, lease_ended=not claims.renew(owner))

    def _usable(self, queues: Sequence[str]) -> Sequence[str]:
        """Those that were not refused a moment ago; all, if each was."""
        if not self._unusable:
            return queues
        now = monotonic()
        self._unusable = {queue: until for queue, until in self._unusable.items() if until > now}
        return [queue for queue in queues if queue not in self._unusable] or queues

    async def wait_ready(self, queues: Sequence[str], timeout_s: float, *, owner: str = "") -> bool:
        session = await self._sessions.get()
        facts, heard = session.views.facts, session.views.facts.pauses_heard
        queues = pauses.not_paused(session, self._usable(queues))
        if session.claims.watches(queues):
            session.claims.note_waiting(owner)
            await session.claims.wait(queues, timeout_s, is_over=lambda: facts.pauses_heard != heard)
            return True
        ends = asyncio.get_running_loop().time() + timeout_s
        while not any((await session.counts(queues)).values()):
            left_s = ends - asyncio.get_running_loop().time()
            if left_s <= 0:
                break
            await asyncio.sleep(min(left_s, LOOK_EVERY_S))
        return True

    async def renew(self, owner: str) -> bool:
        return (await self._sessions.get()).claims.renew(owner)

    async def return_lost(self, *, by_turn: bool = False) -> int:
        """Return the claims of silent owners in this process; RabbitMQ returns those of dead processes."""
        claims = (await self._sessions.get()).claims
        lost, claims.lost = claims.lost, 0
        return lost

    async def leave_queue(self, owner: str, queue: str) -> None:
        if (session := self._sessions.alive) is not None:
            await session.claims.leave(owner, queue)

    async def forget_owner(self, owner: str) -> int:
        session = self._sessions.alive
        return 0 if session is None else await session.claims.forget(owner)

    async def ended(self, tags: Sequence[Tag]) -> frozenset[Tag]:
        session = self._sessions.alive
        if session is None:  # and with it all that was claimed
            return frozenset(tags) - self._sessions.unknown
        standing = session.claims.standing
        gone = {tag for tag in tags if tag not in standing or not standing[tag].consumer.is_open}
        return frozenset(gone) - self._sessions.unknown

    async def settle(self, batch: Sequence[Verdict]) -> Settled:
        session = await self._sessions.get()
        claims = session.claims
        judged = verdicts.judge(batch, claims.standing, session.queues, cluster_now(), self._failed)
        if judged.posts or judged.unwritten:
            await verdicts.post(session, judged, cluster_now())
        if self._settings.remembers_signatures:
            await signatures.end(session, batch, frozenset(judged.finished))
        gone = verdicts.apply(judged, claims)
        for owner in judged.owners:
            claims.touch(owner)
        conflicts = judged.conflicts | gone
        forgotten = self._sessions.unknown & conflicts
        self._sessions.unknown -= forgotten
        # What a verdict sends was sent before its claim was found gone; only a message is not back.
        unknown = forgotten & (judged.conflicts | {tag for tag, _ in judged.returned})
        return Settled(
            judged.judged - len(gone - forgotten),
            frozenset(conflicts - forgotten),
            tuple(judged.refused),
            unknown=frozenset(unknown),
        )

    async def spend(self, used: Sequence[Spend]) -> frozenset[Tag]:
        return await signatures.spend(await self._sessions.get(), used)

    async def permit(self, asked: Sequence[Permit]) -> Mapping[Tag, str]:
        raise NotSupported(CAPABILITIES.reasons["limits"])

    async def bury(self, refused: Sequence[Refused]) -> None:
        await verdicts.bury(await self._sessions.get(), refused, cluster_now())

    async def _park_early(self, session: Session, claims: Claims) -> None:
        """What arrived before it was due goes on to the next step of the ladder."""
        for consumer in claims.consumers():
            parked, consumer.early = consumer.early, []
            early = [Outgoing(consumer.queue, one.message, one.mark.due) for one in parked]
            posts = [
                outbox.task(outgoing, session.queues, cluster_now(), ran=one.mark.ran or one.redelivered)
                for outgoing, one in zip(early, parked, strict=True)
            ]
            try:
                await verdicts.send_or_bury(session, posts, early)
            except BaseException:
                consumer.early += parked
                raise
            consumer.finish_early(parked)

    # -- looking ---------------------------------------------------------------------------------

    async def queues(self, only: Collection[str] | None = None) -> Mapping[str, Depth]:
        session = await self._sessions.get()
        await session.catch_up()
        names = sorted(session.views.facts.queues | session.views.facts.paused.keys())
        steps = {name: pauses.ladder(name) for name in names}
        counts = await session.counts([*names, *(step for of in steps.values() for step in of)])
        depths: dict[str, Depth] = {}
        for name in names:
            consumers = [one for one in session.claims.consumers() if one.queue == name]
            ready = counts.get(name, 0) + sum(one.buffered for one in consumers)
            delayed = sum(counts.get(step, 0) for step in steps[name])
            delayed += sum(one.held + len(one.early) for one in consumers)
            depth = pauses.shown(session, name, Depth(ready, delayed, sum(one.claimed for one in consumers)))
            if depth != Depth(0, 0, 0):
                depths[name] = depth
        return depths

    async def peek(self, queue: str, limit: int) -> Sequence[Delivery]:
        return await dead_letters.peek(await self._sessions.get(), queue, limit)

    async def purge(self, queue: str) -> int:
        session = await self._sessions.get()
        there = await session.counts([queue, *pauses.ladder(queue)])
        count = sum(one.drop_waiting() for one in session.claims.consumers() if one.queue == queue)
        for name in there:
            count += await session.purge(name)
        return count

    async def pause(self, queue: str, mark: Pause) -> None:
        timeout_s = self._settings.connect_timeout_s
        await pauses.pause(await self._sessions.get(), queue, mark, timeout_s=timeout_s)

    async def resume(self, queue: str) -> bool:
        timeout_s = self._settings.connect_timeout_s
        return await pauses.resume(await self._sessions.get(), queue, timeout_s=timeout_s)

    async def paused(self) -> Mapping[str, Pause]:
        return await pauses.paused(await self._sessions.get())

    async def move(self, source: str, target: str, limit: int) -> int:
        return await pauses.move(await self._sessions.get(), source, target, limit)

    async def dead_letters(self, limit: int = DEAD_LETTER_PEEK_MAX) -> Sequence[DeadLetter]:
        return await dead_letters.dead_letters(await self._sessions.get(), limit)

    async def requeue_dead(self, letter_ids: Sequence[int | str]) -> int:
        return await dead_letters.requeue(await self._sessions.get(), letter_ids, cluster_now(), self.keyring)

    async def drop_dead(self, letter_ids: Sequence[int | str]) -> int:
        return await dead_letters.drop(await self._sessions.get(), letter_ids)

    # -- what a cluster shares -------------------------------------------------------------------

    async def broadcast(self, batch: Sequence[Broadcast], *, ttl_s: float) -> int | None:
        if ttl_s <= 0:  # RabbitMQ would still deliver it to waiting consumers
            return None
        session = await self._sessions.get()
        posts = [outbox.broadcast(one, ttl_s, ask_who_hears=True) for one in batch]
        try:
            return await self._fan_out(session, posts)
        except ChannelClosed as refused:
            if refused.code != ChannelClosed.NOT_FOUND:
                raise
            session.publisher.exchanges.clear()  # deleted by somebody
            return await self._fan_out(session, posts)

    async def _fan_out(self, session: Session, posts: Sequence[Post]) -> int | None:
        for name in {post.exchange for post in posts} - session.publisher.exchanges:
            await session.publisher.declare(topology.exchange(name))
        refused = await session.publisher.try_send(posts)
        reached_nobody = [place for place, why in refused.items() if why == unbound(*posts[place].route)]
        if len(reached_nobody) < len(refused):
            raise outbox.refusal(refused, posts)
        return 0 if posts and len(reached_nobody) == len(posts) else None

    @asynccontextmanager
    async def subscribe(
        self, exchange: str, patterns: Sequence[str], *, unread_ttl_s: float | None = None
    ) -> AsyncIterator[Subscription]:
        subscription = AmqpSubscription(self._sessions, exchange, patterns, unread_ttl_s)
        await subscription.enter()
        try:
            yield subscription
        finally:
            await subscription.leave()

    async def store_time(self) -> None:
        """None: the nodes' clocks are all there are."""

    async def mark_alive(self, node: str, incarnation: int, *, ttl_s: float) -> None:
        """Nothing to do: the mailbox that a node listens on goes with its connection."""

    async def probe(self, node: str, incarnation: int = 0) -> Evidence:
        return await locks.probe_mailbox(await self._sessions.get(), node)

    async def revoke(self, revokes: Sequence[Revoke]) -> None:
        session = await self._sessions.get()
        await session.catch_up()
        session.views.revokes.check_room(revokes, self._settings.revokes_max, cluster_now())
        await session.publisher.send([outbox.entry(topology.REVOKES, encode_record(one)) for one in revokes])

    async def register_recorder(self, name: str) -> int:
        return await self._event_log.register(await self._sessions.get(), name)

    async def forget_recorder(self, name: str) -> None:
        await self._event_log.forget(await self._sessions.get(), name)

    async def recorders(self) -> Sequence[str]:
        session = await self._sessions.get()
        await session.catch_up()
        return sorted(session.views.facts.recorders)

    async def log_events(self, entries: Sequence[tuple[str, bytes]], *, counts: Sequence[int] = ()) -> int:
        return await self._event_log.append(await self._sessions.get(), entries, counts)

    async def read_events(self, name: str, limit: int, *, after: int = 0) -> Sequence[LoggedEvent]:
        return await self._event_log.read(await self._sessions.get(), name, limit, after)

    async def acknowledge_events(self, name: str, offset: int) -> None:
        await self._event_log.acknowledge(await self._sessions.get(), name, offset)

    async def lost_events(self) -> int:
        return await self._event_log.lost(await self._sessions.get())

    async def event_log(self) -> EventLogState:
        return await self._event_log.state(await self._sessions.get())

    async def sweep(self) -> None:
        session = await self._sessions.get()
        session.views.revokes.sweep(cluster_now())
        session.views.signatures.sweep(cluster_now())
        await self._coordination.sweep()
