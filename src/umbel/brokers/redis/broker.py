"""RedisBroker: what a worker asks of a Redis server; what it takes and settles is in `claims.py`.

What must happen together is one script (`*.lua`), judged by the server's clock; this file sends
it and reads its reply. One connection serves nearly all of it, a second one waits for messages, a
third, opened when it is needed, coordinates, and each subscription has its own, as Redis wants it.
"""

import logging
import time
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager

from msgspec.structs import replace

from umbel.brokers.configured import ConfiguredBroker
from umbel.brokers.evidence import Evidence, judge_mark
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
    Replaced,
    Resend,
    Resent,
    Settled,
    Spend,
    Subscription,
    Tag,
    Verdict,
)
from umbel.brokers.links import MAIN
from umbel.brokers.redis import dead_letters, depths, event_log, failures, pauses
from umbel.brokers.redis.address import parse_addresses
from umbel.brokers.redis.answers import AnswerQueue, is_direct
from umbel.brokers.redis.bindings import Bindings, Tables, refusal
from umbel.brokers.redis.claims import Claims
from umbel.brokers.redis.coordination import RedisCoordination
from umbel.brokers.redis.keys import Keys
from umbel.brokers.redis.link import Link
from umbel.brokers.redis.publishing import publication, questions
from umbel.brokers.redis.replies import ServerRefused
from umbel.brokers.redis.revokes import revokes_to_record
from umbel.brokers.redis.scripts import script
from umbel.brokers.redis.subscription import RedisSubscription, broadcast
from umbel.brokers.redis.verdicts import follow_ups_of
from umbel.errors import NotSupported
from umbel.urls import without_password
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
    limits=True,
    idle_wait_s=60.0,
)
SWEEP_MAX = 5000

log = logging.getLogger("umbel.brokers.redis")

_REVOKE = script("revoke")


class RedisBroker(ConfiguredBroker):
    def __init__(self, settings: BrokerSettings) -> None:
        super().__init__(settings)
        addresses = parse_addresses(settings.url, settings.connection_name)
        timeout_s = settings.connect_timeout_s
        self._keys = Keys.of(settings, addresses[0].database)
        self._link = Link(
            addresses,
            connect_timeout_s=timeout_s,
            reply_timeout_s=timeout_s,
            on_connect=self._greet,
            name=MAIN,
            on_link=self._tell_link,
        )
        self._addresses = addresses
        self._coordination_link = Link(
            addresses,
            connect_timeout_s=timeout_s,
            reply_timeout_s=timeout_s,
            name="coordination",
            on_link=self._tell_link,
        )
        self._bindings = Bindings(self._keys, settings.declared)
        self._coordination = RedisCoordination(self._coordination_link, self._keys, self._bindings)
        self._declared: set[str] = set()
        self._claims = Claims(
            self._link,
            self._keys,
            settings,
            addresses,
            declare=self._declare,
            on_replaced=self._begin_again,
            on_link=self._tell_link,
        )

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

    async def reconnect(self) -> None:
        was_lost = self._link.is_lost
        await self._link.connect()
        if self._coordination_link.is_lost:
            await self._coordination_link.connect()
        await self._claims.reconnect(is_doubtful=was_lost)

    async def close(self) -> None:
        self._link.close()
        self._coordination_link.close()
        self._claims.close()

    async def publish(self, batch: Sequence[Outgoing]) -> None:
        if not batch:
            return
        batch = await self._routed(batch)
        await self._declare(outgoing.queue for outgoing in batch)
        args, commands = publication(self._keys, batch, self._claims.consumed)
        if args:
            await self._link.run(self._keys.script("publish"), self._keys.prefix, *args)
        if commands:
            try:
                await self._link.call_all(commands)
            except ServerRefused:  # the script says it in better words
                await self._link.run(
                    self._keys.script("publish"), self._keys.prefix, *questions(self._keys, batch)
                )
                raise

    # -- claims ----------------------------------------------------------------------------------

    async def claim(self, owner: str, queues: Sequence[str], limit: int, *, revoked_after: int = 0) -> Claim:
        for queue in queues:
            if queue not in self._declared and (problem := self._bindings.problem(queue)):
                raise NotSupported(problem)
        return await self._claims.claim(owner, queues, limit, revoked_after=revoked_after)

    async def wait_ready(self, queues: Sequence[str], timeout_s: float, *, owner: str = "") -> bool:
        return await self._claims.wait_ready(queues, timeout_s, owner=owner)

    async def renew(self, owner: str) -> bool:
        return await self._claims.renew(owner)

    async def return_lost(self, *, by_turn: bool = False) -> int:
        return await self._claims.return_lost(by_turn=by_turn)

    async def leave_queue(self, owner: str, queue: str) -> None:
        self._claims.leave()

    async def forget_owner(self, owner: str) -> int:
        return await self._claims.forget_owner(owner)

    async def ended(self, tags: Sequence[Tag]) -> frozenset[Tag]:
        return await self._claims.ended(tags)

    async def settle(self, verdicts: Sequence[Verdict]) -> Settled:
        follow_ups = follow_ups_of(verdicts)
        tables = await self._tables(follow_ups) if follow_ups else {}
        if not tables:
            return await self._claims.settle(verdicts)
        routed, astray = self._bindings.route_verdicts(verdicts, tables)
        await self.bury(astray)  # before their tasks end: a crash in between repeats work and loses none
        settled = await self._claims.settle(routed)
        return replace(settled, refused=(*astray, *settled.refused))

    async def spend(self, signatures: Sequence[Spend]) -> frozenset[Tag]:
        return await self._claims.spend(signatures)

    async def permit(self, asked: Sequence[Permit]) -> Mapping[Tag, str | None]:
        return await self._claims.permit(asked)

    # -- looking into queues ---------------------------------------------------------------------

    async def queues(self, only: Collection[str] | None = None) -> Mapping[str, Depth]:
        return await depths.read(self._link, self._keys, only)

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
        removed = sum(one for one in done[:-1] if isinstance(one, int))  # else a key of another type
        return removed + await self._claims.purge_waiting(queue)

    async def pause(self, queue: str, mark: Pause) -> None:
        await pauses.pause(self._link, self._keys, queue, mark)

    async def resume(self, queue: str) -> bool:
        return await pauses.resume(self._link, self._keys, queue)

    async def paused(self) -> Mapping[str, Pause]:
        return await pauses.paused(self._link, self._keys)

    async def move(self, source: str, target: str, limit: int) -> int:
        await self._declare([target])
        return await pauses.move(self._link, self._keys, source, target, limit)

    async def dead_letters(self, limit: int = DEAD_LETTER_PEEK_MAX) -> Sequence[DeadLetter]:
        return await dead_letters.read(self._link, self._keys, limit)

    async def requeue_dead(self, letter_ids: Sequence[int | str]) -> int:
        return await dead_letters.requeue(self._link, self._keys, letter_ids, self._routed, self.keyring)

    async def drop_dead(self, letter_ids: Sequence[int | str]) -> int:
        return await dead_letters.drop(self._link, self._keys, letter_ids)

    async def bury(self, refused: Sequence[Refused]) -> None:
        await dead_letters.bury(self._link, self._keys, refused)

    async def keep_failed(self, failed: Sequence[Refused]) -> None:
        await failures.keep(self._link, self._keys, failed, self._settings)

    async def failed(self, limit: int, *, task_id: str = "") -> Sequence[DeadLetter]:
        return await failures.read(self._link, self._keys, limit, task_id, self._settings)

    async def resend(self, letters: Sequence[Resend]) -> Resent:
        return await failures.resend(self._link, self._keys, letters)

    # -- what a cluster shares -------------------------------------------------------------------

    async def broadcast(self, batch: Sequence[Broadcast], *, ttl_s: float) -> int | None:
        return await broadcast(self._link, self._keys, batch) if batch and ttl_s > 0 else 0

    @asynccontextmanager
    async def subscribe(
        self, exchange: str, patterns: Sequence[str], *, unread_ttl_s: float | None = None
    ) -> AsyncIterator[Subscription]:
        where = (self._addresses, self._keys, exchange, patterns)
        timeout_s = self._settings.connect_timeout_s
        subscription: AnswerQueue | RedisSubscription
        if is_direct(exchange):
            subscription = AnswerQueue(*where, timeout_s=timeout_s, tidy_on=self._link)
        else:
            subscription = RedisSubscription(*where, timeout_s=timeout_s, on_link=self._tell_link)
        await subscription.enter()
        try:
            yield subscription
        finally:
            await subscription.leave()

    async def store_time(self) -> float:
        seconds, microseconds = await self._link.call("TIME")
        return int(seconds) + int(microseconds) / 1e6

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

    async def log_events(self, entries: Sequence[tuple[str, bytes]], *, counts: Sequence[int] = ()) -> int:
        return await event_log.append(self._link, self._keys, entries, counts, self._settings.event_log_max)

    async def read_events(self, name: str, limit: int, *, after: int = 0) -> Sequence[LoggedEvent]:
        return await event_log.read(self._link, self._keys, name, limit, after)

    async def acknowledge_events(self, name: str, offset: int) -> None:
        await event_log.acknowledge(self._link, self._keys, name, offset)

    async def lost_events(self) -> int:
        return await event_log.lost(self._link, self._keys)

    async def event_log(self) -> EventLogState:
        return await event_log.state(self._link, self._keys)

    async def sweep(self) -> None:
        """Results and elections end by themselves; events, revokes and failures do not."""
        await failures.sweep(self._link, self._keys, self._settings)
        older_than = time.time() - self._settings.event_log_retention_s
        while await event_log.sweep(self._link, self._keys, older_than):
            continue
        while await self._link.run(_REVOKE, "sweep", self._keys.prefix, SWEEP_MAX) >= SWEEP_MAX:
            continue

    # -- the parts of it -------------------------------------------------------------------------

    async def _greet(self) -> None:
        """On every new connection: it may be to a server that has forgotten everything."""
        self._declared.clear()

    def _begin_again(self, replaced: Replaced) -> None:
        self._declared.clear()
        self._tell_replaced(replaced)

    async def _tables(self, batch: Iterable[Outgoing]) -> Tables:
        exchanges = self._bindings.exchanges(batch)
        if not exchanges:
            return {}
        return dict(zip(exchanges, await self._link.call_all(self._bindings.read(exchanges)), strict=True))

    async def _routed(self, batch: Sequence[Outgoing]) -> Sequence[Outgoing]:
        """With the queues that messages for exchanges go to."""
        tables = await self._tables(batch)
        if not tables:
            return batch
        routed = self._bindings.route(batch, tables)
        if routed.refused:
            raise refusal(routed.refused)
        return routed.batch

    async def _declare(self, queues: Iterable[str]) -> None:
        await self._link.connect()
        new = set(queues) - self._declared
        if new:
            for problem in await self._link.attempt_all(self._bindings.declare(new)):
                # Its messages come all the same; Celery, or a list of all queues, may not know it.
                text = "cannot declare queues; consuming them anyway, but lists of queues may not show them"
                log.warning(text, extra={"queues": sorted(new), "why": str(problem)})
            self._declared |= new
