"""AmqpBroker: RabbitMQ for workers and the parts of an app that run on an event loop.

Every operation asks for the live session; if the last one has ended, this opens the next. So nothing
reconnects in the background: a caller that retries after an error, as the worker does with growing pauses, is
connected as soon as RabbitMQ is back.

The broker is made of parts, whose methods are its own: `Settling` (verdicts), `Signatures`, `QueueOperations`
(dead letters, failures, pauses), `EventLog`, and its coordination. All of them share the sessions.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from time import monotonic

from umbel.brokers.amqp import locks, publishing, topology, verdicts
from umbel.brokers.amqp.claims import Claims
from umbel.brokers.amqp.coordination import AmqpCoordination
from umbel.brokers.amqp.dead_letters import QueueOperations, delay_queues, leave_paused, not_paused
from umbel.brokers.amqp.event_log import EventLog
from umbel.brokers.amqp.handshake import BrokerStarting, ChannelClosed, QueueRefused
from umbel.brokers.amqp.publishing import Post
from umbel.brokers.amqp.session import Session, Sessions
from umbel.brokers.amqp.signatures import Signatures, begin_signatures
from umbel.brokers.amqp.streams import encode_record
from umbel.brokers.amqp.subscription import AmqpSubscription
from umbel.brokers.amqp.topology import CAPABILITIES
from umbel.brokers.amqp.verdicts import Settling
from umbel.brokers.interface import (
    Broadcast,
    BrokerSettings,
    Claim,
    Depth,
    Evidence,
    Subscription,
    Tag,
)
from umbel.brokers.links import ConfiguredBroker, signer_at
from umbel.brokers.refusals import unbound, unsupported
from umbel.clock import cluster_now
from umbel.errors import AccessRefused
from umbel.wire.message import Outgoing
from umbel.wire.records import Revoke

log = logging.getLogger("umbel.brokers.amqp")
STARTING_S = 30.0
STARTING_PAUSE_S = 0.5
UNUSABLE_S = 5.0  # how long a queue that cannot be consumed is left alone
LOG_AGAIN_S = 3600.0
POLL_S = 0.05  # for messages in queues that this process does not consume


class AmqpBroker(ConfiguredBroker):
    """The asynchronous broker on RabbitMQ; an operation after a lost connection reconnects."""

    capabilities = CAPABILITIES
    permit = unsupported(CAPABILITIES.reasons["limits"])

    def __init__(self, settings: BrokerSettings) -> None:
        super().__init__(settings)
        self._sessions = sessions = Sessions(
            settings,
            name=f"{settings.connection_name} {os.getpid()}",
            on_replaced=self._tell_replaced,
            on_link=self._tell_link,
        )
        self._unusable: dict[str, float] = {}  # queues, and until when they are left alone
        self._logged_horizon = self._logged_horizon_at = 0.0
        self.coordination = AmqpCoordination(sessions, settings)
        settling = Settling(sessions, settings)
        self.settle = settling.settle
        self.bury = settling.bury
        self.keep_failed = settling.keep_failed
        signatures = Signatures(sessions)
        self.spend = signatures.spend
        self.cluster_id = signatures.cluster_id
        self.keep_cluster_id = signatures.keep_cluster_id
        self._operations = operations = QueueOperations(sessions, settings)
        self.peek = operations.peek
        self.dead_letters = operations.dead_letters
        self.count_dead = operations.count_dead
        self.drop_dead = operations.drop_dead
        self.failed = operations.failed
        self.resend = operations.resend
        self.pause = operations.pause
        self.resume = operations.resume
        self.paused = operations.paused
        self.move = operations.move
        event_log = EventLog(sessions, settings)
        self.register_recorder = event_log.register_recorder
        self.forget_recorder = event_log.forget_recorder
        self.recorders = event_log.recorders
        self.log_events = event_log.log_events
        self.read_events = event_log.read_events
        self.acknowledge_events = event_log.acknowledge_events
        self.lost_events = event_log.lost_events
        self.event_log = event_log.event_log

    async def open(self) -> None:
        """Connect. Waits for a server that answers but is still starting; later operations do not wait."""
        session = await self._connected()
        self._signer = await signer_at(self, self._settings)
        if self._signer is not None and self._settings.remembers_signatures:
            await begin_signatures(session)

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
        """Reconnect lost connections; raise BrokerUnavailable if that fails."""
        await self._sessions.get()
        await self.coordination.reconnect()

    async def close(self) -> None:
        """Give up locks and close all connections; RabbitMQ requeues claimed messages."""
        await self.coordination.close()
        await self._sessions.close()

    async def publish(self, batch: Sequence[Outgoing]) -> None:
        """Send task messages, confirmed on return; raise BrokerRefused if some were refused."""
        session = await self._sessions.get()
        await session.send(publishing.sendable_tasks(batch, session.queues, cluster_now()))

    # -- claiming --------------------------------------------------------------------------------

    async def claim(self, owner: str, queues: Sequence[str], limit: int, *, revoked_after: int = 0) -> Claim:
        """Claim up to `limit` messages for this owner; the reply has the revokes since `revoked_after`."""
        session = await self._sessions.get()
        claims, revokes = session.claims, session.views.revokes
        await leave_paused(session, owner, queues)
        usable = not_paused(session, self._usable(queues))
        will_be_woken = claims.will_be_woken(owner, usable, limit)
        try:
            if not will_be_woken and not claims.has_arrived(owner, usable):
                for queue in usable:
                    await session.make_queue(queue)
                await session.catch_up()
                await self._park_early(session, claims)
                usable = not_paused(session, usable)
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
            if any(arrived.redelivered or arrived.state.ran for _, arrived in taken):
                await session.catch_up()  # the counts of starts must be known
                unstarted = await session.take_unstarted(taken)
        except BaseException:
            claims.put_back(taken)
            raise
        deliveries = claims.deliver(owner, taken, unstarted)
        new_revokes = revokes.after(revoked_after, cluster_now())
        return Claim(deliveries, new_revokes, revokes.cursor, lease_ended=not claims.renew(owner))

    def _usable(self, queues: Sequence[str]) -> Sequence[str]:
        """Return the queues that were not refused a moment ago; all, if each was."""
        if not self._unusable:
            return queues
        now = monotonic()
        self._unusable = {queue: until for queue, until in self._unusable.items() if until > now}
        return [queue for queue in queues if queue not in self._unusable] or queues

    async def wait_ready(self, queues: Sequence[str], timeout_s: float, *, owner: str = "") -> bool:
        """Return when a message may be claimed from these queues, or after the time-out."""
        session = await self._sessions.get()
        facts, pauses_before = session.views.facts, session.views.facts.pauses_read
        queues = not_paused(session, self._usable(queues))
        if session.claims.watches(queues):
            session.claims.note_waiting(owner)
            await session.claims.wait(queues, timeout_s, is_over=lambda: facts.pauses_read != pauses_before)
            return True
        ends = asyncio.get_running_loop().time() + timeout_s
        while not any((await session.counts(queues)).values()):
            left_s = ends - asyncio.get_running_loop().time()
            if left_s <= 0:
                break
            await asyncio.sleep(min(left_s, POLL_S))
        return True

    async def renew(self, owner: str) -> bool:
        """Extend the owner's lease; False if it had ended before."""
        session = await self._sessions.get()
        await session.free_lost()
        return session.claims.renew(owner)

    async def return_lost(self, *, by_turn: bool = False) -> int:
        """Return the number of claims of silent owners in this process that were returned.

        RabbitMQ itself returns the messages of dead processes.
        """
        claims = (await self._sessions.get()).claims
        lost, claims.lost = claims.lost, 0
        return lost

    async def leave_queue(self, owner: str, queue: str, *, is_busy: bool = False) -> None:
        """Return the messages of the queue that the owner has fetched and not claimed."""
        if (session := self._sessions.alive) is not None:
            await session.leave(owner, queue, is_busy=is_busy)

    async def forget_owner(self, owner: str) -> int:
        """End all claims and consumers of the owner; return the number of returned claims."""
        session = self._sessions.alive
        return 0 if session is None else await session.forget(owner)

    async def ended(self, tags: Sequence[Tag]) -> frozenset[Tag]:
        """Return those of the claims that have ended: a verdict on them would be a conflict."""
        session = self._sessions.alive
        if session is None:  # all claims ended with it
            return frozenset(tags) - self._sessions.unknown
        active = session.claims.active
        gone = {tag for tag in tags if tag not in active or not active[tag].consumer.is_open}
        return frozenset(gone) - self._sessions.unknown

    async def _park_early(self, session: Session, claims: Claims) -> None:
        """Move messages that arrived before they are due to the next level of the delay ladder, if messages
        can be sent now.
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

    # -- queues ----------------------------------------------------------------------------------

    async def queues(self, only: Collection[str] | None = None) -> Mapping[str, Depth]:
        """Return the depth of every queue that is paused or not empty."""
        session = await self._sessions.get()
        await session.catch_up()
        paused = session.views.facts.paused
        names = sorted(session.views.facts.queues | paused.keys())
        steps = {name: delay_queues(name) for name in names}
        counts = await session.counts([*names, *(step for of in steps.values() for step in of)])
        depths: dict[str, Depth] = {}
        for name in names:
            consumers = [consumer for consumer in session.claims.consumers() if consumer.queue == name]
            ready = counts.get(name, 0) + sum(consumer.buffered for consumer in consumers)
            delayed = sum(counts.get(step, 0) for step in steps[name])
            delayed += sum(consumer.held + len(consumer.early) for consumer in consumers)
            claimed = sum(consumer.claimed for consumer in consumers)
            depth = Depth(ready, delayed, claimed, paused=name in paused)
            if depth != Depth(0, 0, 0):
                depths[name] = depth
        return depths

    async def purge(self, queue: str) -> int:
        """Delete the waiting messages of the queue, delayed ones too; return their number."""
        CAPABILITIES.refuse_reserved(queue)
        session = await self._sessions.get()
        counts = await session.counts([queue, *delay_queues(queue)])
        purged = sum(
            consumer.drop_waiting() for consumer in session.claims.consumers() if consumer.queue == queue
        )
        for name in counts:
            purged += await session.purge(name)
        return purged

    async def requeue_dead(self, letter_ids: Sequence[int | str], *, even_if_used: bool = False) -> int:
        """Requeue dead letters; return their number."""
        return await self._operations.requeue_dead(letter_ids, self.signer, even_if_used=even_if_used)

    # -- what a cluster shares -------------------------------------------------------------------

    async def broadcast(self, batch: Sequence[Broadcast], *, ttl_s: float) -> int | None:
        """Send to all listeners; return 0 if RabbitMQ reports that nothing listens, else None."""
        if ttl_s <= 0:  # RabbitMQ would still deliver it to waiting consumers
            return None
        session = await self._sessions.get()
        posts = [publishing.broadcast(sent, ttl_s, asks_for_listeners=True) for sent in batch]
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
        undelivered = [place for place, why in refused.items() if why == unbound(*posts[place].route)]
        if len(undelivered) < len(refused):
            raise publishing.refusal(refused, posts)
        return 0 if posts and len(undelivered) == len(posts) else None

    @asynccontextmanager
    async def subscribe(
        self, exchange: str, patterns: Sequence[str], *, unread_ttl_s: float | None = None
    ) -> AsyncIterator[Subscription]:
        """Listen to the broadcasts that match the patterns, while the block runs."""
        subscription = AmqpSubscription(self._sessions, exchange, patterns, unread_ttl_s)
        try:
            await subscription.enter()
            yield subscription
        finally:
            await subscription.leave()

    async def store_time(self) -> None:
        """Return None: RabbitMQ has no clock to ask."""

    async def mark_alive(self, node: str, incarnation: int, *, ttl_s: float) -> None:
        """Do nothing: the mailbox that a node listens on is removed with its connection."""

    async def probe(self, node: str, incarnation: int = 0) -> Evidence:
        """Return whether a node is alive, by its mailbox."""
        return await locks.probe_mailbox(await self._sessions.get(), node)

    async def revoke(self, revokes: Sequence[Revoke]) -> None:
        """Record revokes for all workers; raise RevokesFull at the limit."""
        session = await self._sessions.get()
        await session.catch_up()
        session.views.revokes.check_room(revokes, self._settings.revokes_max, cluster_now())
        await session.publisher.send(
            [publishing.entry(topology.REVOKES, encode_record(entry)) for entry in revokes]
        )

    async def sweep(self) -> None:
        """Forget expired records, and write facts again before they fall off the stream's end."""
        session = await self._sessions.get()
        session.views.revokes.sweep(cluster_now())
        session.views.signatures.sweep(cluster_now())
        self._log_horizon(session.views.signatures.horizon)
        await self.coordination.sweep()

    def _log_horizon(self, horizon: float) -> None:
        """Log at most once an hour that messages are refused although their signatures have not expired."""
        now = cluster_now()
        if horizon > self._logged_horizon and now - self._logged_horizon_at >= LOG_AGAIN_S:
            self._logged_horizon, self._logged_horizon_at = horizon, now
            log.warning(
                "older signed messages are refused: the record of used signatures is full",
                extra={"reaches_back_s": round(now - horizon)},
            )
