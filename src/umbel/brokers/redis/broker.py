"""RedisBroker: the operations of a worker on a Redis server; claims are in `claims.py`.

What must happen together is one script (`*.lua`), which reads the server's clock; this file sends it and
reads its reply. One connection serves nearly all calls. A second one waits for messages, and a third, opened
when it is needed, is for elections and leases. Each subscription has its own, as Redis requires.
"""

import logging
import time
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager

import msgspec
from msgspec.structs import replace

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
    Refused,
    Replaced,
    Resend,
    Resent,
    Settled,
    Spend,
    Subscription,
    Tag,
    Verdict,
    judge_mark,
)
from umbel.brokers.links import MAIN, ConfiguredBroker, signer_at
from umbel.brokers.redis import broadcasts, queues
from umbel.brokers.redis.address import parse_addresses
from umbel.brokers.redis.broadcasts import RedisSubscription, ReplyQueue, broadcast
from umbel.brokers.redis.claims import Claims
from umbel.brokers.redis.coordination import RedisCoordination
from umbel.brokers.redis.keys import CAPABILITIES, Keys, cluster_of, cluster_text
from umbel.brokers.redis.link import Link
from umbel.brokers.redis.publishing import (
    Bindings,
    append_arguments,
    publication,
    questions,
    revokes_to_record,
)
from umbel.brokers.redis.replies import ServerRefused
from umbel.brokers.redis.verdicts import follow_ups_of
from umbel.errors import NotSupported
from umbel.protocol.delivery.trust import ClusterId, Doubt
from umbel.text import without_password
from umbel.wire.control import is_for_replies
from umbel.wire.envelope_redis import unseal
from umbel.wire.message import Outgoing
from umbel.wire.records import Revoke

SWEEP_MAX = 5000

log = logging.getLogger("umbel.brokers.redis")

_encode = msgspec.json.Encoder().encode


class RedisBroker(ConfiguredBroker):
    """The asynchronous broker on a Redis server or behind sentinels."""

    def __init__(self, settings: BrokerSettings) -> None:
        super().__init__(settings)
        addresses = parse_addresses(settings.url, settings.connection_name)
        timeout_s = settings.connect_timeout_s
        self._keys = Keys.of(settings, addresses[0].database)
        self._link = Link(
            addresses,
            timeout_s=timeout_s,
            on_connect=self._greet,
            name=MAIN,
            on_link=self._tell_link,
        )
        self._addresses = addresses
        self._coordination_link = Link(
            addresses,
            timeout_s=timeout_s,
            name="coordination",
            on_link=self._tell_link,
        )
        self._bindings = Bindings(self._keys, settings.declared)
        self.coordination = RedisCoordination(self._coordination_link, self._keys, self._bindings)
        self._declared: set[str] = set()
        self._claims = claims = Claims(
            self._link,
            self._keys,
            settings,
            addresses,
            declare=self._declare,
            on_replaced=self._begin_again,
            on_link=self._tell_link,
        )
        self.wait_ready = claims.wait_ready
        self.renew = claims.renew
        self.return_lost = claims.return_lost
        self.forget_owner = claims.forget_owner
        self.ended = claims.ended
        self.permit = claims.permit

    @property
    def url(self) -> str:
        """The address without the password, to be shown and to be compared with that of the results."""
        return without_password(self._settings.url)

    @property
    def capabilities(self) -> Capabilities:
        """What Redis supports as a broker."""
        return CAPABILITIES

    async def open(self) -> None:
        """Connect, and find the cluster id to sign for."""
        await self._link.connect()
        self._signer = await signer_at(self, self._settings)

    async def reconnect(self) -> None:
        """Restore lost connections, and replace those that may be dead although no error has shown it."""
        was_lost = self._link.is_lost
        await self._link.connect()
        if self._coordination_link.is_lost:
            await self._coordination_link.connect()
        await self._claims.reconnect(is_doubtful=was_lost)

    async def close(self) -> None:
        """Close all connections."""
        self._link.close()
        self._coordination_link.close()
        self._claims.close()

    async def publish(self, batch: Sequence[Outgoing]) -> None:
        """Publish the batch as a whole; messages that are not due are delayed if this worker consumes their
        queue.
        """
        if not batch:
            return
        batch = await self._routed(batch)
        await self._declare(outgoing.queue for outgoing in batch)
        args, commands = publication(self._keys, batch, self._claims.consumed)
        if args:
            await self._link.run(self._keys.script("publish"), *args)
        if commands:
            try:
                await self._link.call_all(commands)
            except ServerRefused:  # the script's error text is clearer
                await self._link.run(self._keys.script("publish"), *questions(self._keys, batch))
                raise

    # -- claims ----------------------------------------------------------------------------------

    async def claim(self, owner: str, queues: Sequence[str], limit: int, *, revoked_after: int = 0) -> Claim:
        """Take due messages; NotSupported for a queue that is bound in a way Redis cannot serve."""
        for queue in queues:
            if queue not in self._declared and (problem := self._bindings.problem(queue)):
                raise NotSupported(problem)
        return await self._claims.claim(owner, queues, limit, revoked_after=revoked_after)

    async def leave_queue(self, owner: str, queue: str, *, is_busy: bool = False) -> None:
        """End the wait, so that the server hands over no message of this queue."""
        self._claims.leave()

    async def settle(self, verdicts: Sequence[Verdict]) -> Settled:
        """Apply verdicts; follow-ups that reach no queue are buried before their tasks end."""
        follow_ups = follow_ups_of(verdicts)
        if self._bindings.are_plain(follow_ups):
            return await self._claims.settle(verdicts)
        found = await self._link.call_all(self._bindings.read(follow_ups))
        routed, unroutable = self._bindings.route_verdicts(verdicts, follow_ups, found)
        await self.bury(unroutable)  # before their tasks end: a crash in between repeats work and loses none
        settled = await self._claims.settle(routed)
        return replace(settled, refused=(*unroutable, *settled.refused))

    async def cluster_id(self) -> ClusterId | None:
        """The id stored in this database, if any."""
        return cluster_of(await self._link.call("GET", self._keys.cluster))

    async def keep_cluster_id(self, made: ClusterId) -> ClusterId:
        """Store the id unless there is one; returns the stored one."""
        await self._link.call("SET", self._keys.cluster, cluster_text(made), "NX")
        return await self.cluster_id() or made

    async def spend(self, signatures: Sequence[Spend]) -> Mapping[Tag, Doubt]:
        """Use the signatures of claimed messages, in one script."""
        return await self._claims.spend(signatures, self._signs_for)

    # -- queues and letters ----------------------------------------------------------------------

    async def queues(self, only: Collection[str] | None = None) -> Mapping[str, Depth]:
        """How many messages each queue has; with `only`, just the ready messages of these queues."""
        return await queues.fetch_depths(self._link, self._keys, only)

    async def peek(self, queue: str, limit: int) -> Sequence[Delivery]:
        """The first messages of a queue, read from its lists without claiming them."""
        commands = [("LRANGE", key, -limit, -1) for key in self._keys.lists_of(queue)]
        envelopes = [
            envelope for found in await self._link.call_all(commands) for envelope in reversed(found)
        ]
        opened = [unseal(envelope) for envelope in envelopes[:limit]]
        return [
            Delivery(f"peek:{place}", queue, message.message, message.starts, message.redelivered)
            for place, message in enumerate(opened)
        ]

    async def purge(self, queue: str) -> int:
        """Remove the waiting messages of a queue; how many there were."""
        CAPABILITIES.refuse_reserved(queue)
        return await self._claims.purge(queue)

    async def pause(self, queue: str, mark: Pause) -> None:
        """Record the pause, which every claim reads."""
        await self._link.call("HSET", self._keys.paused, queue, _encode(mark))

    async def resume(self, queue: str) -> bool:
        """Remove the pause; returns whether there was one."""
        return bool(await self._link.call("HDEL", self._keys.paused, queue))

    async def paused(self) -> Mapping[str, Pause]:
        """The paused queues, sorted by name."""
        return await queues.fetch_pauses(self._link, self._keys)

    async def move(self, source: str, target: str, limit: int) -> int:
        """Move waiting messages in one script; BrokerRefused if the next one is signed for its queue."""
        for queue in (source, target):
            CAPABILITIES.refuse_reserved(queue)
        await self._declare([target])
        return await queues.move_waiting(self._link, self._keys, source, target, limit)

    async def dead_letters(self, limit: int = DEAD_LETTER_PEEK_MAX) -> Sequence[DeadLetter]:
        """The newest dead letters, newest first."""
        found = await self._link.call("XREVRANGE", self._keys.dead, "+", "-", "COUNT", limit)
        return [queues.letter_of(self._keys, letter_id, fields) for letter_id, fields in found]

    async def count_dead(self, limit: int) -> int:
        """How many dead letters there are, up to the limit."""
        count: int = await self._link.call("XLEN", self._keys.dead)
        return min(limit, count)

    async def requeue_dead(self, letter_ids: Sequence[int | str], *, even_if_used: bool = False) -> int:
        """Send dead letters again; BrokerRefused names those that cannot be requeued."""
        return await queues.requeue_letters(
            self._link,
            self._keys,
            letter_ids,
            self._routed,
            self.signer,
            even_if_used=even_if_used,
            message_max_bytes=self._settings.message_max_bytes,
        )

    async def drop_dead(self, letter_ids: Sequence[int | str]) -> int:
        """Remove dead letters for good; how many there were."""
        return await queues.drop_letters(self._link, self._keys, letter_ids)

    async def bury(self, refused: Sequence[Refused]) -> None:
        """Put refused messages among the dead letters."""
        await queues.bury_messages(self._link, self._keys, refused)

    async def keep_failed(self, failed: Sequence[Refused]) -> None:
        """Retain messages that were acknowledged before their tasks failed."""
        await queues.bury_messages(self._link, self._keys, failed, queues.keep_limits(self._settings))

    async def failed(self, limit: int, *, task_id: str = "") -> Sequence[DeadLetter]:
        """Retained failures, newest first."""
        return await queues.fetch_failures(self._link, self._keys, limit, task_id, self._settings)

    async def resend(self, letters: Sequence[Resend]) -> Resent:
        """Replace each dead letter with its retry, each in one step."""
        return await queues.resend_letters(self._link, self._keys, letters)

    # -- what a cluster shares -------------------------------------------------------------------

    async def broadcast(self, batch: Sequence[Broadcast], *, ttl_s: float) -> int | None:
        """Publish on Celery's channels; how many connections received the broadcasts to all workers."""
        return await broadcast(self._link, self._keys, batch) if batch and ttl_s > 0 else 0

    @asynccontextmanager
    async def subscribe(
        self, exchange: str, patterns: Sequence[str], *, unread_ttl_s: float | None = None
    ) -> AsyncIterator[Subscription]:
        """Listen on a separate connection: by pub/sub, or on a reply queue for a direct exchange."""
        where = (self._addresses, self._keys, exchange, patterns)
        timeout_s = self._settings.connect_timeout_s
        subscription: ReplyQueue | RedisSubscription
        if is_for_replies(exchange):
            subscription = ReplyQueue(*where, timeout_s=timeout_s, tidy_on=self._link)
        else:
            subscription = RedisSubscription(*where, timeout_s=timeout_s, on_link=self._tell_link)
        await subscription.enter()
        try:
            yield subscription
        finally:
            await subscription.leave()

    async def store_time(self) -> float:
        """The server's clock in Unix seconds."""
        return await queues.server_time(self._link)

    async def mark_alive(self, node: str, incarnation: int, *, ttl_s: float) -> None:
        """Set the liveness mark of a node, which expires by itself."""
        await self._link.call("SET", self._keys.mark(node), incarnation, "PX", max(1, round(ttl_s * 1000)))

    async def probe(self, node: str, incarnation: int = 0) -> Evidence:
        """Whether a node with this incarnation is alive, as far as its liveness mark shows."""
        return judge_mark(int(await self._link.call("GET", self._keys.mark(node)) or 0), incarnation)

    async def revoke(self, revokes: Sequence[Revoke]) -> None:
        """Record revokes in batches; RevokesFull when the record is at its limit."""
        for batch in revokes_to_record(revokes, self._settings.revokes_max):
            batch.check(await self._link.run(self._keys.script("revoke"), *batch.arguments))

    async def register_recorder(self, name: str) -> int:
        """Log events for this recorder; returns the offset it has acknowledged."""
        return int(await self._link.run(self._keys.script("event_log"), "register", name))

    async def forget_recorder(self, name: str) -> None:
        """Remove a recorder."""
        await self._link.call("HDEL", self._keys.recorders, name)

    async def recorders(self) -> Sequence[str]:
        """The names of the registered recorders, sorted."""
        return sorted(name.decode() for name in await self._link.call("HKEYS", self._keys.recorders))

    async def log_events(self, entries: Sequence[tuple[str, bytes]], *, counts: Sequence[int] = ()) -> int:
        """Append events while a recorder is registered; how many entries were stored."""
        if not entries:
            return 0
        args = append_arguments(entries, counts, self._settings.event_log_max)
        return int(await self._link.run(self._keys.script("event_log"), *args))

    async def read_events(self, name: str, limit: int, *, after: int = 0) -> Sequence[LoggedEvent]:
        """The next entries for a recorder."""
        return await broadcasts.read_log(self._link, self._keys, name, limit, after)

    async def acknowledge_events(self, name: str, offset: int) -> None:
        """Record how far a recorder has read; entries that all recorders have read are removed."""
        await self._link.run(self._keys.script("event_log"), "acknowledge", name, offset)

    async def lost_events(self) -> int:
        """How many events were dropped before they were read."""
        return int(await self._link.call("GET", self._keys.events_lost) or 0)

    async def event_log(self) -> EventLogState:
        """The last offset, and how far each recorder has read."""
        return await broadcasts.log_state(self._link, self._keys)

    async def sweep(self) -> None:
        """Remove old events, revokes and failures; results and elections expire by themselves."""
        await queues.trim_failures(self._link, self._keys, self._settings)
        await broadcasts.sweep_log(self._link, self._keys, time.time() - self._settings.event_log_retention_s)
        while await self._link.run(self._keys.script("revoke"), "sweep", SWEEP_MAX) >= SWEEP_MAX:
            continue

    # -- private ---------------------------------------------------------------------------------

    async def _greet(self) -> None:
        """Forget the declarations on every new connection, because the server may have lost its data."""
        self._declared.clear()

    def _begin_again(self, replaced: Replaced) -> None:
        self._declared.clear()
        self._tell_replaced(replaced)

    async def _routed(self, batch: Sequence[Outgoing]) -> Sequence[Outgoing]:
        """The batch with the queues that messages for exchanges go to; BrokerRefused if one reaches none."""
        if self._bindings.are_plain(batch):
            return batch
        return self._bindings.route_all(batch, await self._link.call_all(self._bindings.read(batch)))

    async def _declare(self, queues: Iterable[str]) -> None:
        await self._link.connect()
        new = set(queues) - self._declared
        if new:
            for problem in await self._link.attempt_all(self._bindings.declare(new)):
                # The queue's messages are consumed anyway; Celery, or a list of all queues, may not show it.
                text = "cannot declare queues; consuming them anyway, but lists of queues may not show them"
                log.warning(text, extra={"queues": sorted(new), "why": str(problem)})
            self._declared |= new
