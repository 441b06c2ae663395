"""ComposedBroker: messages by one broker, and all that it cannot do by a second, the coordination store.

The store is a whole broker of ours. Leases, elections, the event log, revokes, pauses, kept failures and
the keys of unique tasks are in it, and events go by it. Messages that must wait (for their time, for a
limit of the cluster) wait in its queues, and so do those that a lease holder sends, because only the store
can do both in one step. Workers claim from both; so what waits in the store is run by our workers alone.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager

from msgspec.structs import replace

from umbel.brokers.composed import settling
from umbel.brokers.composed.capabilities import composed
from umbel.brokers.composed.shared import SharedRecord
from umbel.brokers.composed.tags import in_store, of_messages, of_store, whose
from umbel.brokers.interface import (
    DEAD_LETTER_PEEK_MAX,
    Ack,
    Broadcast,
    Broker,
    Capabilities,
    Claim,
    DeadLetter,
    Delivery,
    Depth,
    Permit,
    Replaced,
    Resend,
    Resent,
    Settled,
    Spend,
    Subscription,
    Tag,
    Verdict,
)
from umbel.clock import cluster_now
from umbel.errors import BrokerError
from umbel.events.stamp import EVENT_EXCHANGE
from umbel.protocol.outage import LinkChange
from umbel.wire.message import Outgoing
from umbel.wire.signing import Keyring


class ComposedBroker(SharedRecord):
    def __init__(self, messages: Broker, store: Broker) -> None:
        super().__init__(store)
        self._messages = messages
        self._capabilities = composed(messages.capabilities, store.capabilities)
        self._held: dict[Tag, Delivery] = {}  # of the broker of messages, until they are settled

    @property
    def url(self) -> str:
        return self._messages.url

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def keyring(self) -> Keyring | None:
        return self._messages.keyring

    def on_link(self, callback: Callable[[LinkChange], None]) -> None:
        self._messages.on_link(callback)
        self._store.on_link(callback)

    def on_replaced(self, callback: Callable[[Replaced], None]) -> None:
        self._messages.on_replaced(callback)
        self._store.on_replaced(callback)

    async def open(self) -> None:
        await self._store.open()
        try:
            await self._messages.open()
        except BaseException:
            await self._store.close()
            raise

    async def close(self) -> None:
        try:
            await self._messages.close()
        finally:
            await self._store.close()

    async def reconnect(self) -> None:
        await self._messages.reconnect()
        await self._store.reconnect()

    async def renew(self, owner: str) -> bool:
        stood = [await self._messages.renew(owner), await self._store.renew(owner)]
        return all(stood)

    async def return_lost(self, *, by_turn: bool = False) -> int:
        returned = await self._messages.return_lost(by_turn=by_turn)
        return returned + await self._store.return_lost(by_turn=by_turn)

    async def forget_owner(self, owner: str) -> int:
        self._held.clear()
        return await self._messages.forget_owner(owner) + await self._store.forget_owner(owner)

    async def sweep(self) -> None:
        await self._messages.sweep()
        await self._store.sweep()

    # -- messages --------------------------------------------------------------------------------

    async def publish(self, batch: Sequence[Outgoing]) -> None:
        now = cluster_now()
        later = [one for one in batch if one.not_before > now and not one.exchange]
        if len(later) < len(batch):
            await self._messages.publish([one for one in batch if one not in later] if later else batch)
        if later:
            await self._store.publish(later)

    async def claim(self, owner: str, queues: Sequence[str], limit: int, *, revoked_after: int = 0) -> Claim:
        stored = await self._store.claim(owner, queues, limit, revoked_after=revoked_after)
        deliveries = [replace(one, tag=of_store(one.tag)) for one in stored.deliveries]
        ended, returned = stored.lease_ended, stored.returned
        try:
            paused = await self._store.paused()
            for queue in paused:
                if queue in queues:
                    await self._messages.leave_queue(owner, queue)
            usable = [queue for queue in queues if queue not in paused]
            found = await self._messages.claim(owner, usable, limit - len(deliveries))
        except BrokerError:
            if not deliveries:  # or they would be claimed, and nobody would know
                raise
        else:
            self._held |= {one.tag: one for one in found.deliveries}
            deliveries += found.deliveries
            ended, returned = ended or found.lease_ended, returned + found.returned
        return Claim(deliveries, stored.revokes, stored.revoked_cursor, returned, ended)

    async def wait_ready(self, queues: Sequence[str], timeout_s: float, *, owner: str = "") -> bool:
        paused = await self._store.paused()
        usable = [queue for queue in queues if queue not in paused]
        waits = [asyncio.create_task(self._store.wait_ready(queues, timeout_s))]
        if usable:
            waits.append(asyncio.create_task(self._messages.wait_ready(usable, timeout_s)))
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for one in done:
                one.result()
        finally:
            for one in waits:
                one.cancel()
            await asyncio.wait(waits)
        return True

    async def leave_queue(self, owner: str, queue: str) -> None:
        await self._messages.leave_queue(owner, queue)
        await self._store.leave_queue(owner, queue)

    async def settle(self, verdicts: Sequence[Verdict]) -> Settled:
        settled = await settling.settle(self._messages, self._store, self._held, verdicts, cluster_now())
        tags = {one.tag for one in verdicts if in_store(one.tag) is None}
        for tag in await self._messages.ended(list(tags)):
            self._held.pop(tag, None)
        return settled

    async def ended(self, tags: Sequence[Tag]) -> frozenset[Tag]:
        stored = {own: tag for tag in tags if (own := in_store(tag)) is not None}
        gone = await self._store.ended(list(stored)) if stored else frozenset()
        others = await self._messages.ended([tag for tag in tags if in_store(tag) is None])
        return others | {stored[own] for own in gone}

    async def spend(self, signatures: Sequence[Spend]) -> frozenset[Tag]:
        return await self._messages.spend(signatures)

    async def permit(self, asked: Sequence[Permit]) -> Mapping[Tag, str | None]:
        """One that is not in the store goes there first: it is asked about again when it is claimed there."""
        answers: dict[Tag, str | None] = {}
        stored: list[Permit] = []
        moved: list[Delivery] = []
        for one in asked:
            own = in_store(one.tag)
            if own is not None:
                stored.append(replace(one, tag=own))
            elif one.ends:
                continue
            elif (delivery := self._held.get(one.tag)) is None:
                answers[one.tag] = None
            else:
                moved.append(delivery)
        if moved:
            await self._store.publish(
                [Outgoing(one.queue, one.message, redelivered=one.redelivered) for one in moved]
            )
            done = await self.settle([Ack(one.tag) for one in moved])
            answers |= {one.tag: None if one.tag in done.conflicts else "" for one in moved}
        if stored:
            found = await self._store.permit(stored)
            answers |= {of_store(tag): why for tag, why in found.items()}
        return answers

    # -- queues ----------------------------------------------------------------------------------

    async def queues(self, only: Collection[str] | None = None) -> Mapping[str, Depth]:
        return await self._messages.queues(only)

    async def peek(self, queue: str, limit: int) -> Sequence[Delivery]:
        seen = list(await self._messages.peek(queue, limit))
        if len(seen) < limit:
            seen += await self._store.peek(queue, limit - len(seen))
        return seen

    async def purge(self, queue: str) -> int:
        return await self._messages.purge(queue) + await self._store.purge(queue)

    async def move(self, source: str, target: str, limit: int) -> int:
        return await self._messages.move(source, target, limit) or await self._store.move(
            source, target, limit
        )

    async def dead_letters(self, limit: int = DEAD_LETTER_PEEK_MAX) -> Sequence[DeadLetter]:
        found = list(await self._store.dead_letters(limit))
        if len(found) < limit:
            letters = await self._messages.dead_letters(limit - len(found))
            found += [replace(one, letter_id=of_messages(one.letter_id)) for one in letters]
        return found

    async def requeue_dead(self, letter_ids: Sequence[int | str]) -> int:
        there, here = whose(letter_ids)
        count = await self._messages.requeue_dead(there) if there else 0
        return count + (await self._store.requeue_dead(here) if here else 0)

    async def drop_dead(self, letter_ids: Sequence[int | str]) -> int:
        there, here = whose(letter_ids)
        count = await self._messages.drop_dead(there) if there else 0
        return count + (await self._store.drop_dead(here) if here else 0)

    async def resend(self, letters: Sequence[Resend]) -> Resent:
        """Of the broker of messages: sent, then dropped; who is killed in between sends it again."""
        sent: set[int] = set()
        here: list[int] = []
        for place, one in enumerate(letters):
            there, _ = whose([one.letter.letter_id])
            if not there:
                here.append(place)
                continue
            if one.outgoing is not None:
                await self.publish([one.outgoing])
            if await self._messages.drop_dead(there) and one.outgoing is not None:
                sent.add(place)
        done = await self._store.resend([letters[place] for place in here]) if here else Resent()
        sent |= {here[place] for place in done.sent}
        return Resent(frozenset(sent), {here[place]: why for place, why in done.refused.items()})

    # -- fan-out ---------------------------------------------------------------------------------

    async def broadcast(self, batch: Sequence[Broadcast], *, ttl_s: float) -> int | None:
        events = [one for one in batch if one.exchange == EVENT_EXCHANGE]
        others = [one for one in batch if one.exchange != EVENT_EXCHANGE]
        if events:
            await self._store.broadcast(events, ttl_s=ttl_s)
        return await self._messages.broadcast(others, ttl_s=ttl_s) if others else None

    def subscribe(
        self, exchange: str, patterns: Sequence[str], *, unread_ttl_s: float | None = None
    ) -> AbstractAsyncContextManager[Subscription]:
        one = self._store if exchange == EVENT_EXCHANGE else self._messages
        return one.subscribe(exchange, patterns, unread_ttl_s=unread_ttl_s)
