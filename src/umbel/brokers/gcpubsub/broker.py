"""PubsubBroker: the asynchronous face of Google Pub/Sub."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

from umbel.brokers.configured import ConfiguredBroker
from umbel.brokers.gcpubsub import letters, posts, verdicts
from umbel.brokers.gcpubsub.capabilities import CAPABILITIES
from umbel.brokers.gcpubsub.claims import Claims
from umbel.brokers.gcpubsub.service import Service
from umbel.brokers.gcpubsub.subscription import PubsubSubscription
from umbel.brokers.gcpubsub.unsupported import NoCoordination, Unsupported, refuse
from umbel.brokers.interface import (
    DEAD_LETTER_PEEK_MAX,
    Broadcast,
    BrokerSettings,
    Capabilities,
    Claim,
    DeadLetter,
    Delivery,
    Refused,
    Settled,
    Subscription,
    Tag,
    Verdict,
)
from umbel.clock import cluster_now
from umbel.errors import BrokerError, BrokerRefused
from umbel.events.stamp import EVENT_EXCHANGE
from umbel.wire.message import Outgoing


class PubsubBroker(ConfiguredBroker, Unsupported):
    def __init__(self, settings: BrokerSettings) -> None:
        super().__init__(settings)
        self._service = Service(settings)
        self._claims = Claims(self._service, settings.lease_s)
        self._coordination = NoCoordination()
        self._keeper: asyncio.Task[None] | None = None

    @property
    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    @property
    def coordination(self) -> NoCoordination:
        return self._coordination

    async def open(self) -> None:
        if self._settings.remembers_signatures:
            refuse("signatures")
        await self._service.make_dead()
        if self._keeper is None:
            self._keeper = asyncio.create_task(self._claims.keep())

    async def reconnect(self) -> None:
        """Nothing to do: each call stands alone."""

    async def close(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
            self._keeper = None
        with suppress(BrokerError):
            await self._claims.close()
        self._service.close()

    async def sweep(self) -> None:
        """Nothing to do: subscriptions expire by themselves."""

    # -- messages --------------------------------------------------------------------------------

    async def publish(self, batch: Sequence[Outgoing]) -> None:
        now = cluster_now()
        refused = await self._service.make_for(batch)
        if refused:
            raise _refusal(refused)
        refused = await self._service.try_send([posts.task(one, self._service.names, now) for one in batch])
        if refused:
            raise _refusal(refused)

    async def claim(self, owner: str, queues: Sequence[str], limit: int, *, revoked_after: int = 0) -> Claim:
        await self._claims.put_out_silent()
        deliveries = await self._claims.claim(owner, queues, limit)
        return Claim(deliveries, (), revoked_after, lease_ended=not self._claims.renew(owner))

    async def wait_ready(self, queues: Sequence[str], timeout_s: float, *, owner: str = "") -> bool:
        await self._claims.wait(queues, timeout_s)
        return True

    async def renew(self, owner: str) -> bool:
        await self._claims.put_out_silent()
        return self._claims.renew(owner)

    async def return_lost(self, *, by_turn: bool = False) -> int:
        """Return the claims of silent owners in this process; Pub/Sub returns those of dead processes."""
        await self._claims.put_out_silent()
        lost, self._claims.lost = self._claims.lost, 0
        return lost

    async def leave_queue(self, owner: str, queue: str) -> None:
        await self._claims.leave(queue)

    async def forget_owner(self, owner: str) -> int:
        return await self._claims.forget(owner)

    async def ended(self, tags: Sequence[Tag]) -> frozenset[Tag]:
        return frozenset(tag for tag in tags if self._claims.find(tag) is None)

    async def settle(self, batch: Sequence[Verdict]) -> Settled:
        await self._claims.put_out_silent()
        return await verdicts.settle(self._service, self._claims, batch, cluster_now())

    async def bury(self, refused: Sequence[Refused]) -> None:
        await verdicts.bury(self._service, refused, cluster_now())

    # -- looking ---------------------------------------------------------------------------------

    async def peek(self, queue: str, limit: int) -> Sequence[Delivery]:
        return await letters.peek(self._service, queue, limit)

    async def purge(self, queue: str) -> int:
        dropped = self._claims.drop_waiting(queue)
        if dropped:
            await self._service.acknowledge(self._service.names.place(queue).subscription, dropped)
        return len(dropped) + await letters.purge(self._service, queue)

    async def move(self, source: str, target: str, limit: int) -> int:
        await self._claims.leave(source)
        return await letters.move(self._service, source, target, limit)

    async def dead_letters(self, limit: int = DEAD_LETTER_PEEK_MAX) -> Sequence[DeadLetter]:
        return await letters.dead_letters(self._service, limit)

    async def requeue_dead(self, letter_ids: Sequence[int | str]) -> int:
        return await letters.requeue(self._service, letter_ids, cluster_now(), self.keyring)

    async def drop_dead(self, letter_ids: Sequence[int | str]) -> int:
        return await letters.drop(self._service, letter_ids)

    # -- fan-out ---------------------------------------------------------------------------------

    async def broadcast(self, batch: Sequence[Broadcast], *, ttl_s: float) -> int | None:
        """Events go nowhere: nobody can listen to them (`Capabilities.events`)."""
        heard = [one for one in batch if one.exchange != EVENT_EXCHANGE]
        if ttl_s <= 0 or not heard:
            return None
        for exchange in {one.exchange for one in heard}:
            await self._service.make_topic(exchange, self._settings.subscription_expires_s)
        sent = [posts.broadcast(one) for one in heard]
        if refused := await self._service.try_send(sent):
            raise _refusal(refused)
        return None

    @asynccontextmanager
    async def subscribe(
        self, exchange: str, patterns: Sequence[str], *, unread_ttl_s: float | None = None
    ) -> AsyncIterator[Subscription]:
        if exchange == EVENT_EXCHANGE:
            refuse("events")
        subscription = PubsubSubscription(
            self._service,
            exchange,
            patterns,
            expires_s=self._settings.subscription_expires_s,
            on_link=self._tell_link,
        )
        await subscription.enter()
        try:
            yield subscription
        finally:
            await subscription.leave()


def _refusal(refused: dict[int, str]) -> BrokerRefused:
    """One error for all; it tells of the first."""
    first = min(refused)
    more = f" (and {len(refused) - 1} more messages)" if len(refused) > 1 else ""
    return BrokerRefused(f"cannot send a message{more}: {refused[first]}", places=sorted(refused))
