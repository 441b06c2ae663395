"""RedisBroker: claims, verdicts and everything else that a worker asks of a Redis server.

What must happen together is one script (`*.lua`), judged by the server's clock; this file sends
it and reads its reply. One connection serves nearly all of it, a second one waits for messages, a
third, opened when it is needed, coordinates, and each subscription has its own, as Redis wants it.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

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
    Settled,
    Subscription,
    Tag,
    Verdict,
    judge_mark,
)
from umbel.brokers.redis import dead_letters, event_log
from umbel.brokers.redis.address import parse_addresses, without_password
from umbel.brokers.redis.answers import ASKER_LIFE_S, AnswerQueue, is_direct, sweep_askers
from umbel.brokers.redis.coordination import RedisCoordination
from umbel.brokers.redis.handing import Adoptions
from umbel.brokers.redis.holding import Group, Holding
from umbel.brokers.redis.keys import Keys
from umbel.brokers.redis.link import Link
from umbel.brokers.redis.publishing import declare, parkable, push
from umbel.brokers.redis.revokes import revokes_to_record
from umbel.brokers.redis.scripts import script
from umbel.brokers.redis.subscription import RedisSubscription, broadcast
from umbel.brokers.redis.verdicts import settle_arguments, ttl_ms_of
from umbel.brokers.redis.waiting import Watch
from umbel.errors import BrokerError
from umbel.wire.envelope_redis import unseal
from umbel.wire.message import Outgoing
from umbel.wire.revoke import Revoke

CAPABILITIES = Capabilities(
    transport="redis",
    atomic_settle=True,
    stores_results=True,
    fanout=True,
    leases=True,
    delayed=True,
    event_log=True,
    priorities="0 first",
    events_of_others="fan-out",
    unique=True,
)
LOST_CHECKS_PER_LEASE = 3
REVOKES_PAGE = 5000
SWEEP_MAX = 5000
UNPARK_MAX_S = 5.0

_CLAIM, _SETTLE, _ABANDON = script("claim"), script("settle"), script("abandon")
_OWNERS, _PUBLISH, _DEPTHS, _REVOKE = script("owners"), script("publish"), script("depths"), script("revoke")
_revoke = msgspec.json.Decoder(Revoke).decode


class RedisBroker:
    def __init__(self, settings: BrokerSettings) -> None:
        self._settings = settings
        addresses = parse_addresses(settings.url, settings.connection_name)
        timeout_s = settings.connect_timeout_s
        self._keys = Keys(settings.key_prefix, addresses[0].database)
        self._link = Link(
            addresses,
            connect_timeout_s=timeout_s,
            reply_timeout_s=timeout_s,
            on_connect=self._greet,
        )
        self._watch = Watch(
            addresses,
            self._keys,
            timeout_s=timeout_s,
            unblock=self._unblock,
            claims_at=lambda: self._link.address,
        )
        self._addresses = addresses
        self._coordination_link = Link(addresses, connect_timeout_s=timeout_s, reply_timeout_s=timeout_s)
        self._coordination = RedisCoordination(self._coordination_link, self._keys)
        self._holding = Holding(self._keys)
        self._adoptions = Adoptions(self._link, self._keys, self._holding, lease_s=settings.lease_s)
        self._ttl_ms = ttl_ms_of(settings.result_expires_s)
        self._declared: set[str] = set()
        self._consumed: frozenset[str] = frozenset()  # by the last claim
        self._last_queue = ""  # had the last turn in the last claim
        self._lost_checked_at = 0.0
        self._sweep_askers_at = 0.0

    @property
    def url(self) -> str:
        """Without the password: it is shown, and compared with the address of the results."""
        return without_password(self._settings.url)

    @property
    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    @property
    def coordination(self) -> RedisCoordination:
        return self._coordination

    async def open(self) -> None:
        await self._link.connect()

    async def close(self) -> None:
        self._link.close()
        self._coordination_link.close()
        self._watch.close()

    async def publish(self, batch: Sequence[Outgoing]) -> None:
        if not batch:
            return
        await self._declare(outgoing.queue for outgoing in batch)
        if any(outgoing.not_before for outgoing in batch):
            await self._link.run(_PUBLISH, self._keys.prefix, *parkable(self._keys, batch, self._consumed))
        else:
            await self._link.call_all(push(self._keys, batch))

    # -- claims ----------------------------------------------------------------------------------

    async def claim(self, owner: str, queues: Sequence[str], limit: int, *, revoked_after: int = 0) -> Claim:
        handed, self._watch.handed = self._watch.handed, None
        if limit > 0 and (given := self._adoptions.begin(handed, owner, queues, revoked_after)) is not None:
            return Claim([given], (), revoked_after)
        await self._declare(queues)
        await self._adoptions.finish()
        self._consumed = frozenset(queues)
        await self._give_back_lost_claims()
        returned = await self.return_lost() if self._time_for_lost() else 0
        ticket = self._holding.ticket()
        args = (
            self._keys.prefix,
            owner,
            self._settings.lease_s,
            ticket,
            self._link.generation,
            limit,
            revoked_after,
            REVOKES_PAGE,
            *self._in_turn(queues),
        )
        try:
            reply = await self._link.run(_CLAIM, *args)
        except (asyncio.CancelledError, BrokerError):
            # It may have been carried out, and nobody would ever settle what it took.
            self._holding.give_up(owner, ticket)
            self._send_back_lost_claims()
            raise
        epoch, now_s, cursor, revokes, _, *taken = reply
        deliveries = self._holding.take_in(owner, ticket, epoch, taken)
        if deliveries:
            self._last_queue = deliveries[-1].queue
        standing = [revoke for one in revokes if (revoke := _revoke(one)).is_news(float(now_s))]
        return Claim(deliveries, standing, int(cursor), returned)

    async def wait_ready(self, queues: Sequence[str], timeout_s: float, *, owner: str = "") -> None:
        await self._watch.wait(queues, timeout_s, owner=owner)

    async def renew(self, owner: str) -> bool:
        if self._watch.handed is not None:  # and the owner has not claimed since: it may not for long
            self._watch.handed = None
            await self._adoptions.finish()
            await self._owners("unhand", owner)
        return bool(await self._owners("renew", owner))

    async def return_lost(self) -> int:
        if time.monotonic() > self._sweep_askers_at:
            self._sweep_askers_at = time.monotonic() + ASKER_LIFE_S
            await sweep_askers(self._link, self._keys)
        return await self._owners("reap", "")

    async def leave_queue(self, owner: str, queue: str) -> None:
        """Nothing is fetched ahead of a claim, but the server might hand over what comes next."""
        self._watch.leave()

    async def forget_owner(self, owner: str) -> int:
        await self._link.connect()
        await self._adoptions.finish()
        self._unblock(self._watch.client_id)  # or the server might hand it something after that
        count = await self._owners("forget", owner)
        self._holding.forget(owner)
        await self._unpark(owner)
        return count

    async def _unpark(self, owner: str) -> None:
        """Give Celery what the last worker of ours leaves parked, for as long as stopping may take.

        What is not reached stays parked; that loses nothing, since the next worker of ours has it due
        in time, but Celery's workers do not see it.
        """
        until = time.monotonic() + UNPARK_MAX_S
        while await self._owners("unpark", owner) and time.monotonic() < until:
            continue

    async def settle(self, verdicts: Sequence[Verdict]) -> Settled:
        await self._adoptions.finish()
        groups, refused = self._holding.judge(verdicts)
        applied, waiting = 0, list(groups)
        try:
            while waiting:
                group = waiting[0]
                if await self._settle_group(group):
                    applied += len(group.verdicts)
                else:
                    refused |= {verdict.tag for verdict in group.verdicts}
                self._holding.settled(waiting.pop(0))
        except (asyncio.CancelledError, BrokerError):
            self._holding.restore(waiting)
            raise
        return Settled(applied, frozenset[Tag](refused))

    # -- looking into queues ---------------------------------------------------------------------

    async def queues(self) -> Mapping[str, Depth]:
        found = await self._link.run(_DEPTHS, self._keys.prefix)
        depths = {
            found[at].decode(): Depth(*found[at + 1 : at + 4])
            for at in range(0, len(found), 4)
            if any(found[at + 1 : at + 4])
        }
        return dict(sorted(depths.items()))

    async def peek(self, queue: str, limit: int) -> Sequence[Delivery]:
        commands = [("LRANGE", key, -limit, -1) for key in self._keys.lists_of(queue)]
        envelopes = [one for found in await self._link.call_all(commands) for one in reversed(found)]
        opened = [unseal(envelope) for envelope in envelopes[:limit]]
        return [
            Delivery(f"peek:{place}", queue, one.message, one.starts, one.redelivered)
            for place, one in enumerate(opened)
        ]

    async def purge(self, queue: str) -> int:
        lists = self._keys.lists_of(queue)
        counts = [("LLEN", key) for key in lists]
        delayed = self._keys.delayed(queue)
        commands = [("MULTI",), *counts, ("ZCARD", delayed), ("UNLINK", *lists, delayed), ("EXEC",)]
        *_, done = await self._link.call_all(commands)
        return sum(done[:-1])

    async def dead_letters(self, limit: int = DEAD_LETTER_PEEK_MAX) -> Sequence[DeadLetter]:
        return await dead_letters.read(self._link, self._keys, limit)

    async def requeue_dead(self, letter_ids: Sequence[int | str]) -> int:
        return await dead_letters.requeue(self._link, self._keys, letter_ids)

    # -- what a cluster shares -------------------------------------------------------------------

    async def broadcast(self, batch: Sequence[Broadcast], *, ttl_s: float) -> int | None:
        return await broadcast(self._link, self._keys, batch) if batch and ttl_s > 0 else 0

    @asynccontextmanager
    async def subscribe(self, exchange: str, patterns: Sequence[str]) -> AsyncIterator[Subscription]:
        where = (self._addresses, self._keys, exchange, patterns)
        timeout_s = self._settings.connect_timeout_s
        subscription: AnswerQueue | RedisSubscription
        if is_direct(exchange):
            subscription = AnswerQueue(*where, timeout_s=timeout_s, tidy_on=self._link)
        else:
            subscription = RedisSubscription(*where, timeout_s=timeout_s)
        await subscription.enter()
        try:
            yield subscription
        finally:
            await subscription.leave()

    async def mark_alive(self, node: str, incarnation: int, *, ttl_s: float) -> None:
        await self._link.call("SET", self._keys.mark(node), incarnation, "PX", max(1, round(ttl_s * 1000)))

    async def probe(self, node: str, incarnation: int = 0) -> Evidence:
        return judge_mark(int(await self._link.call("GET", self._keys.mark(node)) or 0), incarnation)

    async def revoke(self, revokes: Sequence[Revoke]) -> None:
        for batch in revokes_to_record(self._keys, revokes, self._settings.revokes_max):
            batch.check(await self._link.run(_REVOKE, *batch.arguments))

    async def register_recorder(self, name: str) -> int:
        return await event_log.register(self._link, self._keys, name)

    async def forget_recorder(self, name: str) -> None:
        await self._link.call("HDEL", self._keys.recorders, name)

    async def recorders(self) -> Sequence[str]:
        return sorted(name.decode() for name in await self._link.call("HKEYS", self._keys.recorders))

    async def log_events(self, events: Sequence[tuple[str, bytes]]) -> int:
        return await event_log.append(self._link, self._keys, events, self._settings.event_log_max)

    async def read_events(self, name: str, limit: int, *, after: int = 0) -> Sequence[LoggedEvent]:
        return await event_log.read(self._link, self._keys, name, limit, after)

    async def acknowledge_events(self, name: str, offset: int) -> None:
        await event_log.acknowledge(self._link, self._keys, name, offset)

    async def lost_events(self) -> int:
        return await event_log.lost(self._link, self._keys)

    async def event_log(self) -> EventLogState:
        return await event_log.state(self._link, self._keys)

    async def sweep(self) -> None:
        """Results and elections end by themselves; events and revokes do not."""
        older_than = time.time() - self._settings.event_log_retention_s
        while await event_log.sweep(self._link, self._keys, older_than, SWEEP_MAX) >= SWEEP_MAX:
            continue
        while await self._link.run(_REVOKE, "sweep", self._keys.prefix, SWEEP_MAX) >= SWEEP_MAX:
            continue

    # -- the parts of it -------------------------------------------------------------------------

    async def _greet(self) -> None:
        """On every new connection: it may be to a server that has forgotten everything."""
        self._declared.clear()

    async def _declare(self, queues: Iterable[str]) -> None:
        await self._link.connect()
        new = set(queues) - self._declared
        if new:
            await self._link.call_all(declare(self._keys, new))
            self._declared |= new

    async def _owners(self, verb: str, owner: str) -> int:
        count: int = await self._link.run(_OWNERS, verb, self._keys.prefix, self._settings.lease_s, owner)
        return count

    async def _settle_group(self, group: Group) -> bool:
        hold = group.hold
        status = await self._link.run(
            _SETTLE,
            self._keys.prefix,
            hold.owner,
            hold.epoch,
            0 if group.sure else 1,
            *settle_arguments(self._keys, group.verdicts, self._ttl_ms, self._consumed),
        )
        return bool(status)

    def _unblock(self, client_id: int) -> asyncio.Future[list[Any]] | None:
        """End the wait of another connection of ours; without this it ends by itself, a little later."""
        if not client_id or not self._link.is_connected:
            return None
        return self._link.send([("CLIENT", "UNBLOCK", client_id)])

    async def _give_back_lost_claims(self) -> None:
        lost = self._holding.lost_tickets
        for owner in list(lost):
            tickets = lost[owner]
            await self._link.run(_ABANDON, self._keys.prefix, owner, self._link.generation, *tickets)
            lost.pop(owner, None)

    def _send_back_lost_claims(self) -> None:
        """The same at once, where the connection still stands: it carries out calls in order."""
        lost = self._holding.lost_tickets
        for owner in list(lost):
            if not self._link.is_connected:
                return
            self._link.send(
                [
                    (
                        "EVAL",
                        _ABANDON.text,
                        0,
                        self._keys.prefix,
                        owner,
                        self._link.generation,
                        *lost.pop(owner),
                    )
                ]
            )

    def _in_turn(self, queues: Sequence[str]) -> list[str]:
        names = list(dict.fromkeys(queues))
        if self._last_queue in names:
            turn = names.index(self._last_queue) + 1
            names = names[turn:] + names[:turn]
        return names

    def _time_for_lost(self) -> bool:
        now = time.monotonic()
        if now - self._lost_checked_at < self._settings.lease_s / LOST_CHECKS_PER_LEASE:
            return False
        self._lost_checked_at = now
        return True
