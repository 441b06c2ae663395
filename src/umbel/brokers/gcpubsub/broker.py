"""PubsubBroker: Google Pub/Sub for workers and the parts of an app that run on an event loop."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress

from umbel.brokers.gcpubsub import claims, posts
from umbel.brokers.gcpubsub.capabilities import CAPABILITIES, NoCoordination, Unsupported
from umbel.brokers.gcpubsub.claims import Claims
from umbel.brokers.gcpubsub.consumer import PubsubSubscription
from umbel.brokers.gcpubsub.letters import Letters
from umbel.brokers.gcpubsub.service import Service
from umbel.brokers.interface import (
    Broadcast,
    BrokerSettings,
    Claim,
    Refused,
    Settled,
    Subscription,
    Tag,
    Verdict,
)
from umbel.brokers.links import ConfiguredBroker, signer_at
from umbel.clock import cluster_now
from umbel.errors import BrokerError, BrokerRefused, NotSupported
from umbel.events.stamp import EVENT_EXCHANGE
from umbel.wire.call import holding_of
from umbel.wire.message import Message, Outgoing

ReleaseUnique = Callable[[Sequence[tuple[str, str]]], Awaitable[None]]


class PubsubBroker(ConfiguredBroker, Unsupported):
    """The asynchronous broker on Google Pub/Sub, complete only together with a coordination store."""

    capabilities = CAPABILITIES
    coordination = NoCoordination()

    def __init__(self, settings: BrokerSettings, release_unique: ReleaseUnique | None = None) -> None:
        """Create the broker. `release_unique` belongs to the coordination store, which has the keys of the
        unique tasks in these queues.
        """
        super().__init__(settings)
        self._release_unique = release_unique
        self._service = Service(settings)
        self._claims = Claims(self._service, settings.lease_s)
        self._letters = Letters(self._service)
        self.peek = self._letters.peek
        self.dead_letters = self._letters.dead_letters
        self.drop_dead = self._letters.drop_dead
        self._extending: asyncio.Task[None] | None = None
        self._leaving: dict[PubsubSubscription, asyncio.Task[None] | None] = {}  # None: it still listens

    async def open(self) -> None:
        """Create the queue of dead letters, and start to extend the deadlines of claimed messages."""
        if self._settings.remembers_signatures:
            raise NotSupported(CAPABILITIES.reasons["signatures"])
        self._signer = await signer_at(self, self._settings)
        await self._service.make_dead()
        if self._extending is None:
            self._extending = asyncio.create_task(self._claims.run())

    async def reconnect(self) -> None:
        """Do nothing: each call stands alone."""

    async def close(self) -> None:
        """Return claimed messages, remove the listeners' subscriptions, and close all connections."""
        if self._extending is not None:
            self._extending.cancel()
            await asyncio.wait([self._extending])
            self._extending = None
        with suppress(BrokerError):
            await self._claims.close()
        if listening := list(self._leaving):
            await asyncio.wait([self._leave(subscription) for subscription in listening])
        self._service.close()

    async def sweep(self) -> None:
        """Do nothing: subscriptions expire by themselves."""

    # -- messages --------------------------------------------------------------------------------

    async def publish(self, batch: Sequence[Outgoing]) -> None:
        """Send task messages, confirmed on return; raise BrokerRefused if some were refused."""
        now = cluster_now()
        refused = await self._service.make_for(batch)
        if refused:
            raise _refusal(refused, was_sent=False)
        refused = await self._service.try_send(
            [posts.task(outgoing, self._service.names, now) for outgoing in batch]
        )
        if refused:
            raise _refusal(refused)

    async def claim(self, owner: str, queues: Sequence[str], limit: int, *, revoked_after: int = 0) -> Claim:
        """Claim up to `limit` messages of these queues for this owner; the reply has no revokes."""
        await self._claims.end_silent()
        deliveries = await self._claims.claim(owner, queues, limit)
        return Claim(deliveries, (), revoked_after, lease_ended=not self._claims.touch(owner).had_lease())

    async def wait_ready(self, queues: Sequence[str], timeout_s: float, *, owner: str = "") -> bool:
        """Return when a message may be claimed from these queues, or after the time-out."""
        await self._claims.wait(queues, timeout_s)
        return True

    async def renew(self, owner: str) -> bool:
        """Extend the owner's lease; False if it had ended before."""
        await self._claims.end_silent()
        return self._claims.touch(owner).had_lease()

    async def return_lost(self, *, by_turn: bool = False) -> int:
        """Return the number of claims of silent owners in this process that were returned.

        Pub/Sub itself returns the messages of dead processes.
        """
        await self._claims.end_silent()
        lost, self._claims.lost = self._claims.lost, 0
        return lost

    async def leave_queue(self, owner: str, queue: str, *, is_busy: bool = False) -> None:
        """Return the messages of the queue that were fetched and not claimed."""
        await self._claims.leave(queue)

    async def forget_owner(self, owner: str) -> int:
        """End all claims of the owner; return the number of returned messages."""
        return await self._claims.forget(owner)

    async def ended(self, tags: Sequence[Tag]) -> frozenset[Tag]:
        """Return those of the claims that have ended: a verdict on them would be a conflict."""
        return frozenset(tag for tag in tags if self._claims.find(tag) is None)

    async def settle(self, batch: Sequence[Verdict]) -> Settled:
        """Apply verdicts: send everything that they ask for, then acknowledge the messages."""
        await self._claims.end_silent()
        return await claims.settle(self._service, self._claims, batch, cluster_now())

    async def bury(self, refused: Sequence[Refused]) -> None:
        """Make dead letters of refused messages."""
        await claims.bury(self._service, refused, cluster_now())

    # -- queues ----------------------------------------------------------------------------------

    async def purge(self, queue: str) -> int:
        """Delete the waiting messages of the queue; return their number."""
        dropped = self._claims.drop_waiting(queue)
        if dropped:
            ids = [arrived.ack_id for arrived in dropped]
            await self._service.acknowledge(self._service.names.place(queue).subscription, ids)
            await self._free_unique([arrived.message for arrived in dropped])
        return len(dropped) + await self._letters.purge(queue, self._free_unique)

    async def _free_unique(self, messages: Sequence[Message]) -> None:
        """Free the keys of unique tasks whose messages were deleted."""
        held = [holding for message in messages if (holding := holding_of(message)) is not None]
        keys = [(holding.umbel_unique, holding.id) for holding in held if holding.umbel_unique]
        if keys and self._release_unique is not None:
            await self._release_unique(keys)

    async def move(self, source: str, target: str, limit: int) -> int:
        """Move messages to another queue; return their number."""
        await self._claims.leave(source)
        return await self._letters.move(source, target, limit)

    async def count_dead(self, limit: int) -> int:
        """Count the dead letters, up to `limit`."""
        return len(await self.dead_letters(limit))

    async def requeue_dead(self, letter_ids: Sequence[int | str], *, even_if_used: bool = False) -> int:
        """Requeue dead letters; return their number."""
        return await self._letters.requeue_dead(letter_ids, self.signer, even_if_used=even_if_used)

    # -- fan-out ---------------------------------------------------------------------------------

    async def broadcast(self, batch: Sequence[Broadcast], *, ttl_s: float) -> int | None:
        """Send to all listeners; events are dropped, because no node can listen to them
        (`Capabilities.events`).
        """
        deliverable = [message for message in batch if message.exchange != EVENT_EXCHANGE]
        if ttl_s <= 0 or not deliverable:
            return None
        for exchange in {message.exchange for message in deliverable}:
            await self._service.make_topic(exchange)
        sent = [posts.broadcast(message) for message in deliverable]
        if refused := await self._service.try_send(sent):
            raise _refusal(refused)
        return None

    @asynccontextmanager
    async def subscribe(
        self, exchange: str, patterns: Sequence[str], *, unread_ttl_s: float | None = None
    ) -> AsyncIterator[Subscription]:
        """Listen to the broadcasts that match the patterns, while the block runs; raise NotSupported for
        events.
        """
        if exchange == EVENT_EXCHANGE:
            raise NotSupported(CAPABILITIES.reasons["events"])
        subscription = PubsubSubscription(
            self._service,
            exchange,
            patterns,
            on_link=self._tell_link,
        )
        self._leaving[subscription] = None
        try:
            await subscription.enter()
            yield subscription
        finally:
            if subscription in self._leaving:  # otherwise `close` has removed it
                await asyncio.shield(self._leave(subscription))

    def _leave(self, subscription: PubsubSubscription) -> asyncio.Task[None]:
        """Remove the listener's subscriptions, even if the listener is cancelled again; `close` waits for
        that.
        """
        leaving = self._leaving[subscription]
        if leaving is None:
            leaving = self._leaving[subscription] = asyncio.create_task(subscription.leave())
            leaving.add_done_callback(lambda _: self._leaving.pop(subscription, None))
        return leaving


def _refusal(refused: dict[int, str], *, was_sent: bool = True) -> BrokerRefused:
    """Return one error for all refused messages, with the text of the first. `was_sent`: all the others were
    sent.
    """
    first = min(refused)
    more = f" (and {len(refused) - 1} more messages)" if len(refused) > 1 else ""
    places = sorted(refused) if was_sent else ()
    return BrokerRefused(f"cannot send a message{more}: {refused[first]}", places=places)
