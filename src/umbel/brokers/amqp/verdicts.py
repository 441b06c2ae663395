"""Verdicts: how claims end on RabbitMQ.

First everything that a batch of verdicts sends is published and confirmed: results to the
clients that wait for them, follow-ups, dead letters, parked messages, counted starts. Then the messages are
acknowledged or given back. A crash in between repeats work and loses none. What the server refuses
to take goes to the dead letters in between, with the reason; a claimed message that it takes nowhere
stays claimed.

How starts are counted. RabbitMQ keeps no counter with a message of a classic queue, and a message
cannot be changed while it is claimed. So each counted start is an entry of the stream
`umbel.starts`, written and confirmed before the message runs; the worker that gets a
redelivered message looks up its count. Messages are told apart by their queue and correlation id
(Celery's task id). What this cannot promise: two messages of one id in one queue share a count,
and a message without an id is never counted.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import assert_never

from umbel.brokers.amqp import outbox, topology
from umbel.brokers.amqp.claims import Claimed, Claims
from umbel.brokers.amqp.consumer import Consumer
from umbel.brokers.amqp.declared import TaskQueues
from umbel.brokers.amqp.outbox import Post
from umbel.brokers.amqp.records import Start, encode_record
from umbel.brokers.amqp.session import Session
from umbel.brokers.amqp.signatures import freed
from umbel.brokers.interface import Ack, Bury, Delivery, Refused, Return, Started, Tag, Verdict
from umbel.brokers.refusals import log_refused
from umbel.clock import cluster_now
from umbel.errors import WireError
from umbel.wire.message import Outgoing, StoredResult

log = logging.getLogger("umbel.brokers.amqp")


@dataclass(slots=True)
class Judgement:
    """What a batch of verdicts asks for. `parts`, `own`, `kept` say what posts carry, by their places."""

    conflicts: set[Tag] = field(default_factory=set)
    posts: list[Post] = field(default_factory=list)
    parts: dict[int, Outgoing | StoredResult] = field(default_factory=dict)
    own: dict[int, Tag] = field(default_factory=dict)  # the claimed message itself
    kept: dict[int, Refused] = field(default_factory=dict)  # of a failed task, and why it failed
    unwritten: list[tuple[Tag | None, Refused]] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    finished: list[Tag] = field(default_factory=list)
    rejected: set[Tag] = field(default_factory=set)  # of those: their queue's dead letters
    returned: list[tuple[Tag, Return]] = field(default_factory=list)
    started: list[Tag] = field(default_factory=list)
    owners: set[str] = field(default_factory=set)
    judged: int = 0


def judge(
    verdicts: Sequence[Verdict],
    standing: dict[Tag, Claimed],
    queues: TaskQueues,
    now: float,
    failed: topology.Queue,
) -> Judgement:
    """Sort the verdicts into what is to be sent and how the messages end; changes nothing yet.

    `failed`: where the messages of failed tasks are kept.
    """
    judged, ended = Judgement(), set[Tag]()
    starts: dict[Tag, int] = {}
    for verdict in verdicts:
        tag = verdict.tag
        claimed = standing.get(tag)
        if claimed is None or tag in ended or not claimed.consumer.is_open:
            judged.conflicts.add(tag)
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
                    _carry(judged, verdict, claimed, queues, now)
                if verdict.keep:
                    _keep_failure(judged, claimed.delivery, verdict.keep, now, failed)
                if count:
                    judged.posts += _count(claimed, 0)
            case Return():
                _return(judged, verdict, claimed, count, queues, now)
            case Bury():
                judged.finished.append(tag)
                _carry(judged, verdict, claimed, queues, now)
                delivery, total = claimed.delivery, count + verdict.charged
                if verdict.by_queue:
                    judged.rejected.add(tag)
                else:
                    judged.own[len(judged.posts)] = tag
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
        elif tag in judged.rejected:
            claimed.consumer.reject(claimed.delivery_tag)
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


async def post(session: Session, judged: Judgement, now: float) -> None:
    """Send what the verdicts bring; what the server refuses, to the dead letters."""
    refused = await session.try_send(judged.posts)
    letters = list(judged.unwritten)
    for place, reason in refused.items():
        if (part := judged.parts.get(place)) is not None:
            letters.append((judged.own.get(place), Refused(part, reason)))
        elif (tag := judged.own.get(place)) is not None:  # not even the dead letters take it
            _keep(judged, tag)
    unkept = [(judged.kept[place], reason) for place, reason in refused.items() if place in judged.kept]
    await bury_unkept(session, unkept, now)
    judged.refused = [one for _, one in letters]
    for (tag, _), is_kept in zip(letters, await bury(session, judged.refused, now), strict=True):
        if tag is not None and not is_kept:
            _keep(judged, tag)


async def send_or_bury(session: Session, posts: Sequence[Post], messages: Sequence[Outgoing]) -> None:
    """For what nobody waits for: messages that the server refuses are logged and go to the dead letters."""
    refused = await session.try_send(posts)
    parts = [Refused(messages[place], why) for place, why in refused.items()]
    log_refused(parts)
    await bury(session, parts, cluster_now())


async def bury_unkept(session: Session, unkept: Sequence[tuple[Refused, str]], now: float) -> None:
    """Failures that are refused where failures are kept, and why: dead letters, which can be retried too."""
    refused = [
        Refused(one.part, f"{one.reason}; it cannot be stored with the failed tasks: {why}")
        for one, why in unkept
    ]
    buried = await bury(session, refused, now) if refused else []
    log_refused(one for one, is_buried in zip(refused, buried, strict=True) if is_buried)
    if lost := [one for one, is_buried in zip(refused, buried, strict=True) if not is_buried]:
        fields = {"count": len(lost), "why": lost[0].reason}
        log.error("cannot store failed tasks; `umbel task retry` cannot retry them", extra=fields)


async def bury(session: Session, refused: Sequence[Refused], now: float) -> list[bool]:
    """Make dead letters of the messages among these; which of them have one now."""
    letters = {
        place: (one.part.as_letter(), one.reason)
        for place, one in enumerate(refused)
        if isinstance(one.part, Outgoing)
    }
    posts = {
        place: outbox.dead_letter(letter.queue, letter.message, reason, 0, now)
        for place, (letter, reason) in letters.items()
    }
    failed = await session.try_send(list(posts.values()))
    missing = {place for nth, place in enumerate(posts) if nth in failed}
    return [place in posts and place not in missing for place in range(len(refused))]


def _keep(judged: Judgement, tag: Tag) -> None:
    """The message stays claimed: its end could be written nowhere."""
    judged.finished.remove(tag)
    judged.judged -= 1


def _keep_failure(
    judged: Judgement, delivery: Delivery, reason: str, now: float, failed: topology.Queue
) -> None:
    judged.kept[len(judged.posts)] = Refused(Outgoing(delivery.queue, delivery.message), reason)
    judged.posts.append(outbox.kept_failure(delivery.queue, delivery.message, reason, now, failed))


def _carry(judged: Judgement, verdict: Ack | Bury, claimed: Claimed, queues: TaskQueues, now: float) -> None:
    reply_to = claimed.delivery.message.reply_to
    for result in verdict.results if reply_to else ():
        _add(judged, None, result, outbox.result, reply_to)
    for follow_up in verdict.follow_ups:
        _add(judged, None, follow_up, outbox.task, queues, now)


def _add(
    judged: Judgement,
    own: Tag | None,
    part: Outgoing | StoredResult,
    write: Callable[..., Post],
    *args: object,
    **options: object,
) -> None:
    try:
        written = write(part, *args, **options)
    except (WireError, ValueError) as error:
        judged.unwritten.append((own, Refused(part, f"the message cannot be encoded for RabbitMQ: {error}")))
        return
    judged.parts[len(judged.posts)] = part
    if own is not None:
        judged.own[len(judged.posts)] = own
    judged.posts.append(written)


def _return(
    judged: Judgement, verdict: Return, claimed: Claimed, count: int, queues: TaskQueues, now: float
) -> None:
    if verdict.charged:
        judged.posts += _count(claimed, count + verdict.charged)
    if verdict.not_before <= now:
        judged.returned.append((verdict.tag, verdict))
        return
    delivery = claimed.delivery
    judged.posts += freed(claimed)
    ran = any((verdict.ran, verdict.charged, delivery.redelivered, count))
    parked = Outgoing(delivery.queue, delivery.message, verdict.not_before)
    _add(judged, verdict.tag, parked, outbox.task, queues, now, ran=ran)
    judged.finished.append(verdict.tag)


def _count(claimed: Claimed, starts: int) -> list[Post]:
    name = claimed.delivery.message.correlation_id
    if not name:
        return []
    return [outbox.entry(topology.STARTS, encode_record(Start(claimed.delivery.queue, name, starts)))]
