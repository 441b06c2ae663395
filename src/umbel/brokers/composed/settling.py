"""Settling: verdicts on messages of two brokers.

What is not due, and what failed, goes to the store; what is due goes to the broker of messages, where
Celery's workers are too. It is sent before the message is acknowledged, so that a crash in between repeats
work.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from umbel.brokers.composed.tags import in_store, of_store
from umbel.brokers.interface import Ack, Broker, Bury, Delivery, Refused, Return, Settled, Tag, Verdict
from umbel.errors import BrokerRefused
from umbel.wire.message import Outgoing


@dataclass(slots=True)
class _Split:
    """What each of the two is told, and what is sent before."""

    to_messages: list[Verdict] = field(default_factory=list)
    to_store: list[Verdict] = field(default_factory=list)
    parked: list[Outgoing] = field(default_factory=list)
    kept: list[Refused] = field(default_factory=list)
    sent: list[Outgoing] = field(default_factory=list)
    conflicts: set[Tag] = field(default_factory=set)


async def settle(
    messages: Broker, store: Broker, held: Mapping[Tag, Delivery], batch: Sequence[Verdict], now: float
) -> Settled:
    split = await _split(messages, store, held, batch, now)
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


async def _split(
    messages: Broker, store: Broker, held: Mapping[Tag, Delivery], batch: Sequence[Verdict], now: float
) -> _Split:
    split = _Split()
    stored = {tag: own for one in batch if (own := in_store(tag := one.tag)) is not None}
    ended = await store.ended(list(stored.values())) if stored else frozenset()
    gone = await messages.ended([one.tag for one in batch if one.tag not in stored])
    for verdict in batch:
        own = stored.get(verdict.tag)
        if own is not None:
            if own in ended or not isinstance(verdict, Ack | Bury):
                split.to_store.append(replace(verdict, tag=own))
                continue
            due = [one for one in verdict.follow_ups if one.exchange or one.not_before <= now]
            split.sent += due
            later = [one for one in verdict.follow_ups if one not in due]
            split.to_store.append(replace(verdict, tag=own, follow_ups=later))
        elif verdict.tag in gone or (delivery := held.get(verdict.tag)) is None:
            split.conflicts.add(verdict.tag)
        else:
            split.to_messages.append(_of_message(split, verdict, delivery, now))
    return split


def _of_message(split: _Split, verdict: Verdict, delivery: Delivery, now: float) -> Verdict:
    if isinstance(verdict, Return):
        if verdict.not_before <= now or verdict.charged or delivery.starts:
            return verdict
        ran = verdict.ran or delivery.redelivered
        split.parked.append(Outgoing(delivery.queue, delivery.message, verdict.not_before, ran))
        return Ack(verdict.tag)
    if not isinstance(verdict, Ack | Bury):
        return verdict
    later = [one for one in verdict.follow_ups if not one.exchange and one.not_before > now]
    if later:
        split.parked += later
        verdict = replace(verdict, follow_ups=[one for one in verdict.follow_ups if one not in later])
    if isinstance(verdict, Ack) and verdict.keep:
        split.kept.append(Refused(Outgoing(delivery.queue, delivery.message), verdict.keep))
        verdict = replace(verdict, keep="")
    return verdict


async def _publish(target: Broker, batch: Sequence[Outgoing], store: Broker) -> list[Refused]:
    """Send these; one that is refused ends alone, among the dead letters."""
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
    return [problem for one in batch for problem in await _publish(target, [one], store)]
