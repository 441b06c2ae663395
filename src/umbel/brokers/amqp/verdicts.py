"""Verdicts: how claims end on RabbitMQ, and which signatures were used.

First everything that a batch of verdicts sends is published and confirmed: results for waiting clients,
follow-ups, dead letters, parked messages, counted starts. Then the messages are acknowledged or returned. A
crash in between repeats work and loses none. A message that the server refuses goes to the dead letters, with
the reason; a claimed message that the server refuses everywhere stays claimed.

How starts are counted. RabbitMQ keeps no counter with a message of a classic queue, and a message cannot be
changed while it is claimed. So each counted start is an entry of the stream `umbel.starts`, written and
confirmed before the message runs; the worker that gets a redelivered message looks up its count. What this
cannot promise: two messages with one id in one queue share a count, and a message without an id is never
counted.

How a signature is used once. RabbitMQ has no "set if absent", but all readers of a stream see one order. A
worker that wants to use a signature writes an entry, reads on to its own entry, and has the signature if no
entry came before. Only the delivery that holds the original's claim may use its signature again: a
redelivered message takes it over if the session that used it is gone. The end is written when all that the
message sends is confirmed, and before it is acknowledged. A worker that dies in between leaves a message
behind that has ended; it is then refused as a copy. The id of the cluster is the first entry of another
stream.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import assert_never

from msgspec.structs import replace

from umbel.brokers.amqp import outbox, topology
from umbel.brokers.amqp.claims import Claimed, Claims, claim_tags
from umbel.brokers.amqp.consumer import Arrived, Consumer
from umbel.brokers.amqp.handshake import REPLY_TIMEOUT_S
from umbel.brokers.amqp.link import Channel
from umbel.brokers.amqp.locks import is_locked
from umbel.brokers.amqp.outbox import Post, Unanswered, entry, freeing
from umbel.brokers.amqp.session import Session
from umbel.brokers.amqp.signature_view import (
    ENDED,
    ClusterEntry,
    ClusterView,
    SignatureUse,
    holder_of,
    signatures_lost,
)
from umbel.brokers.amqp.streams import attempt_of, encode_record, read_stream
from umbel.brokers.amqp.topology import TaskQueues
from umbel.brokers.interface import Ack, Bury, Delivery, Refused, Return, Spend, Started, Tag, Verdict
from umbel.brokers.refusals import log_refused
from umbel.clock import cluster_now
from umbel.errors import BrokerUnavailable, WireError
from umbel.protocol.delivery.trust import ClusterId, Doubt
from umbel.wire.message import Outgoing, StoredResult

# ---- signatures ------------------------------------------------------------------------------------
#
# Signatures that were used, as entries of the stream `umbel.signatures`, which every worker reads.
#
# RabbitMQ has no "set if absent". But all readers of a stream see one order: a worker that wants to use a
# signature writes an entry, reads on to its own entry, and has the signature if no entry came before. So
# two workers never both use it.
#
# Only the delivery that holds the original's claim may use its signature again. A worker that returns a
# message frees its signature first. If the worker lost its connection, nothing freed it: the message is
# redelivered by RabbitMQ, and may take the signature over if the session that used it is gone. A copy may
# be redelivered too; while the original's session lives, the copy is refused. What the message says of
# itself does not count.
#
# The end is written when all that the message sends is confirmed, and before it is acknowledged. A worker
# that dies in between leaves a message behind that has ended; it is then refused as a copy.
#
# The id of the cluster is the first entry of another stream.

LOOK_AGAIN_S = 0.005
HELD_LOOK_S, HELD_WAIT_S = (
    0.05,
    3.0,
)  # until a session that lost its claims has freed their signatures, or is gone

_numbers = count(1)


async def spend_signatures(session: Session, signatures: Sequence[Spend]) -> Mapping[Tag, Doubt]:
    """Use these signatures; returns the claims whose signatures must not be used, and why.

    All readers of the stream see one order. A worker writes that it uses a signature, reads on to its own
    entry, and has the signature if no entry came before. Only the delivery that holds the original's claim
    may use its signature again: a redelivered message takes it over if the session that used it is gone.
    """
    await session.catch_up()
    standing = session.claims.standing
    claimed = {
        signature.tag: standing[signature.tag] for signature in signatures if signature.tag in standing
    }
    refused: dict[Tag, Doubt] = {}
    wanted: dict[str, Spend] = {}
    for signature in signatures:
        if signature.tag not in claimed:  # its connection ended: its verdict will be a conflict
            continue
        doubt = _doubt(session, signature, may_wait=claimed[signature.tag].is_again)
        if doubt is not None or signature.mark in wanted:
            refused[signature.tag] = doubt or Doubt.REPLAYED
        else:
            wanted[signature.mark] = signature
    free = await _freed(session, wanted.values())
    refused |= {signature.tag: Doubt.REPLAYED for key, signature in wanted.items() if key not in free}
    uses = await _try(session, free)
    refused |= {
        signature.tag: Doubt.REPLAYED for key, signature in wanted.items() if key in free and key not in uses
    }
    for signature in signatures:
        if signature.tag in claimed and signature.tag not in refused:
            claimed[signature.tag].used = uses[signature.mark]
    return refused


def _doubt(session: Session, signature: Spend, *, may_wait: bool) -> Doubt | None:
    """Why it may not be used, as far as that is known without asking for its user."""
    view = session.views.signatures
    user = view.user(signature.mark, signature.born)
    if user is None:
        return None if view.reaches(signature.born) else Doubt.STALE
    return None if may_wait and user != ENDED else Doubt.REPLAYED


async def _freed(session: Session, wanted: Collection[Spend]) -> dict[str, SignatureUse]:
    """The entries that claim those signatures that are free, or whose users are gone.

    A server returns the messages of a lost connection a moment before it removes that session's lock, and a
    worker that lost a claim otherwise frees the signature a moment later. So this waits a little.
    """
    view, loop = session.views.signatures, asyncio.get_running_loop()
    deadline = loop.time() + HELD_WAIT_S
    user = f"{session.holder}/{next(_numbers)}"
    found: dict[str, SignatureUse] = {}
    held = {signature.mark: signature for signature in wanted}
    gone: set[str] = set()
    while held:
        users = {key: view.user(key, signature.born) for key, signature in held.items()}
        for holder in {holder_of(name) for name in users.values() if name not in (None, ENDED)} - gone:
            if await _is_gone(session, holder):
                gone.add(holder)
        for key, known in users.items():
            if known is None or (known != ENDED and _may_take_over(session, key, known, gone)):
                signature = held.pop(key)
                found[key] = SignatureUse(
                    key, user, signature.expires_at, signature.born, round(cluster_now()), known or ""
                )
            elif known == ENDED or holder_of(known) == session.holder:
                del held[key]
        if not held or loop.time() > deadline:
            return found
        await asyncio.sleep(HELD_LOOK_S)
        await session.catch_up()
    return found


async def _is_gone(session: Session, holder: str) -> bool:
    """Whether the session has ended. Workers of Umbel 0.3 hold no lock: RabbitMQ's redelivered flag has to
    do.
    """
    if not holder:
        return True
    return holder != session.holder and not await is_locked(session, topology.of_session(holder))


def _may_take_over(session: Session, key: str, user: str, gone: Collection[str]) -> bool:
    if holder_of(user) != session.holder:
        return holder_of(user) in gone
    return all(
        claimed.used is None or claimed.used.mark != key for claimed in session.claims.standing.values()
    )


async def _try(session: Session, uses: Mapping[str, SignatureUse]) -> Mapping[str, SignatureUse]:
    """Write that these are used, and read on until it is known of each whether this entry was the first."""
    if not uses:
        return {}
    user = next(iter(uses.values())).user
    attempts = session.views.signatures.attempts
    first = attempts[user] = dict[str, bool]()
    try:
        async with asyncio.timeout(REPLY_TIMEOUT_S):
            await session.publisher.send([_post(use) for use in uses.values()])
            await session.catch_up()
            while len(first) < len(uses):  # the entries are confirmed, and on their way
                await asyncio.sleep(LOOK_AGAIN_S)
                await session.catch_up()
    except TimeoutError:
        raise BrokerUnavailable(
            "RabbitMQ did not answer in time whether signed messages were received before (protection "
            "against replay); the messages wait, retrying"
        ) from None
    finally:
        del attempts[user]
    return {key: use for key, use in uses.items() if first[key]}


async def end_signatures(session: Session, verdicts: Sequence[Verdict], finished: Collection[Tag]) -> None:
    """Record that these messages have ended, once all that they send is confirmed."""
    standing = session.claims.standing
    tags = [ended.tag for ended in verdicts if isinstance(ended, Ack | Bury) and ended.tag in finished]
    used = [standing[tag].used for tag in tags if tag in standing]
    posts = [
        _post(SignatureUse(ended.mark, ENDED, ended.expires_at, ended.born))
        for ended in used
        if ended is not None
    ]
    if posts:
        await session.publisher.send(posts)


def freeing_posts(claimed: Claimed) -> list[Post]:
    """The post that frees the signature of a message that goes back, or is sent again."""
    return [freeing(claimed.used)] if claimed.used is not None else []


async def begin_signatures(session: Session) -> None:
    """Called when a worker starts: if the cluster has an id and its record is empty, the record was lost."""
    await session.catch_up()
    await session.note_lost_signatures()
    await session.catch_up()


async def cluster_id(session: Session) -> ClusterId | None:
    """The id of the cluster; None if it has none."""
    if topology.CLUSTER not in await session.counts([topology.CLUSTER]):
        return None
    view = ClusterView()
    await read_stream(
        session.link, topology.CLUSTER, "first", 1, lambda offset, incoming: view.apply(offset, incoming.body)
    )
    return view.found


async def keep_cluster_id(session: Session, made: ClusterId) -> ClusterId:
    """Store the id unless there is one; returns the one that counts. A new cluster starts a new record of
    used signatures.
    """
    if (found := await cluster_id(session)) is not None:
        return found
    for stream in (topology.stream_of_cluster(), topology.stream_of_signatures()):
        await session.publisher.declare(stream)
    entries = list[int]()
    await read_stream(session.link, topology.SIGNATURES, "first", 1, lambda offset, _: entries.append(offset))
    if not entries:
        at = 0.0 if made.since else cluster_now()  # an id that is restored from a backup was in use before
        await session.publisher.send([_post(signatures_lost(at))])
    await session.publisher.send([entry(topology.CLUSTER, encode_record(ClusterEntry(made.id, made.since)))])
    return await cluster_id(session) or made


def _post(use: SignatureUse) -> Post:
    return entry(topology.SIGNATURES, encode_record(use))


# ---- verdicts --------------------------------------------------------------------------------------
#
# How claims end on RabbitMQ.
#
# First everything that a batch of verdicts sends is published and confirmed: results for waiting clients,
# follow-ups, dead letters, parked messages, counted starts. Then the messages are acknowledged or returned.
# A crash in between repeats work and loses none. A message that the server refuses goes to the dead
# letters, with the reason; a claimed message that the server refuses everywhere stays claimed.
#
# How starts are counted. RabbitMQ keeps no counter with a message of a classic queue, and a message cannot
# be changed while it is claimed. So each counted start is an entry of the stream `umbel.starts`, written
# and confirmed before the message runs; the worker that gets a redelivered message looks up its count.
# Messages are distinguished by their queue and correlation id (Celery's task id). What this cannot promise:
# two messages with one id in one queue share a count, and a message without an id is never counted.

log = logging.getLogger("umbel.brokers.amqp")
INHERITED_S = 600.0  # how long the follow-ups of a redelivered message count as redelivered too


@dataclass(slots=True)
class Judgement:
    """What a batch of verdicts asks for. `parts`, `own` and `kept` say what posts carry, by their places."""

    conflicts: set[Tag] = field(default_factory=set)
    posts: list[Post] = field(default_factory=list)
    parts: dict[int, Outgoing | StoredResult] = field(default_factory=dict)
    own: dict[int, Tag] = field(default_factory=dict)  # the claimed message itself is in the post
    kept: dict[int, Refused] = field(default_factory=dict)  # the message of a failed task, and why it failed
    unwritten: list[tuple[Tag | None, Refused]] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    finished: list[Tag] = field(default_factory=list)
    rejected: set[Tag] = field(default_factory=set)  # of the finished: to their queue's dead letter exchange
    returned: list[Tag] = field(default_factory=list)
    started: list[Tag] = field(default_factory=list)
    owners: set[str] = field(default_factory=set)
    judged: int = 0


def judge(
    verdicts: Sequence[Verdict],
    standing: dict[Tag, Claimed],
    queues: TaskQueues,
    now: float,
    failed: topology.Queue,
    unanswered: Unanswered[Channel],
) -> Judgement:
    """Sort the verdicts into what is to be sent and how the messages end; changes nothing yet.

    `failed`: the queue of failed tasks' messages. `unanswered`: what earlier attempts have sent.
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
                    _keep_failure(judged, claimed.delivery, verdict.keep, count, now, failed)
                judged.posts += _ended(claimed, count)
            case Return():
                _return(judged, verdict, claimed, count, queues, now, unanswered)
            case Bury():
                judged.finished.append(tag)
                _carry(judged, verdict, claimed, queues, now)
                delivery, total = claimed.delivery, count + verdict.charged
                if verdict.by_queue:
                    judged.rejected.add(tag)
                else:
                    judged.own[len(judged.posts)] = tag
                    letter = (delivery.queue, delivery.message, verdict.reason, total, now)
                    judged.posts.append(outbox.dead_letter(*letter, claim=tag))
                judged.posts += _ended(claimed, count)
            case _:
                assert_never(verdict)
    return judged


def apply(judged: Judgement, claims: Claims) -> set[Tag]:
    """End the claims; returns those that had ended meanwhile."""
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
    for tag in judged.returned:
        claimed = standing.pop(tag, None)
        if claimed is None or not claimed.consumer.is_open:
            gone.add(tag)
            continue
        claimed.consumer.give_back(claimed.delivery_tag)
    return gone


async def post(session: Session, judged: Judgement, now: float) -> None:
    """Send what the verdicts ask for; what the server refuses goes to the dead letters."""
    refused = await session.try_send(judged.posts)
    letters = list(judged.unwritten)
    for place, reason in refused.items():
        if (part := judged.parts.get(place)) is not None:
            letters.append((judged.own.get(place), Refused(part, reason)))
        elif (tag := judged.own.get(place)) is not None:  # the dead letters refuse it too
            _keep(judged, tag)
    unkept = [(judged.kept[place], reason) for place, reason in refused.items() if place in judged.kept]
    judged.refused = [letter for _, letter in letters]
    with session.all_or_again([post for place, post in enumerate(judged.posts) if place not in refused]):
        await bury_unkept(session, unkept, now)
        buried = await bury(session, judged.refused, now)
    for (tag, _), is_kept in zip(letters, buried, strict=True):
        if tag is not None and not is_kept:
            _keep(judged, tag)


async def park(session: Session, consumer: Consumer, early: Sequence[Arrived]) -> None:
    """Send messages that arrived before they are due to the next level of the delay ladder.

    A worker that dies before it acknowledges them leaves each of them twice, and RabbitMQ flags the first.
    """
    unstarted = await session.take_unstarted([(consumer, arrived) for arrived in early])
    posts, parked = list[Post](), list[Outgoing]()
    for arrived in early:
        arrived.claim = arrived.claim or next(claim_tags)
        note = (consumer.queue, arrived.message.correlation_id) in unstarted
        ran = arrived.mark.ran or (arrived.redelivered and not note)
        parked.append(Outgoing(consumer.queue, arrived.message, arrived.mark.due, ran))
        since = arrived.mark.since
        posts.append(outbox.parked(parked[-1], session.queues, cluster_now(), since, arrived.claim))
    await send_or_bury(session, posts, parked)


async def send_or_bury(session: Session, posts: Sequence[Post], messages: Sequence[Outgoing]) -> None:
    """Send messages that no caller waits for: those that the server refuses are logged and go to the dead
    letters.
    """
    refused = await session.try_send(posts)
    parts = [Refused(messages[place], why) for place, why in refused.items()]
    log_refused(parts)
    with session.all_or_again([post for place, post in enumerate(posts) if place not in refused]):
        await bury(session, parts, cluster_now())


async def bury_unkept(session: Session, unkept: Sequence[tuple[Refused, str]], now: float) -> None:
    """Make dead letters, which can be retried too, of failures that the queue of failures refused."""
    refused = [
        Refused(failure.part, f"{failure.reason}; it cannot be stored with the failed tasks: {why}")
        for failure, why in unkept
    ]
    buried = await bury(session, refused, now) if refused else []
    log_refused(failure for failure, is_buried in zip(refused, buried, strict=True) if is_buried)
    if lost := [failure for failure, is_buried in zip(refused, buried, strict=True) if not is_buried]:
        fields = {"count": len(lost), "why": lost[0].reason}
        log.error("cannot store failed tasks; `umbel task retry` cannot retry them", extra=fields)


async def bury(session: Session, refused: Sequence[Refused], now: float) -> list[bool]:
    """Make dead letters of the messages among these; for each, whether it is a dead letter now."""
    letters = {
        place: (refusal.part.as_letter(), refusal.reason)
        for place, refusal in enumerate(refused)
        if isinstance(refusal.part, Outgoing)
    }
    posts = {
        place: outbox.dead_letter(letter.queue, letter.message, reason, 0, now)
        for place, (letter, reason) in letters.items()
    }
    failed = await session.try_send(list(posts.values()))
    missing = {place for nth, place in enumerate(posts) if nth in failed}
    return [place in posts and place not in missing for place in range(len(refused))]


def _keep(judged: Judgement, tag: Tag) -> None:
    """The message stays claimed: its end could not be written anywhere."""
    judged.finished.remove(tag)
    judged.judged -= 1


def _keep_failure(
    judged: Judgement, delivery: Delivery, reason: str, starts: int, now: float, failed: topology.Queue
) -> None:
    judged.kept[len(judged.posts)] = Refused(Outgoing(delivery.queue, delivery.message), reason)
    failure = (delivery.queue, delivery.message, reason, starts, now, failed)
    judged.posts.append(outbox.kept_failure(*failure, claim=delivery.tag))


def _carry(judged: Judgement, verdict: Ack | Bury, claimed: Claimed, queues: TaskQueues, now: float) -> None:
    """Add results and follow-ups. Follow-ups of a redelivered message may have been sent before, so for a
    while they may have run.
    """
    reply_to, since = claimed.delivery.message.reply_to, claimed.since
    for result in verdict.results if reply_to else ():
        _add(judged, None, result, outbox.result, reply_to)
    for follow_up in verdict.follow_ups:
        if since > now - INHERITED_S and not follow_up.redelivered:
            _add(judged, None, replace(follow_up, redelivered=True), outbox.task, queues, now, since)
        else:
            _add(judged, None, follow_up, outbox.task, queues, now)


def _add(
    judged: Judgement,
    own: Tag | None,
    part: Outgoing | StoredResult,
    write: Callable[..., Post],
    *args: object,
) -> None:
    try:
        written = write(part, *args)
    except (WireError, ValueError) as error:
        judged.unwritten.append((own, Refused(part, f"the message cannot be encoded for RabbitMQ: {error}")))
        return
    judged.parts[len(judged.posts)] = part
    if own is not None:
        judged.own[len(judged.posts)] = own
    judged.posts.append(written)


def _return(
    judged: Judgement,
    verdict: Return,
    claimed: Claimed,
    count: int,
    queues: TaskQueues,
    now: float,
    unanswered: Unanswered[Channel],
) -> None:
    """A message that is due goes back, unless an earlier attempt may have parked it: then that stands."""
    judged.posts += freeing_posts(claimed)
    if verdict.charged:
        judged.posts += _count(claimed, count + verdict.charged)
    delivery = claimed.delivery
    parking = [outbox.parking(verdict.tag)] if unanswered.given_up else []
    if verdict.not_before <= now and not unanswered.may_have_arrived(parking):
        name = delivery.message.correlation_id
        if name and not any((verdict.ran, verdict.charged, delivery.redelivered, count)):
            judged.posts.append(outbox.start_entry(delivery.queue, name, 0, unstarted=True))
        judged.returned.append(verdict.tag)
        return
    ran = any((verdict.ran, verdict.charged, delivery.redelivered, count))
    parked = Outgoing(delivery.queue, delivery.message, verdict.not_before, ran)
    _add(judged, verdict.tag, parked, outbox.parked, queues, now, claimed.since, verdict.tag)
    judged.finished.append(verdict.tag)


def _ended(claimed: Claimed, starts: int) -> list[Post]:
    """Its count ends. For a redelivered message this is recorded even without a count: a
    copy may still come.
    """
    return _count(claimed, 0) if starts or claimed.delivery.redelivered else []


def _count(claimed: Claimed, starts: int) -> list[Post]:
    delivery, name = claimed.delivery, claimed.delivery.message.correlation_id
    if not name:
        return []
    attempt = attempt_of(delivery.message) if delivery.redelivered else None
    return [outbox.start_entry(delivery.queue, name, starts, attempt=attempt)]
