"""Pauses: which queues are not consumed, and moving what waits in one.

A pause is a fact (`records.py`), which every broker reads as it is written: a worker knows of it a few
milliseconds after `pause` has returned, and before its first claim when it starts or comes back.

Messages are moved in portions: one portion is published, confirmed and acknowledged before the next is taken.
Who is killed in between leaves the messages of one portion at most in both queues, under the same ids.
What the target refuses, because it is full, stays and ends the move.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from umbel.brokers.amqp import outbox, topology
from umbel.brokers.amqp.dead_letters import PORTION, get_some, put_back
from umbel.brokers.amqp.envelope import decode
from umbel.brokers.amqp.facts import tell
from umbel.brokers.amqp.frames import Incoming, encode_ack
from umbel.brokers.amqp.outbox import Post, Refusals
from umbel.brokers.amqp.records import PauseFact, Start, encode_record
from umbel.brokers.amqp.session import Session
from umbel.brokers.interface import Depth, Pause
from umbel.brokers.refusals import signed_for
from umbel.clock import cluster_now
from umbel.errors import BrokerRefused, WireError
from umbel.wire.message import UNREADABLE_CONTENT, Outgoing
from umbel.wire.signing import HEADER


async def pause(session: Session, queue: str, mark: Pause, *, timeout_s: float) -> None:
    await tell(session, PauseFact(queue, mark), timeout_s=timeout_s)


async def resume(session: Session, queue: str, *, timeout_s: float) -> bool:
    await session.catch_up()
    was_paused = queue in session.views.facts.paused
    await tell(session, PauseFact(queue, None), timeout_s=timeout_s)
    return was_paused


async def paused(session: Session) -> Mapping[str, Pause]:
    await session.catch_up()
    return dict(sorted(session.views.facts.paused.items()))


def shown(session: Session, name: str, depth: Depth) -> Depth:
    is_paused = name in session.views.facts.paused
    return Depth(depth.ready, depth.delayed, depth.claimed, paused=True) if is_paused else depth


def not_paused(session: Session, queues: Sequence[str]) -> Sequence[str]:
    known = session.views.facts.paused
    return [queue for queue in queues if queue not in known] if known else queues


async def leave_paused(session: Session, owner: str, queues: Sequence[str]) -> None:
    """What was fetched ahead from a paused queue goes back to it."""
    known = session.views.facts.paused
    for queue in queues if known else ():
        if queue in known:
            await session.claims.leave(owner, queue)


async def move(session: Session, source: str, target: str, limit: int) -> int:
    names = [source, *ladder(source)]
    there = await session.counts(names)
    for name in names:
        if there.get(name) and (moved := await _move_some(session, name, source, target, limit)):
            return moved
    return 0


def ladder(queue: str) -> list[str]:
    """Where messages wait that are not due."""
    return [topology.delay_queue(queue, step).name for step in topology.DELAY_STEPS_MS]


async def _move_some(session: Session, place: str, source: str, target: str, limit: int) -> int:
    channel = await session.link.channel()
    found = await get_some(channel, place, min(limit, PORTION))
    moved = 0
    try:
        sent = list(_unsigned(session, found, source, target))
        if found and not sent:
            raise signed_for(source)
        await session.send([one for moving in sent for one in moving.counted])  # or nothing is moved
        refused = await session.try_send([moving.post for moving in sent])
        for number, moving in enumerate(sent):
            if number not in refused:
                channel.send(encode_ack(channel.number, moving.incoming.fields[0]))
        moved = len(sent) - len(refused)
        if refused:
            raise _partly(target, moved, refused)
    finally:
        if channel.error is None:
            await put_back(session, channel, place, len(found) - moved)
    return moved


def _partly(target: str, moved: int, refused: Refusals) -> BrokerRefused:
    why = refused[min(refused)]
    return BrokerRefused(
        f"{moved} of the last {moved + len(refused)} messages moved; RabbitMQ refused the others "
        f"for {target!r}, and they stay where they are: {why}"
    )


class _Moving(NamedTuple):
    """A message on its way: `counted` is told first, how often it was started."""

    incoming: Incoming
    post: Post
    counted: Sequence[Post] = ()


def _unsigned(session: Session, found: Sequence[Incoming], source: str, target: str) -> Iterator[_Moving]:
    """Those before the first that is signed, and what is published for each."""
    for incoming in found:
        _, redelivered, exchange, key, _ = incoming.fields
        message, mark, _ = decode(incoming, exchange, key)
        if HEADER.encode() in message.headers:
            return
        if message.content_type == UNREADABLE_CONTENT and not message.headers:
            yield _Moving(incoming, _as_it_is(session, incoming, target))
            continue
        starts = session.views.starts.count(source, message.correlation_id)
        counted = [Start(target, message.correlation_id, starts)] if starts else []
        outgoing = Outgoing(target, message, mark.due)
        try:
            post = outbox.task(outgoing, session.queues, cluster_now(), ran=mark.ran or redelivered)
        except (WireError, ValueError):
            post = _as_it_is(session, incoming, target)
        yield _Moving(incoming, post, [outbox.entry(topology.STARTS, encode_record(one)) for one in counted])


def _as_it_is(session: Session, incoming: Incoming, target: str) -> Post:
    """What cannot be written anew moves all the same; that it may have run cannot be written on it."""
    return Post(target, incoming.properties, incoming.body, session.queues.queue(target))
