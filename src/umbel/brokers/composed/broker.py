"""ComposedBroker: messages on one broker, and all that it cannot do on a second, the coordination store.

The store is a complete broker of Umbel. Leases, elections, the event log, revokes, pauses, stored failures
and the keys of unique tasks are in it, and events go through it. Messages that must wait (until they are due,
or for a limit of the cluster) wait in its queues, and so do those that a lease holder sends, because only the
store can do both in one step. Workers claim from both, so only Umbel's workers run what waits in the store.

Settling: what is not due, and what failed, goes to the store; what is due goes to the broker of messages,
where Celery's workers are too. It is sent before the message is acknowledged, so that a crash in between
repeats work.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec.structs import replace

from umbel.brokers.composed.producer import composed
from umbel.brokers.interface import (
    DEAD_LETTER_PEEK_MAX,
    Ack,
    Broadcast,
    Broker,
    Bury,
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
    Replaced,
    Resend,
    Resent,
    Return,
    Settled,
    Spend,
    Subscription,
    Tag,
    Verdict,
)
from umbel.clock import cluster_now
from umbel.errors import BrokerError, BrokerRefused
from umbel.events.stamp import EVENT_EXCHANGE
from umbel.protocol.delivery.trust import ClusterId, Doubt
from umbel.protocol.shutdown import LinkChange
from umbel.wire.message import Outgoing
from umbel.wire.records import Revoke
from umbel.wire.signing import Keyring, Signer

if TYPE_CHECKING:
    from umbel.brokers.coordination import CoordinationStore


# ---- tags ------------------------------------------------------------------------------------------
#
# Which of the two brokers a claim or a dead letter belongs to. One kind has a prefix, so it is never taken
# for the other.

_TEXT, _NUMBER = "store:s:", "store:i:"
_LETTER = "message:"


def of_store(tag: Tag) -> str:
    """The tag under which a worker knows a claim in the store."""
    return f"{_NUMBER}{tag}" if isinstance(tag, int) else f"{_TEXT}{tag}"


def store_tag(tag: Tag) -> Tag | None:
    """The tag as the store knows it; None if the claim belongs to the broker of messages."""
    if isinstance(tag, str):
        if tag.startswith(_TEXT):
            return tag.removeprefix(_TEXT)
        if tag.startswith(_NUMBER):
            return int(tag.removeprefix(_NUMBER))
    return None


def of_messages(letter_id: int | str) -> str:
    """The id under which a user knows a dead letter in the broker of messages."""
    return f"{_LETTER}{letter_id}"


def split_letter_ids(letter_ids: Sequence[int | str]) -> tuple[list[int | str], list[int | str]]:
    """The ids of letters in the broker of messages, as it knows them, and those of the store."""
    there: list[int | str] = []
    here: list[int | str] = []
    for letter_id in letter_ids:
        if isinstance(letter_id, str) and letter_id.startswith(_LETTER):
            there.append(letter_id.removeprefix(_LETTER))
        else:
            here.append(letter_id)
    return there, here


# ---- settling --------------------------------------------------------------------------------------
#
# Verdicts on messages of two brokers.
#
# What is not due, and what failed, goes to the store; what is due goes to the broker of messages, where
# Celery's workers are too. It is sent before the message is acknowledged, so that a crash in between
# repeats work.


@dataclass(slots=True)
class _SplitBatch:
    """The verdicts for each of the two brokers, and what is sent before."""

    to_messages: list[Verdict] = field(default_factory=list)
    to_store: list[Verdict] = field(default_factory=list)
    parked: list[Outgoing] = field(default_factory=list)
    kept: list[Refused] = field(default_factory=list)
    sent: list[Outgoing] = field(default_factory=list)
    conflicts: set[Tag] = field(default_factory=set)


async def settle_both(
    messages: Broker, store: Broker, held: Mapping[Tag, Delivery], batch: Sequence[Verdict], now: float
) -> Settled:
    """Apply verdicts on claims in both brokers; a crash in between repeats work."""
    split = await _split_batch(messages, store, held, batch, now)
    refused: list[Refused] = []
    refused += await _publish(store, split.parked, store)
    if split.kept:
        await store.keep_failed(split.kept)
    refused += await _publish(messages, split.sent, store)
    applied, conflicts, unknown = 0, split.conflicts, set[Tag]()
    if split.to_messages:
        done = await messages.settle(split.to_messages)
        applied += done.applied
        conflicts |= done.conflicts
        unknown |= done.unknown
        refused += done.refused
    if split.to_store:
        done = await store.settle(split.to_store)
        applied += done.applied
        conflicts |= {of_store(tag) for tag in done.conflicts}
        unknown |= {of_store(tag) for tag in done.unknown}
        refused += done.refused
    return Settled(applied, frozenset(conflicts), tuple(refused), frozenset(unknown))


async def _split_batch(
    messages: Broker, store: Broker, held: Mapping[Tag, Delivery], batch: Sequence[Verdict], now: float
) -> _SplitBatch:
    split = _SplitBatch()
    stored = {tag: own for each in batch if (own := store_tag(tag := each.tag)) is not None}
    ended = await store.ended(list(stored.values())) if stored else frozenset()
    gone = await messages.ended([each.tag for each in batch if each.tag not in stored])
    for verdict in batch:
        own = stored.get(verdict.tag)
        if own is not None:
            if own in ended or not isinstance(verdict, Ack | Bury):
                split.to_store.append(replace(verdict, tag=own))
                continue
            due = [message for message in verdict.follow_ups if message.exchange or message.not_before <= now]
            split.sent += due
            later = [message for message in verdict.follow_ups if message not in due]
            split.to_store.append(replace(verdict, tag=own, follow_ups=later))
        elif verdict.tag in gone or (delivery := held.get(verdict.tag)) is None:
            split.conflicts.add(verdict.tag)
        else:
            split.to_messages.append(_of_message(split, verdict, delivery, now))
    return split


def _of_message(split: _SplitBatch, verdict: Verdict, delivery: Delivery, now: float) -> Verdict:
    if isinstance(verdict, Return):
        if verdict.not_before <= now or verdict.charged or delivery.starts:
            return verdict
        ran = verdict.ran or delivery.redelivered
        split.parked.append(Outgoing(delivery.queue, delivery.message, verdict.not_before, ran))
        return Ack(verdict.tag)
    if not isinstance(verdict, Ack | Bury):
        return verdict
    later = [
        follow_up for follow_up in verdict.follow_ups if not follow_up.exchange and follow_up.not_before > now
    ]
    if later:
        split.parked += later
        verdict = replace(
            verdict, follow_ups=[follow_up for follow_up in verdict.follow_ups if follow_up not in later]
        )
    if isinstance(verdict, Ack) and verdict.keep:
        split.kept.append(Refused(Outgoing(delivery.queue, delivery.message), verdict.keep))
        verdict = replace(verdict, keep="")
    return verdict


async def _publish(target: Broker, batch: Sequence[Outgoing], store: Broker) -> list[Refused]:
    """Send these; a message that is refused becomes a dead letter and does not affect the others."""
    if not batch:
        return []
    try:
        await target.publish(batch)
        return []
    except BrokerRefused as error:
        if len(batch) == 1:
            refused = [Refused(batch[0], str(error))]
            await store.bury(refused)
            return refused
    return [problem for outgoing in batch for problem in await _publish(target, [outgoing], store)]


# ---- shared record ---------------------------------------------------------------------------------
#
# The operations that a composed broker passes to its coordination store alone.


class StoreDelegate:
    """The part of a composed broker that only its coordination store does."""

    def __init__(self, store: Broker) -> None:
        self._store = store

    @property
    def coordination(self) -> "CoordinationStore":
        """The leases and elections of the store."""
        return self._store.coordination

    async def revoke(self, revokes: Sequence[Revoke]) -> None:
        """Record revokes in the store, for all workers."""
        await self._store.revoke(revokes)

    async def cluster_id(self) -> ClusterId | None:
        """The id that signatures are bound to, from the store."""
        return await self._store.cluster_id()

    async def keep_cluster_id(self, made: ClusterId) -> ClusterId:
        """Store the id unless the store has one; returns the one that counts."""
        return await self._store.keep_cluster_id(made)

    async def store_time(self) -> float | None:
        """The time of the store's clock; None if it has none."""
        return await self._store.store_time()

    async def mark_alive(self, node: str, incarnation: int, *, ttl_s: float) -> None:
        """Record in the store that this node is alive."""
        await self._store.mark_alive(node, incarnation, ttl_s=ttl_s)

    async def probe(self, node: str, incarnation: int = 0) -> Evidence:
        """Whether a node is alive, as far as the store knows."""
        return await self._store.probe(node, incarnation)

    async def pause(self, queue: str, mark: Pause) -> None:
        """Pause the queue for all workers."""
        await self._store.pause(queue, mark)

    async def resume(self, queue: str) -> bool:
        """End the pause; whether the queue was paused."""
        return await self._store.resume(queue)

    async def paused(self) -> Mapping[str, Pause]:
        """The paused queues, by name."""
        return await self._store.paused()

    async def bury(self, refused: Sequence[Refused]) -> None:
        """Make dead letters of refused messages, in the store."""
        await self._store.bury(refused)

    async def keep_failed(self, failed: Sequence[Refused]) -> None:
        """Store the messages of failed tasks, so that they can be retried."""
        await self._store.keep_failed(failed)

    async def failed(self, limit: int, *, task_id: str = "") -> Sequence[DeadLetter]:
        """Stored failures, newest first; with `task_id`, of that task only."""
        return await self._store.failed(limit, task_id=task_id)

    async def register_recorder(self, name: str) -> int:
        """Start to log events for this recorder, in the store."""
        return await self._store.register_recorder(name)

    async def forget_recorder(self, name: str) -> None:
        """Remove the recorder from the store."""
        await self._store.forget_recorder(name)

    async def recorders(self) -> Sequence[str]:
        """The names of the recorders that the store knows."""
        return await self._store.recorders()

    async def log_events(self, entries: Sequence[tuple[str, bytes]], *, counts: Sequence[int] = ()) -> int:
        """Append events to the store's event log; how many entries were logged."""
        return await self._store.log_events(entries, counts=counts)

    async def read_events(self, name: str, limit: int, *, after: int = 0) -> Sequence[LoggedEvent]:
        """Up to `limit` events of the store's log for this recorder."""
        return await self._store.read_events(name, limit, after=after)

    async def acknowledge_events(self, name: str, offset: int) -> None:
        """The recorder has stored all events up to this offset."""
        await self._store.acknowledge_events(name, offset)

    async def lost_events(self) -> int:
        """How many events the recorders have missed or will miss."""
        return await self._store.lost_events()

    async def event_log(self) -> EventLogState:
        """The state of the store's event log."""
        return await self._store.event_log()


# ---- composed broker -------------------------------------------------------------------------------
#
# Messages on one broker, and all that it cannot do on a second, the coordination store.
#
# The store is a complete broker of Umbel. Leases, elections, the event log, revokes, pauses, stored
# failures and the keys of unique tasks are in it, and events go through it. Messages that must wait (until
# they are due, or for a limit of the cluster) wait in its queues, and so do those that a lease holder
# sends, because only the store can do both in one step. Workers claim from both, so only Umbel's workers
# run what waits in the store.


class ComposedBroker(StoreDelegate):
    """Two brokers as one, for a worker or app that sets `coordination_store`."""

    def __init__(self, messages: Broker, store: Broker) -> None:
        super().__init__(store)
        self._messages = messages
        self._capabilities = composed(messages.capabilities, store.capabilities)
        self._held: dict[Tag, Delivery] = {}  # claims in the broker of messages, until they are settled

    @property
    def url(self) -> str:
        """The address of the broker of messages."""
        return self._messages.url

    @property
    def capabilities(self) -> Capabilities:
        """What both can do together."""
        return self._capabilities

    @property
    def keyring(self) -> Keyring | None:
        """The keys by which the broker of messages checks signatures."""
        return self._messages.keyring

    @property
    def revoke_retention_s(self) -> float:
        """How long a revoke that is recorded now holds; both brokers have the same setting."""
        return self._messages.revoke_retention_s

    @property
    def signer(self) -> Signer | None:
        """What signs messages that the broker of messages sends; None if they are not signed."""
        return self._messages.signer

    def on_link(self, callback: Callable[[LinkChange], None]) -> None:
        """Call back when a link of either broker is lost or restored."""
        self._messages.on_link(callback)
        self._store.on_link(callback)

    def on_replaced(self, callback: Callable[[Replaced], None]) -> None:
        """Call back when either broker has lost data."""
        self._messages.on_replaced(callback)
        self._store.on_replaced(callback)

    async def open(self) -> None:
        """Open the store, then the broker of messages."""
        await self._store.open()
        try:
            await self._messages.open()
        except BaseException:
            await self._store.close()
            raise

    async def close(self) -> None:
        """Close the broker of messages, then the store."""
        try:
            await self._messages.close()
        finally:
            await self._store.close()

    async def reconnect(self) -> None:
        """Reconnect both brokers."""
        await self._messages.reconnect()
        await self._store.reconnect()

    async def renew(self, owner: str) -> bool:
        """Extend the owner's leases in both; False if either had ended."""
        stood = [await self._messages.renew(owner), await self._store.renew(owner)]
        return all(stood)

    async def return_lost(self, *, by_turn: bool = False) -> int:
        """How many claims of lost owners both brokers returned."""
        returned = await self._messages.return_lost(by_turn=by_turn)
        return returned + await self._store.return_lost(by_turn=by_turn)

    async def forget_owner(self, owner: str) -> int:
        """End the owner's claims in both; how many messages were returned."""
        self._held.clear()
        return await self._messages.forget_owner(owner) + await self._store.forget_owner(owner)

    async def sweep(self) -> None:
        """Forget in both what has expired."""
        await self._messages.sweep()
        await self._store.sweep()

    # -- messages --------------------------------------------------------------------------------

    async def publish(self, batch: Sequence[Outgoing]) -> None:
        """Send task messages; those that are not due wait in the store."""
        now = cluster_now()
        later = [outgoing for outgoing in batch if outgoing.not_before > now and not outgoing.exchange]
        if len(later) < len(batch):
            await self._messages.publish(
                [outgoing for outgoing in batch if outgoing not in later] if later else batch
            )
        if later:
            await self._store.publish(later)

    async def claim(self, owner: str, queues: Sequence[str], limit: int, *, revoked_after: int = 0) -> Claim:
        """Messages for the owner, first from the store, and the rest of `limit` from the
        broker of messages.
        """
        stored = await self._store.claim(owner, queues, limit, revoked_after=revoked_after)
        deliveries = [replace(delivery, tag=of_store(delivery.tag)) for delivery in stored.deliveries]
        ended, returned = stored.lease_ended, stored.returned
        try:
            paused = await self._store.paused()
            for queue in paused:
                if queue in queues:
                    await self._messages.leave_queue(owner, queue)
            usable = [queue for queue in queues if queue not in paused]
            found = await self._messages.claim(owner, usable, limit - len(deliveries))
        except BrokerError:
            if not deliveries:  # else the claims in the store would be lost with the error
                raise
        else:
            self._held |= {delivery.tag: delivery for delivery in found.deliveries}
            deliveries += found.deliveries
            ended, returned = ended or found.lease_ended, returned + found.returned
        return Claim(deliveries, stored.revokes, stored.revoked_cursor, returned, ended)

    async def wait_ready(self, queues: Sequence[str], timeout_s: float, *, owner: str = "") -> bool:
        """Return when a message may be claimed from either broker, or after the time-out."""
        paused = await self._store.paused()
        usable = [queue for queue in queues if queue not in paused]
        waits = [asyncio.create_task(self._store.wait_ready(queues, timeout_s))]
        if usable:
            waits.append(asyncio.create_task(self._messages.wait_ready(usable, timeout_s)))
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in done:
                wait.result()
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.wait(waits)
        return True

    async def leave_queue(self, owner: str, queue: str, *, is_busy: bool = False) -> None:
        """Return to both brokers what was fetched from the queue and not claimed."""
        await self._messages.leave_queue(owner, queue, is_busy=is_busy)
        await self._store.leave_queue(owner, queue, is_busy=is_busy)

    async def settle(self, verdicts: Sequence[Verdict]) -> Settled:
        """Apply verdicts on claims in both brokers."""
        settled = await settle_both(self._messages, self._store, self._held, verdicts, cluster_now())
        tags = {verdict.tag for verdict in verdicts if store_tag(verdict.tag) is None}
        for tag in await self._messages.ended(list(tags)):
            self._held.pop(tag, None)
        return settled

    async def ended(self, tags: Sequence[Tag]) -> frozenset[Tag]:
        """Those of the claims that are over in their broker."""
        stored = {own: tag for tag in tags if (own := store_tag(tag)) is not None}
        gone = await self._store.ended(list(stored)) if stored else frozenset()
        others = await self._messages.ended([tag for tag in tags if store_tag(tag) is None])
        return others | {stored[own] for own in gone}

    async def spend(self, signatures: Sequence[Spend]) -> Mapping[Tag, Doubt]:
        """Use signatures once, as the broker of messages records them."""
        return await self._messages.spend(signatures)

    async def permit(self, asked: Sequence[Permit]) -> Mapping[Tag, str | None]:
        """Permits from the store. A message that is not there is moved there first: it asks again when it is
        claimed there.
        """
        answers: dict[Tag, str | None] = {}
        stored: list[Permit] = []
        moved: list[Delivery] = []
        for permit in asked:
            own = store_tag(permit.tag)
            if own is not None:
                stored.append(replace(permit, tag=own))
            elif permit.ends:
                continue
            elif (delivery := self._held.get(permit.tag)) is None:
                answers[permit.tag] = None
            else:
                moved.append(delivery)
        if moved:
            await self._store.publish(
                [Outgoing(held.queue, held.message, redelivered=held.redelivered) for held in moved]
            )
            done = await self.settle([Ack(held.tag) for held in moved])
            answers |= {held.tag: None if held.tag in done.conflicts else "" for held in moved}
        if stored:
            found = await self._store.permit(stored)
            answers |= {of_store(tag): why for tag, why in found.items()}
        return answers

    # -- queues ----------------------------------------------------------------------------------

    async def queues(self, only: Collection[str] | None = None) -> Mapping[str, Depth]:
        """How many messages wait in the broker of messages, by queue."""
        return await self._messages.queues(only)

    async def peek(self, queue: str, limit: int) -> Sequence[Delivery]:
        """The first messages of the queue, those in the broker of messages first."""
        seen = list(await self._messages.peek(queue, limit))
        if len(seen) < limit:
            seen += await self._store.peek(queue, limit - len(seen))
        return seen

    async def purge(self, queue: str) -> int:
        """Delete what waits in the queue in both brokers; how many messages."""
        return await self._messages.purge(queue) + await self._store.purge(queue)

    async def move(self, source: str, target: str, limit: int) -> int:
        """Move messages to another queue, of the store only when the broker of messages
        moved none; how many.
        """
        return await self._messages.move(source, target, limit) or await self._store.move(
            source, target, limit
        )

    async def dead_letters(self, limit: int = DEAD_LETTER_PEEK_MAX) -> Sequence[DeadLetter]:
        """Up to `limit` dead letters, those in the store first."""
        found = list(await self._store.dead_letters(limit))
        if len(found) < limit:
            letters = await self._messages.dead_letters(limit - len(found))
            found += [replace(letter, letter_id=of_messages(letter.letter_id)) for letter in letters]
        return found

    async def count_dead(self, limit: int) -> int:
        """How many dead letters both have, counted up to `limit`."""
        found = await self._store.count_dead(limit)
        return found if found >= limit else found + await self._messages.count_dead(limit - found)

    async def requeue_dead(self, letter_ids: Sequence[int | str], *, even_if_used: bool = False) -> int:
        """Send dead letters to their queues again, each in its broker; how many."""
        there, here = split_letter_ids(letter_ids)
        count = await self._messages.requeue_dead(there, even_if_used=even_if_used) if there else 0
        return count + (await self._store.requeue_dead(here, even_if_used=even_if_used) if here else 0)

    async def drop_dead(self, letter_ids: Sequence[int | str]) -> int:
        """Delete dead letters, each in its broker; how many."""
        there, here = split_letter_ids(letter_ids)
        count = await self._messages.drop_dead(there) if there else 0
        return count + (await self._store.drop_dead(here) if here else 0)

    async def resend(self, letters: Sequence[Resend]) -> Resent:
        """Retry letters. One in the broker of messages is sent, then dropped; a crash in between sends it
        twice.
        """
        sent: set[int] = set()
        here: list[int] = []
        for place, asked in enumerate(letters):
            there, _ = split_letter_ids([asked.letter.letter_id])
            if not there:
                here.append(place)
                continue
            if asked.outgoing is not None:
                await self.publish([asked.outgoing])
            if await self._messages.drop_dead(there) and asked.outgoing is not None:
                sent.add(place)
        done = await self._store.resend([letters[place] for place in here]) if here else Resent()
        sent |= {here[place] for place in done.sent}
        return Resent(frozenset(sent), {here[place]: why for place, why in done.refused.items()})

    # -- fan-out ---------------------------------------------------------------------------------

    async def broadcast(self, batch: Sequence[Broadcast], *, ttl_s: float) -> int | None:
        """Send to all listeners; events through the store, everything else through the broker of messages."""
        events = [broadcast for broadcast in batch if broadcast.exchange == EVENT_EXCHANGE]
        others = [broadcast for broadcast in batch if broadcast.exchange != EVENT_EXCHANGE]
        if events:
            await self._store.broadcast(events, ttl_s=ttl_s)
        return await self._messages.broadcast(others, ttl_s=ttl_s) if others else None

    def subscribe(
        self, exchange: str, patterns: Sequence[str], *, unread_ttl_s: float | None = None
    ) -> AbstractAsyncContextManager[Subscription]:
        """Listen where `broadcast` sends: to the store for events, else to the broker of messages."""
        broker = self._store if exchange == EVENT_EXCHANGE else self._messages
        return broker.subscribe(exchange, patterns, unread_ttl_s=unread_ttl_s)
