"""ComposedBroker: messages on one broker, and all that it cannot do on a second, the coordination store.

The store is a complete broker of Umbel. Leases, elections, the event log, revokes, pauses, retained failures
and the keys of unique tasks are in it, and events go through it. Delayed messages, messages that wait for a
limit of the cluster, and messages that a lease holder sends wait in its queues, because only the store can
write the message and the rest in one step. Workers claim from both brokers, so only Umbel's workers run the
messages in the store.

When a verdict is applied, delayed follow-ups and failures go to the store. Follow-ups that are due go to the
broker of messages, where Celery's workers are too. All of it is sent before the message is acknowledged, so a
crash in between repeats work and loses none.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from msgspec.structs import replace

from umbel.brokers.composed.producer import composed, split_by_due, split_events
from umbel.brokers.interface import (
    DEAD_LETTER_PEEK_MAX,
    Ack,
    Broadcast,
    Broker,
    Bury,
    Claim,
    DeadLetter,
    Delivery,
    Permit,
    Refused,
    Replaced,
    Resend,
    Resent,
    Return,
    Settled,
    Subscription,
    Tag,
    Verdict,
)
from umbel.clock import cluster_now
from umbel.errors import BrokerError, BrokerRefused
from umbel.events.stamp import EVENT_EXCHANGE
from umbel.protocol.shutdown import LinkChange
from umbel.wire.message import Outgoing
from umbel.wire.signing import Signer

# ---- tags ------------------------------------------------------------------------------------------
#
# A prefix says which of the two brokers a claim or a dead letter belongs to.

_TEXT, _NUMBER = "store:s:", "store:i:"
_LETTER = "message:"


def of_store(tag: Tag) -> str:
    """Return the tag under which a worker knows a claim in the store."""
    return f"{_NUMBER}{tag}" if isinstance(tag, int) else f"{_TEXT}{tag}"


def store_tag(tag: Tag) -> Tag | None:
    """Return the tag as the store knows it; None if the claim belongs to the broker of messages."""
    if isinstance(tag, str):
        if tag.startswith(_TEXT):
            return tag.removeprefix(_TEXT)
        if tag.startswith(_NUMBER):
            return int(tag.removeprefix(_NUMBER))
    return None


def split_letter_ids(letter_ids: Sequence[int | str]) -> tuple[list[int | str], list[int | str]]:
    """Return the ids of letters in the broker of messages, without the prefix, and those in the store."""
    of_messages: list[int | str] = []
    stored: list[int | str] = []
    for letter_id in letter_ids:
        if isinstance(letter_id, str) and letter_id.startswith(_LETTER):
            of_messages.append(letter_id.removeprefix(_LETTER))
        else:
            stored.append(letter_id)
    return of_messages, stored


# ---- settling --------------------------------------------------------------------------------------


@dataclass(slots=True)
class _SplitBatch:
    """The verdicts for each of the two brokers, and the messages that are sent before."""

    to_messages: list[Verdict] = field(default_factory=list)
    to_store: list[Verdict] = field(default_factory=list)
    parked: list[Outgoing] = field(default_factory=list)
    failures: list[Refused] = field(default_factory=list)
    sent: list[Outgoing] = field(default_factory=list)
    conflicts: set[Tag] = field(default_factory=set)


async def settle_both(
    messages: Broker, store: Broker, claimed: Mapping[Tag, Delivery], batch: Sequence[Verdict], now: float
) -> Settled:
    """Apply verdicts on claims in both brokers; a crash in between repeats work."""
    split = await _split_batch(messages, store, claimed, batch, now)
    refused = await _publish(store, split.parked, store)
    if split.failures:
        await store.keep_failed(split.failures)
    refused += await _publish(messages, split.sent, store)
    applied, conflicts, unknown = 0, split.conflicts, set[Tag]()
    if split.to_messages:
        settled = await messages.settle(split.to_messages)
        applied += settled.applied
        conflicts |= settled.conflicts
        unknown |= settled.unknown
        refused += settled.refused
    if split.to_store:
        settled = await store.settle(split.to_store)
        applied += settled.applied
        conflicts |= set(map(of_store, settled.conflicts))
        unknown |= set(map(of_store, settled.unknown))
        refused += settled.refused
    return Settled(applied, frozenset(conflicts), tuple(refused), frozenset(unknown))


async def _split_batch(
    messages: Broker, store: Broker, claimed: Mapping[Tag, Delivery], batch: Sequence[Verdict], now: float
) -> _SplitBatch:
    split = _SplitBatch()
    stored = {tag: own for each in batch if (own := store_tag(tag := each.tag)) is not None}
    ended_in_store = await store.ended(list(stored.values())) if stored else frozenset()
    ended = await messages.ended([each.tag for each in batch if each.tag not in stored])
    for verdict in batch:
        own = stored.get(verdict.tag)
        if own is not None:
            if own in ended_in_store or not isinstance(verdict, Ack | Bury):
                split.to_store.append(replace(verdict, tag=own))
                continue
            due, later = split_by_due(verdict.follow_ups, now)
            split.sent += due
            split.to_store.append(replace(verdict, tag=own, follow_ups=later))
        elif verdict.tag in ended or (delivery := claimed.get(verdict.tag)) is None:
            split.conflicts.add(verdict.tag)
        else:
            split.to_messages.append(_for_messages(split, verdict, delivery, now))
    return split


def _for_messages(split: _SplitBatch, verdict: Verdict, delivery: Delivery, now: float) -> Verdict:
    """Return the verdict for the broker of messages, without the parts that go to the store."""
    if isinstance(verdict, Return):
        if verdict.not_before <= now or verdict.charged or delivery.starts:
            return verdict
        ran = verdict.ran or delivery.redelivered
        split.parked.append(Outgoing(delivery.queue, delivery.message, verdict.not_before, ran))
        return Ack(verdict.tag)
    if not isinstance(verdict, Ack | Bury):
        return verdict
    due, later = split_by_due(verdict.follow_ups, now)
    if later:
        split.parked += later
        verdict = replace(verdict, follow_ups=due)
    if isinstance(verdict, Ack) and verdict.keep:
        split.failures.append(Refused(Outgoing(delivery.queue, delivery.message), verdict.keep))
        verdict = replace(verdict, keep="")
    return verdict


async def _publish(target: Broker, batch: Sequence[Outgoing], store: Broker) -> list[Refused]:
    """Publish the messages; a refused message becomes a dead letter and does not affect the others."""
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


# ---- composed broker -------------------------------------------------------------------------------


class ComposedBroker:
    """Two brokers as one, for a worker or app that sets `coordination_store`."""

    def __init__(self, messages: Broker, store: Broker) -> None:
        self._messages = messages
        self._store = store
        self._claimed: dict[Tag, Delivery] = {}  # in the broker of messages, until they are settled
        self.url = messages.url
        self.keyring = messages.keyring
        self.revoke_retention_s = messages.revoke_retention_s  # both have the same setting
        self.capabilities = composed(messages.capabilities, store.capabilities)
        self.spend = messages.spend
        self.queues = messages.queues
        # One of the two does the following alone, so its method is this broker's.
        self.coordination = store.coordination
        self.revoke = store.revoke
        self.cluster_id = store.cluster_id
        self.keep_cluster_id = store.keep_cluster_id
        self.store_time = store.store_time
        self.mark_alive = store.mark_alive
        self.probe = store.probe
        self.pause = store.pause
        self.resume = store.resume
        self.paused = store.paused
        self.bury = store.bury
        self.keep_failed = store.keep_failed
        self.failed = store.failed
        self.register_recorder = store.register_recorder
        self.forget_recorder = store.forget_recorder
        self.recorders = store.recorders
        self.log_events = store.log_events
        self.read_events = store.read_events
        self.acknowledge_events = store.acknowledge_events
        self.lost_events = store.lost_events
        self.event_log = store.event_log

    @property
    def signer(self) -> Signer | None:
        """The signer of the broker of messages; None if messages are not signed."""
        return self._messages.signer

    def on_link(self, callback: Callable[[LinkChange], None]) -> None:
        """Set the listener for lost and restored links of both brokers."""
        self._messages.on_link(callback)
        self._store.on_link(callback)

    def on_replaced(self, callback: Callable[[Replaced], None]) -> None:
        """Set the listener for replaced data of either broker."""
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
        """Extend the owner's leases in both brokers; False if either had ended."""
        had_leases = [await self._messages.renew(owner), await self._store.renew(owner)]
        return all(had_leases)

    async def return_lost(self, *, by_turn: bool = False) -> int:
        """Return the claims of lost owners in both brokers, and their number."""
        returned = await self._messages.return_lost(by_turn=by_turn)
        return returned + await self._store.return_lost(by_turn=by_turn)

    async def forget_owner(self, owner: str) -> int:
        """End the owner's claims in both brokers; return the number of returned messages."""
        returned = await self._messages.forget_owner(owner)
        await self._forget_ended(list(self._claimed))
        return returned + await self._store.forget_owner(owner)

    async def sweep(self) -> None:
        """Remove expired data from both brokers."""
        await self._messages.sweep()
        await self._store.sweep()

    # -- messages --------------------------------------------------------------------------------

    async def publish(self, batch: Sequence[Outgoing]) -> None:
        """Publish task messages; delayed ones wait in the store."""
        due, later = split_by_due(batch, cluster_now())
        if due:
            await self._messages.publish(due)
        if later:
            await self._store.publish(later)

    async def claim(self, owner: str, queues: Sequence[str], limit: int, *, revoked_after: int = 0) -> Claim:
        """Claim messages from the store first, and the rest of `limit` from the broker of messages."""
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
            if not deliveries:  # otherwise the claims in the store would be lost with the error
                raise
        else:
            self._claimed |= {delivery.tag: delivery for delivery in found.deliveries}
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
        """Return the messages of the queue that were fetched and not claimed, to both brokers."""
        await self._messages.leave_queue(owner, queue, is_busy=is_busy)
        await self._store.leave_queue(owner, queue, is_busy=is_busy)

    async def settle(self, verdicts: Sequence[Verdict]) -> Settled:
        """Apply verdicts on claims in both brokers."""
        settled = await settle_both(self._messages, self._store, self._claimed, verdicts, cluster_now())
        await self._forget_ended([verdict.tag for verdict in verdicts if store_tag(verdict.tag) is None])
        return settled

    async def _forget_ended(self, tags: Sequence[Tag]) -> None:
        for tag in await self._messages.ended(tags):
            self._claimed.pop(tag, None)

    async def ended(self, tags: Sequence[Tag]) -> frozenset[Tag]:
        """Return those of the claims that have ended in their broker."""
        stored = {own: tag for tag in tags if (own := store_tag(tag)) is not None}
        ended_in_store = await self._store.ended(list(stored)) if stored else frozenset()
        others = await self._messages.ended([tag for tag in tags if store_tag(tag) is None])
        return others | {stored[own] for own in ended_in_store}

    async def permit(self, asked: Sequence[Permit]) -> Mapping[Tag, str | None]:
        """Ask the store for permits. A message that is not in the store moves there first; its permit is
        asked for again when it is claimed from the store.
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
            elif (delivery := self._claimed.get(permit.tag)) is None:
                answers[permit.tag] = None
            else:
                moved.append(delivery)
        if moved:
            await self._store.publish(
                [Outgoing(each.queue, each.message, redelivered=each.redelivered) for each in moved]
            )
            settled = await self.settle([Ack(each.tag) for each in moved])
            answers |= {each.tag: None if each.tag in settled.conflicts else "" for each in moved}
        if stored:
            found = await self._store.permit(stored)
            answers |= {of_store(tag): why for tag, why in found.items()}
        return answers

    # -- queues ----------------------------------------------------------------------------------

    async def peek(self, queue: str, limit: int) -> Sequence[Delivery]:
        """Return the first messages of the queue, those in the broker of messages first."""
        found = list(await self._messages.peek(queue, limit))
        if len(found) < limit:
            found += await self._store.peek(queue, limit - len(found))
        return found

    async def purge(self, queue: str) -> int:
        """Delete the waiting messages of the queue in both brokers; return their number."""
        return await self._messages.purge(queue) + await self._store.purge(queue)

    async def move(self, source: str, target: str, limit: int) -> int:
        """Move messages in the broker of messages, or in the store if there are none; return their number."""
        moved = await self._messages.move(source, target, limit)
        return moved or await self._store.move(source, target, limit)

    async def dead_letters(self, limit: int = DEAD_LETTER_PEEK_MAX) -> Sequence[DeadLetter]:
        """Return up to `limit` dead letters, those in the store first."""
        found = list(await self._store.dead_letters(limit))
        if len(found) < limit:
            letters = await self._messages.dead_letters(limit - len(found))
            found += [replace(letter, letter_id=f"{_LETTER}{letter.letter_id}") for letter in letters]
        return found

    async def count_dead(self, limit: int) -> int:
        """Count the dead letters of both brokers, up to `limit`."""
        found = await self._store.count_dead(limit)
        return found if found >= limit else found + await self._messages.count_dead(limit - found)

    async def requeue_dead(self, letter_ids: Sequence[int | str], *, even_if_used: bool = False) -> int:
        """Requeue dead letters, each in its broker; return their number."""
        of_messages, stored = split_letter_ids(letter_ids)
        count = (
            await self._messages.requeue_dead(of_messages, even_if_used=even_if_used) if of_messages else 0
        )
        return count + (await self._store.requeue_dead(stored, even_if_used=even_if_used) if stored else 0)

    async def drop_dead(self, letter_ids: Sequence[int | str]) -> int:
        """Delete dead letters, each in its broker; return their number."""
        of_messages, stored = split_letter_ids(letter_ids)
        count = await self._messages.drop_dead(of_messages) if of_messages else 0
        return count + (await self._store.drop_dead(stored) if stored else 0)

    async def resend(self, letters: Sequence[Resend]) -> Resent:
        """Send new messages in the place of letters. A letter in the broker of messages is removed after the
        message is sent, so a crash in between sends it twice.
        """
        sent: set[int] = set()
        stored: list[int] = []
        for place, asked in enumerate(letters):
            of_messages, _ = split_letter_ids([asked.letter.letter_id])
            if not of_messages:
                stored.append(place)
                continue
            if asked.outgoing is not None:
                await self.publish([asked.outgoing])
            if await self._messages.drop_dead(of_messages) and asked.outgoing is not None:
                sent.add(place)
        resent = await self._store.resend([letters[place] for place in stored]) if stored else Resent()
        sent |= {stored[place] for place in resent.sent}
        return Resent(frozenset(sent), {stored[place]: why for place, why in resent.refused.items()})

    # -- fan-out ---------------------------------------------------------------------------------

    async def broadcast(self, batch: Sequence[Broadcast], *, ttl_s: float) -> int | None:
        """Send events through the store, and everything else through the broker of messages."""
        events, others = split_events(batch)
        if events:
            await self._store.broadcast(events, ttl_s=ttl_s)
        return await self._messages.broadcast(others, ttl_s=ttl_s) if others else None

    def subscribe(
        self, exchange: str, patterns: Sequence[str], *, unread_ttl_s: float | None = None
    ) -> AbstractAsyncContextManager[Subscription]:
        """Listen to events on the store, and to everything else on the broker of messages."""
        broker = self._store if exchange == EVENT_EXCHANGE else self._messages
        return broker.subscribe(exchange, patterns, unread_ttl_s=unread_ttl_s)
