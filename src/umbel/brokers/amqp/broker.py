"""AmqpBroker: RabbitMQ for workers and the parts of an app that run on an event loop.

Every operation asks for the live session; if the last one has ended, that opens the next. So nothing
reconnects in the background: a caller that retries after an error, as the worker does with growing pauses, is
connected as soon as RabbitMQ is back.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from time import monotonic

from umbel.brokers.amqp import dead_letters, locks, outbox, topology, verdicts
from umbel.brokers.amqp.claims import Claims
from umbel.brokers.amqp.coordination import AmqpCoordination
from umbel.brokers.amqp.dead_letters import FailureStore
from umbel.brokers.amqp.event_log import AmqpSubscription, EventLog
from umbel.brokers.amqp.handshake import BrokerStarting, ChannelClosed, QueueRefused
from umbel.brokers.amqp.outbox import Post
from umbel.brokers.amqp.session import Session, Sessions
from umbel.brokers.amqp.streams import encode_record
from umbel.brokers.amqp.topology import CAPABILITIES
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
    Evidence,
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
from umbel.brokers.links import ConfiguredBroker, signer_at
from umbel.brokers.refusals import unbound
from umbel.clock import cluster_now
from umbel.errors import AccessRefused, NotSupported
from umbel.protocol.delivery.trust import ClusterId, Doubt
from umbel.wire.message import Outgoing
from umbel.wire.records import Revoke

log = logging.getLogger("umbel.brokers.amqp")
STARTING_S = 30.0
STARTING_PAUSE_S = 0.5
UNUSABLE_S = 5.0  # how long a queue that cannot be consumed is left alone
TOLD_AGAIN_S = 3600.0
LOOK_EVERY_S = 0.05  # for messages in queues that this process does not consume


class AmqpBroker(ConfiguredBroker, FailureStore):
    """The asynchronous broker on RabbitMQ; an operation after a lost connection reconnects."""

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
        self._told_horizon = self._told_horizon_at = 0.0

    @property
    def capabilities(self) -> Capabilities:
        """What RabbitMQ can and cannot do."""
        return CAPABILITIES

    @property
    def coordination(self) -> AmqpCoordination:
        """The leases and elections of this broker."""
        return self._coordination

    async def open(self) -> None:
        """Connect. Waits for a server that answers but is still starting; later operations do not wait."""
        session = await self._connected()
        self._signer = await signer_at(self, self._settings)
        if self._signer is not None and self._settings.remembers_signatures:
            await verdicts.begin_signatures(session)

    async def _connected(self) -> Session:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + STARTING_S
        while True:
            try:
                return await self._sessions.get()
            except BrokerStarting as error:
                if loop.time() > deadline:
                    raise
                log.info("RabbitMQ is still starting; waiting for it", extra={"why": str(error)})
            await asyncio.sleep(STARTING_PAUSE_S)

    async def reconnect(self) -> None:
        """Reconnect what was lost; raises BrokerUnavailable if that fails."""
        await self._sessions.get()
        await self._coordination.reconnect()

    async def close(self) -> None:
        """Give up locks and close all connections; RabbitMQ requeues what is claimed."""
        await self._coordination.close()
        await self._sessions.close()

    async def publish(self, batch: Sequence[Outgoing]) -> None:
        """Send task messages, confirmed on return; raises BrokerRefused if some were refused."""
        session = await self._sessions.get()
        await session.send(outbox.sendable_tasks(batch, session.queues, cluster_now()))

    # -- claiming --------------------------------------------------------------------------------

    async def claim(self, owner: str, queues: Sequence[str], limit: int, *, revoked_after: int = 0) -> Claim:
        """Up to `limit` messages of these queues for this owner, with the revokes since `revoked_after`."""
        session = await self._sessions.get()
        claims, revokes = session.claims, session.views.revokes
        await dead_letters.leave_paused(session, owner, queues)
        usable = dead_letters.not_paused(session, self._usable(queues))
        will_be_woken = claims.will_be_woken(owner, usable, limit)
        try:
            if not will_be_woken and not claims.has_arrived(owner, usable):
                for queue in usable:
                    await session.make_queue(queue)
                await session.catch_up()
                await self._park_early(session, claims)
                usable = dead_letters.not_paused(session, usable)
            taken = [] if will_be_woken else await claims.claim(owner, usable, limit)
        except QueueRefused as refused:
            session.publisher.declared.discard(refused.queue)
            if refused.is_forbidden and len(usable) == 1:
                raise AccessRefused(str(refused)) from None
            if refused.is_missing or len(usable) == 1:  # the queue was deleted: the next claim declares it
                raise
            log.error(
                "cannot consume from a queue; retrying, other queues continue",
                extra={"queue": refused.queue, "why": str(refused)},
            )
            self._unusable[refused.queue] = monotonic() + UNUSABLE_S
            return await self.claim(owner, queues, limit, revoked_after=revoked_after)
        unstarted = set[tuple[str, str]]()
        try:
            if any(arrived.redelivered or arrived.mark.ran for _, arrived in taken):
                await session.catch_up()  # the counts of starts must be known
                unstarted = await session.take_unstarted(taken)
        except BaseException:
            claims.put_back(taken)
            raise
        deliveries = claims.deliver(owner, taken, unstarted)
        news = revokes.after(revoked_after, cluster_now())
        return Claim(deliveries, news, revokes.cursor, lease_ended=not claims.renew(owner))

    def _usable(self, queues: Sequence[str]) -> Sequence[str]:
        """The queues that were not refused a moment ago; all, if each was."""
        if not self._unusable:
            return queues
        now = monotonic()
        self._unusable = {queue: until for queue, until in self._unusable.items() if until > now}
        return [queue for queue in queues if queue not in self._unusable] or queues

    async def wait_ready(self, queues: Sequence[str], timeout_s: float, *, owner: str = "") -> bool:
        """Return when a message may be claimed from these queues, or after the time-out."""
        session = await self._sessions.get()
        facts, pauses_before = session.views.facts, session.views.facts.pauses_heard
        queues = dead_letters.not_paused(session, self._usable(queues))
        if session.claims.watches(queues):
            session.claims.note_waiting(owner)
            await session.claims.wait(queues, timeout_s, is_over=lambda: facts.pauses_heard != pauses_before)
            return True
        ends = asyncio.get_running_loop().time() + timeout_s
        while not any((await session.counts(queues)).values()):
            left_s = ends - asyncio.get_running_loop().time()
            if left_s <= 0:
                break
            await asyncio.sleep(min(left_s, LOOK_EVERY_S))
        return True

    async def renew(self, owner: str) -> bool:
        """Extend the owner's lease; False if it had ended before."""
        session = await self._sessions.get()
        await session.free_lost()
        return session.claims.renew(owner)

    async def return_lost(self, *, by_turn: bool = False) -> int:
        """How many claims of silent owners in this process were returned; RabbitMQ returns those of dead
        processes.
        """
        claims = (await self._sessions.get()).claims
        lost, claims.lost = claims.lost, 0
        return lost

    async def leave_queue(self, owner: str, queue: str, *, is_busy: bool = False) -> None:
        """Return what the owner has fetched from the queue and not claimed."""
        if (session := self._sessions.alive) is not None:
            await session.leave(owner, queue, is_busy=is_busy)

    async def forget_owner(self, owner: str) -> int:
        """End all claims and consumers of the owner; how many claims were returned."""
        session = self._sessions.alive
        return 0 if session is None else await session.forget(owner)

    async def ended(self, tags: Sequence[Tag]) -> frozenset[Tag]:
        """Those of the claims that are over, so that a verdict on them would be a conflict."""
        session = self._sessions.alive
        if session is None:  # all claims ended with it
            return frozenset(tags) - self._sessions.unknown
        standing = session.claims.standing
        gone = {tag for tag in tags if tag not in standing or not standing[tag].consumer.is_open}
        return frozenset(gone) - self._sessions.unknown

    async def settle(self, batch: Sequence[Verdict]) -> Settled:
        """Apply verdicts: send what they ask for, then acknowledge or return the messages."""
        session = await self._sessions.get()
        claims = session.claims
        judged = verdicts.judge(
            batch, claims.standing, session.queues, cluster_now(), self._failed, session.unanswered
        )
        if judged.posts or judged.unwritten:
            await verdicts.post(session, judged, cluster_now())
        if self._settings.remembers_signatures:
            with session.all_or_again(judged.posts):
                await verdicts.end_signatures(session, batch, frozenset(judged.finished))
        gone = verdicts.apply(judged, claims)
        for owner in judged.owners:
            claims.touch(owner)
        conflicts = judged.conflicts | gone
        forgotten = self._sessions.unknown & conflicts
        self._sessions.unknown -= forgotten
        # What these verdicts send was sent before their claims were found ended; no message was returned.
        unknown = forgotten & (judged.conflicts | set(judged.returned))
        return Settled(
            judged.judged - len(gone - forgotten),
            frozenset(conflicts - forgotten),
            tuple(judged.refused),
            unknown=frozenset(unknown),
        )

    async def spend(self, used: Sequence[Spend]) -> Mapping[Tag, Doubt]:
        """Use signatures once; which must not be used, and why."""
        return await verdicts.spend_signatures(await self._sessions.get(), used)

    async def cluster_id(self) -> ClusterId | None:
        """The id that signatures are bound to; None if the cluster has none."""
        return await verdicts.cluster_id(await self._sessions.get())

    async def keep_cluster_id(self, made: ClusterId) -> ClusterId:
        """Store the id unless there is one; returns the one that counts."""
        return await verdicts.keep_cluster_id(await self._sessions.get(), made)

    async def permit(self, asked: Sequence[Permit]) -> Mapping[Tag, str]:
        """Raises NotSupported: RabbitMQ cannot count limits for the whole cluster."""
        raise NotSupported(CAPABILITIES.reasons["limits"])

    async def bury(self, refused: Sequence[Refused]) -> None:
        """Make dead letters of refused messages."""
        await verdicts.bury(await self._sessions.get(), refused, cluster_now())

    async def _park_early(self, session: Session, claims: Claims) -> None:
        """Move what arrived before it was due to the next level of the ladder, if
        messages can be sent now.
        """
        for consumer in claims.consumers():
            if not consumer.early or session.publisher.is_blocked:
                continue
            parked, consumer.early = consumer.early, []
            try:
                await verdicts.park(session, consumer, parked)
            except BaseException:
                consumer.early += parked
                raise
            consumer.finish_early(parked)

    # -- looking ---------------------------------------------------------------------------------

    async def queues(self, only: Collection[str] | None = None) -> Mapping[str, Depth]:
        """How many messages are ready, delayed and claimed, by queue; empty queues are left out."""
        session = await self._sessions.get()
        await session.catch_up()
        names = sorted(session.views.facts.queues | session.views.facts.paused.keys())
        steps = {name: dead_letters.delay_queues(name) for name in names}
        counts = await session.counts([*names, *(step for of in steps.values() for step in of)])
        depths: dict[str, Depth] = {}
        for name in names:
            consumers = [consumer for consumer in session.claims.consumers() if consumer.queue == name]
            ready = counts.get(name, 0) + sum(consumer.buffered for consumer in consumers)
            delayed = sum(counts.get(step, 0) for step in steps[name])
            delayed += sum(consumer.held + len(consumer.early) for consumer in consumers)
            depth = dead_letters.with_pause_state(
                session, name, Depth(ready, delayed, sum(consumer.claimed for consumer in consumers))
            )
            if depth != Depth(0, 0, 0):
                depths[name] = depth
        return depths

    async def peek(self, queue: str, limit: int) -> Sequence[Delivery]:
        """The first messages of the queue, which stay there."""
        return await dead_letters.peek(await self._sessions.get(), queue, limit)

    async def purge(self, queue: str) -> int:
        """Delete what waits in the queue, delayed messages too; how many."""
        CAPABILITIES.refuse_reserved(queue)
        session = await self._sessions.get()
        there = await session.counts([queue, *dead_letters.delay_queues(queue)])
        count = sum(
            consumer.drop_waiting() for consumer in session.claims.consumers() if consumer.queue == queue
        )
        for name in there:
            count += await session.purge(name)
        return count

    async def pause(self, queue: str, mark: Pause) -> None:
        """Pause the queue for all workers."""
        timeout_s = self._settings.connect_timeout_s
        await dead_letters.pause(await self._sessions.get(), queue, mark, timeout_s=timeout_s)

    async def resume(self, queue: str) -> bool:
        """End the pause; whether the queue was paused."""
        timeout_s = self._settings.connect_timeout_s
        return await dead_letters.resume(await self._sessions.get(), queue, timeout_s=timeout_s)

    async def paused(self) -> Mapping[str, Pause]:
        """The paused queues, by name."""
        return await dead_letters.paused(await self._sessions.get())

    async def move(self, source: str, target: str, limit: int) -> int:
        """Move one portion of messages to another queue; how many were moved."""
        for queue in (source, target):
            CAPABILITIES.refuse_reserved(queue)
        return await dead_letters.move(await self._sessions.get(), source, target, limit)

    async def dead_letters(self, limit: int = DEAD_LETTER_PEEK_MAX) -> Sequence[DeadLetter]:
        """Up to `limit` dead letters, which stay where they are."""
        return await dead_letters.read_letters(await self._sessions.get(), limit)

    async def count_dead(self, limit: int) -> int:
        """How many dead letters there are, counted up to `limit`."""
        session = await self._sessions.get()
        return min(limit, (await session.counts([topology.DEAD])).get(topology.DEAD, 0))

    async def requeue_dead(self, letter_ids: Sequence[int | str], *, even_if_used: bool = False) -> int:
        """Send dead letters to their queues again; how many."""
        session, signer = await self._sessions.get(), self.signer
        return await dead_letters.requeue_letters(
            session, letter_ids, cluster_now(), signer, even_if_used=even_if_used
        )

    async def drop_dead(self, letter_ids: Sequence[int | str]) -> int:
        """Delete dead letters; how many."""
        return await dead_letters.drop_letters(await self._sessions.get(), letter_ids)

    # -- what a cluster shares -------------------------------------------------------------------

    async def broadcast(self, batch: Sequence[Broadcast], *, ttl_s: float) -> int | None:
        """Send to all listeners; 0 if RabbitMQ reports that nothing listens, else None."""
        if ttl_s <= 0:  # RabbitMQ would still deliver it to waiting consumers
            return None
        session = await self._sessions.get()
        posts = [outbox.broadcast(sent, ttl_s, ask_who_hears=True) for sent in batch]
        try:
            return await self._fan_out(session, posts)
        except ChannelClosed as refused:
            if refused.code != ChannelClosed.NOT_FOUND:
                raise
            session.publisher.exchanges.clear()  # the exchange was deleted
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
        """The broadcasts that match the patterns, while the block runs."""
        subscription = AmqpSubscription(self._sessions, exchange, patterns, unread_ttl_s)
        try:
            await subscription.enter()
            yield subscription
        finally:
            await subscription.leave()

    async def store_time(self) -> None:
        """None: RabbitMQ has no clock to ask."""

    async def mark_alive(self, node: str, incarnation: int, *, ttl_s: float) -> None:
        """Nothing to do: the mailbox that a node listens on is removed with its connection."""

    async def probe(self, node: str, incarnation: int = 0) -> Evidence:
        """Whether a node is alive, by its mailbox."""
        return await locks.probe_mailbox(await self._sessions.get(), node)

    async def revoke(self, revokes: Sequence[Revoke]) -> None:
        """Record revokes for all workers; raises RevokesFull at the limit."""
        session = await self._sessions.get()
        await session.catch_up()
        session.views.revokes.check_room(revokes, self._settings.revokes_max, cluster_now())
        await session.publisher.send(
            [outbox.entry(topology.REVOKES, encode_record(entry)) for entry in revokes]
        )

    async def register_recorder(self, name: str) -> int:
        """Start to log events for this recorder; the offset behind which it reads."""
        return await self._event_log.register(await self._sessions.get(), name)

    async def forget_recorder(self, name: str) -> None:
        """Remove the recorder; without any recorder nothing is logged any more."""
        await self._event_log.forget(await self._sessions.get(), name)

    async def recorders(self) -> Sequence[str]:
        """The names of the registered recorders."""
        session = await self._sessions.get()
        await session.catch_up()
        return sorted(session.views.facts.recorders)

    async def log_events(self, entries: Sequence[tuple[str, bytes]], *, counts: Sequence[int] = ()) -> int:
        """Append events to the event log if a recorder is registered; how many entries were logged."""
        return await self._event_log.append(await self._sessions.get(), entries, counts)

    async def read_events(self, name: str, limit: int, *, after: int = 0) -> Sequence[LoggedEvent]:
        """Up to `limit` logged events that the recorder has not acknowledged."""
        return await self._event_log.read(await self._sessions.get(), name, limit, after)

    async def acknowledge_events(self, name: str, offset: int) -> None:
        """The recorder has stored all events up to this offset."""
        await self._event_log.acknowledge(await self._sessions.get(), name, offset)

    async def lost_events(self) -> int:
        """How many events recorders have missed or will miss."""
        return await self._event_log.lost(await self._sessions.get())

    async def event_log(self) -> EventLogState:
        """The state of the event log and of its recorders."""
        return await self._event_log.state(await self._sessions.get())

    async def sweep(self) -> None:
        """Forget what has expired, and write facts again before they fall off the stream's end."""
        session = await self._sessions.get()
        session.views.revokes.sweep(cluster_now())
        session.views.signatures.sweep(cluster_now())
        self._tell_horizon(session.views.signatures.horizon)
        await self._coordination.sweep()

    def _tell_horizon(self, horizon: float) -> None:
        """Log at most once an hour that messages are refused although their signatures are still in their
        window.
        """
        now = cluster_now()
        if horizon > self._told_horizon and now - self._told_horizon_at >= TOLD_AGAIN_S:
            self._told_horizon, self._told_horizon_at = horizon, now
            fields = {"reaches_back_s": round(now - horizon)}
            log.warning(
                "older signed messages are refused: the record of used signatures is full", extra=fields
            )
