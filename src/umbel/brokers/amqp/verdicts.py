"""Verdicts: how claims end on RabbitMQ.

First everything that a batch of verdicts sends is published and confirmed: results to whoever
waits for them, follow-ups, dead letters, parked messages, counted starts. Then the messages are
acknowledged or given back. A crash in between repeats work and loses none.

How starts are counted. RabbitMQ keeps no counter with a message of a classic queue, and a message
cannot be changed while it is claimed. So each counted start is an entry of the stream
`umbel.starts`, written and confirmed before the message runs; whoever gets a message that is
marked redelivered looks up its count. Messages are told apart by their queue and correlation id
(Celery's task id). What this cannot promise: two messages of one id in one queue share a count,
and a message without an id is never counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import assert_never

from umbel.brokers.amqp import outbox, topology
from umbel.brokers.amqp.claims import Claimed, Claims
from umbel.brokers.amqp.consumer import Consumer
from umbel.brokers.amqp.outbox import Post
from umbel.brokers.amqp.records import Start, encode_record
from umbel.brokers.interface import Ack, Bury, Return, Started, Tag, Verdict
from umbel.wire.message import Outgoing


@dataclass(slots=True)
class Judgement:
    refused: set[Tag] = field(default_factory=set)
    posts: list[Post] = field(default_factory=list)
    finished: list[Tag] = field(default_factory=list)
    returned: list[tuple[Tag, Return]] = field(default_factory=list)
    started: list[Tag] = field(default_factory=list)
    owners: set[str] = field(default_factory=set)
    judged: int = 0


def judge(verdicts: Sequence[Verdict], standing: dict[Tag, Claimed], now: float) -> Judgement:
    """Sort the verdicts into what is to be sent and how the messages end; changes nothing yet."""
    judged, ended = Judgement(), set[Tag]()
    starts: dict[Tag, int] = {}
    for verdict in verdicts:
        tag = verdict.tag
        claimed = standing.get(tag)
        if claimed is None or tag in ended or not claimed.consumer.is_open:
            judged.refused.add(tag)
            continue
        judged.judged += 1
        judged.owners.add(claimed.owner)
        count = starts.get(tag, claimed.starts)
        if isinstance(verdict, Started):
            starts[tag] = count + 1
            judged.started.append(tag)
            judged.posts += _count(claimed, count + 1)
            continue
        ended.add(tag)
        match verdict:
            case Ack():
                judged.finished.append(tag)
                if verdict.results or verdict.follow_ups:
                    _carry(judged, verdict, claimed, now)
                if count:
                    judged.posts += _count(claimed, 0)
            case Return():
                _return(judged, verdict, claimed, count, now)
            case Bury():
                judged.finished.append(tag)
                _carry(judged, verdict, claimed, now)
                delivery, total = claimed.delivery, count + verdict.charged
                judged.posts.append(
                    outbox.dead_letter(delivery.queue, delivery.message, verdict.reason, total, now)
                )
                if count:
                    judged.posts += _count(claimed, 0)
            case _:
                assert_never(verdict)
    return judged


def apply(judged: Judgement, claims: Claims) -> set[Tag]:
    """End the claims; those that had ended meanwhile."""
    standing, gone = claims.standing, set[Tag]()
    by_consumer: dict[Consumer, list[int]] = {}
    for tag in judged.started:
        if (claimed := standing.get(tag)) is not None:
            claimed.starts += 1
    for tag in judged.finished:
        claimed = standing.pop(tag, None)
        if claimed is None or not claimed.consumer.is_open:
            gone.add(tag)
        else:
            by_consumer.setdefault(claimed.consumer, []).append(claimed.delivery_tag)
    for consumer, tags in by_consumer.items():
        consumer.finish(tags)
    for tag, verdict in judged.returned:
        claimed = standing.pop(tag, None)
        if claimed is None or not claimed.consumer.is_open:
            gone.add(tag)
            continue
        if not verdict.ran and not verdict.charged and not claimed.starts:
            claims.note_unrun(claimed)
        claimed.consumer.give_back(claimed.delivery_tag)
    return gone


def _carry(judged: Judgement, verdict: Ack | Bury, claimed: Claimed, now: float) -> None:
    reply_to = claimed.delivery.message.reply_to
    if reply_to:
        judged.posts += [outbox.result(result, reply_to) for result in verdict.results]
    judged.posts += outbox.tasks(verdict.follow_ups, now)


def _return(judged: Judgement, verdict: Return, claimed: Claimed, count: int, now: float) -> None:
    if verdict.charged:
        judged.posts += _count(claimed, count + verdict.charged)
    if verdict.not_before <= now:
        judged.returned.append((verdict.tag, verdict))
        return
    delivery = claimed.delivery
    ran = any((verdict.ran, verdict.charged, delivery.redelivered, count))
    parked = Outgoing(delivery.queue, delivery.message, verdict.not_before)
    judged.posts.append(outbox.task(parked, now, ran=ran))
    judged.finished.append(verdict.tag)


def _count(claimed: Claimed, starts: int) -> list[Post]:
    name = claimed.delivery.message.correlation_id
    if not name:
        return []
    return [outbox.entry(topology.STARTS, encode_record(Start(claimed.delivery.queue, name, starts)))]
