"""Dead letters, failures and pauses: what people do to queues, message by message.

RabbitMQ has no way to read a queue without taking from it. A reader claims the messages for a moment, and
they go back to their places when the channel closes. Meanwhile another reader sees fewer messages, and
RabbitMQ flags them as redelivered.

Messages are requeued, moved and retried in portions: one portion is published, confirmed and acknowledged
before the next is taken. A crash in between leaves at most one portion in both queues, under the same ids. A
message that its queue refuses stays where it is, and ends a move.

The message of a failed task goes to the queue of failures, whose limits drop the oldest. It is published and
confirmed before the message of its task is acknowledged, so a crash may store it twice: a retry takes the
newest of a task and removes the others.

A pause is an entry in the stream of facts. Every worker knows of it a few milliseconds after `pause` has
returned, and before its first claim when it starts or reconnects.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from umbel.brokers.amqp import publishing, topology
from umbel.brokers.amqp.envelope import decode, decode_properties
from umbel.brokers.amqp.frames import Incoming, Method, encode_ack, encode_method
from umbel.brokers.amqp.link import Channel
from umbel.brokers.amqp.publishing import Post
from umbel.brokers.amqp.session import Session, Sessions, write_facts
from umbel.brokers.amqp.streams import PauseFact, Start, encode_record
from umbel.brokers.amqp.topology import CAPABILITIES
from umbel.brokers.interface import (
    DEAD_LETTER_PEEK_MAX,
    BrokerSettings,
    DeadLetter,
    Delivery,
    Pause,
    Resend,
    Resent,
)
from umbel.brokers.refusals import partly_requeued, signed_for
from umbel.clock import cluster_now
from umbel.errors import BrokerRefused, WireError
from umbel.wire.message import COUNT_MAX, LATEST_S, UNREADABLE_CONTENT, Outgoing
from umbel.wire.signing import HEADER, Signer

PORTION = 100
FAILURES_READ_MAX = 100_000
RETURN_S, RETURN_POLL_S = 10.0, 0.02
SendFirst = Callable[[Sequence[DeadLetter]], Awaitable[dict[int, str]]]
"""Handles a portion of letters before they are removed; returns why some stay, by their places."""


class QueueOperations:
    """Shows, moves, requeues and removes messages, and pauses queues."""

    def __init__(self, sessions: Sessions, settings: BrokerSettings) -> None:
        self._sessions = sessions
        self._timeout_s = settings.connect_timeout_s

    async def peek(self, queue: str, limit: int) -> Sequence[Delivery]:
        """Return the first messages of a queue, those in this process first; their tags claim nothing."""
        session = await self._sessions.get()
        found = [
            Delivery("", queue, arrived.message, 0, arrived.redelivered)
            for consumer in session.claims.consumers()
            if consumer.queue == queue
            for arrived in consumer.waiting()
        ]
        if len(found) >= limit or queue not in await session.counts([queue]):
            return found[:limit]
        async with session.link.temporary_channel() as channel:
            taken = await _take_messages(channel, queue, limit - len(found))
            new: list[str] = []
            for incoming in taken:
                _, redelivered, exchange, key, _ = incoming.fields
                message, state, _ = decode(incoming, exchange, key)
                if not redelivered:
                    new.append(message.correlation_id)
                found.append(Delivery("", queue, message, 0, redelivered or state.ran))
            await session.note_unstarted(queue, new)
            await _put_back(session, channel, queue, len(taken))
        return found

    # -- dead letters ----------------------------------------------------------------------------

    async def dead_letters(self, limit: int = DEAD_LETTER_PEEK_MAX) -> Sequence[DeadLetter]:
        """Return up to `limit` dead letters, which stay where they are."""
        found = await self._read(topology.DEAD, limit)
        return [letter_of(incoming) for incoming in found]

    async def count_dead(self, limit: int) -> int:
        """Count the dead letters, up to `limit`."""
        counts = await (await self._sessions.get()).counts([topology.DEAD])
        return min(limit, counts.get(topology.DEAD, 0))

    async def requeue_dead(
        self, letter_ids: Sequence[int | str], signer: Signer | None, *, even_if_used: bool
    ) -> int:
        """Requeue dead letters; return their number.

        A letter that its queue refuses stays; BrokerRefused names it after the others are requeued.
        """
        session, now = await self._sessions.get(), cluster_now()

        async def send(letters: Sequence[DeadLetter]) -> dict[int, str]:
            posts: list[Post] = []
            for letter in letters:
                outgoing = letter.requeued(signer, now, even_if_used=even_if_used)
                fresh = Start(letter.queue, letter.message.correlation_id, 0)
                posts += [
                    publishing.entry(topology.STARTS, encode_record(fresh)),
                    publishing.task(outgoing, session.queues, now),
                ]
            return {place // 2: why for place, why in (await session.try_send(posts)).items()}

        removal = await _remove(session, topology.DEAD, letter_ids, send)
        if removal.refused:
            raise partly_requeued(removal.count, removal.refused)
        return removal.count

    async def drop_dead(self, letter_ids: Sequence[int | str]) -> int:
        """Delete dead letters; return their number."""

        async def send_nothing(_letters: Sequence[DeadLetter]) -> dict[int, str]:
            return {}

        session = await self._sessions.get()
        return (await _remove(session, topology.DEAD, letter_ids, send_nothing)).count

    async def _read(self, queue: str, limit: int) -> list[Incoming]:
        session = await self._sessions.get()
        if queue not in await session.counts([queue]):
            return []
        async with session.link.temporary_channel() as channel:
            found = await _take_messages(channel, queue, limit)
            await _put_back(session, channel, queue, len(found))
        return found

    # -- failures --------------------------------------------------------------------------------

    async def failed(self, limit: int, *, task_id: str = "") -> Sequence[DeadLetter]:
        """Return up to `limit` retained failures, newest first; with `task_id`, of that task only.

        The newest are the last in the queue, so all are taken, read and put back.
        """
        found = await self._read(topology.FAILED, FAILURES_READ_MAX)
        letters = [letter_of(incoming, failed=True) for incoming in reversed(found)]
        wanted = [letter for letter in letters if not task_id or letter.message.correlation_id == task_id]
        return wanted[:limit]

    async def resend(self, letters: Sequence[Resend]) -> Resent:
        """Send the new message of each letter, then remove the letter, a portion at a time.

        If this is killed in between, the next retry finds the same letters. The new ids are made from those
        of the letters, so it sends the same messages again: no retry is lost, and a repeated one has the id
        of the first.
        """
        session, now = await self._sessions.get(), cluster_now()
        sent: set[int] = set()
        refused: dict[int, str] = {}
        places = {(asked.letter.failed, asked.letter.letter_id): place for place, asked in enumerate(letters)}

        async def send(found: Sequence[DeadLetter], *, failed: bool) -> dict[int, str]:
            at = [places[failed, letter.letter_id] for letter in found]
            sending = {
                nth: outgoing
                for nth, place in enumerate(at)
                if (outgoing := letters[place].outgoing) is not None
            }
            posts = [publishing.task(outgoing, session.queues, now) for outgoing in sending.values()]
            order = list(sending)
            problems = {order[nth]: why for nth, why in (await session.try_send(posts)).items()}
            refused.update({at[nth]: why for nth, why in problems.items()})
            sent.update(at[nth] for nth in order if nth not in problems)
            return problems

        for queue, failed in ((topology.FAILED, True), (topology.DEAD, False)):
            if ids := [letter_id for is_failed, letter_id in places if is_failed is failed]:
                await _remove(session, queue, ids, partial(send, failed=failed))
        return Resent(frozenset(sent), refused)

    # -- pauses and moves ------------------------------------------------------------------------

    async def pause(self, queue: str, pause: Pause) -> None:
        """Pause the queue for all workers; when this returns, this broker knows of it too."""
        await write_facts(await self._sessions.get(), PauseFact(queue, pause), timeout_s=self._timeout_s)

    async def resume(self, queue: str) -> bool:
        """End the pause; return whether the queue was paused."""
        session = await self._sessions.get()
        await session.catch_up()
        was_paused = queue in session.views.facts.paused
        await write_facts(session, PauseFact(queue, None), timeout_s=self._timeout_s)
        return was_paused

    async def paused(self) -> Mapping[str, Pause]:
        """Return the paused queues, by name."""
        session = await self._sessions.get()
        await session.catch_up()
        return dict(sorted(session.views.facts.paused.items()))

    async def move(self, source: str, target: str, limit: int) -> int:
        """Move one portion of messages, from the queue or a level of its delay ladder; return their number.

        A moved message retains its count of starts, and counts as redelivered if it did before.
        """
        for queue in (source, target):
            CAPABILITIES.refuse_reserved(queue)
        session = await self._sessions.get()
        names = [source, *delay_queues(source)]
        waiting = await session.counts(names)
        for name in names:
            if waiting.get(name) and (moved := await _move_some(session, name, source, target, limit)):
                return moved
        return 0


def letter_of(incoming: Incoming, *, failed: bool = False) -> DeadLetter:
    """Return the dead letter in a message. Any program may write to the queue: a malformed number is 0."""
    message, _, ours = decode(incoming)
    return DeadLetter(
        letter_id=decode_properties(incoming.properties).message_id,
        queue=str(ours.get(publishing.QUEUE, "")),
        message=message,
        stored=str(ours.get(publishing.REASON, "")),
        starts=int(_number(ours.get(publishing.STARTS), COUNT_MAX)),
        buried_at=_number(ours.get(publishing.BURIED_AT), LATEST_S),
        failed=failed,
    )


def _number(value: object, most: float) -> float:
    return value if isinstance(value, int | float) and 0 <= value <= most else 0.0


def not_paused(session: Session, queues: Sequence[str]) -> Sequence[str]:
    """Return those of the queues that are not paused."""
    known = session.views.facts.paused
    return [queue for queue in queues if queue not in known] if known else queues


async def leave_paused(session: Session, owner: str, queues: Sequence[str]) -> None:
    """Return the messages that this owner has fetched from paused queues."""
    known = session.views.facts.paused
    for queue in queues if known else ():
        if queue in known:
            await session.leave(owner, queue)


def delay_queues(queue: str) -> list[str]:
    """Return the names of the queues in which the queue's delayed messages wait."""
    return [topology.delay_queue(queue, step).name for step in topology.DELAY_STEPS_MS]


# ---- taking and putting back -----------------------------------------------------------------------


async def _take_messages(channel: Channel, queue: str, limit: int) -> list[Incoming]:
    """Take up to `limit` messages of a queue, until the channel closes."""
    found: list[Incoming] = []
    while len(found) < limit:
        wanted = min(PORTION, limit - len(found))
        got = await _get_messages(channel, queue, wanted)
        found += got
        if len(got) < wanted:
            break
    return found


async def _get_messages(channel: Channel, queue: str, limit: int) -> list[Incoming]:
    asked = [channel.ask(Method.BASIC_GET, 0, queue, False) for _ in range(limit)]
    answers = [await channel.answer(future) for future in asked]
    return [answer for answer in answers if answer.method == Method.BASIC_GET_OK]


async def _put_back(session: Session, channel: Channel, queue: str, taken: int) -> None:
    """Return the messages that the channel has taken to their places.

    Naming messages to RabbitMQ to put them back takes a time that grows with the square of their number (38 s
    for 10,000, in which the queue answers no other client). Closing their channel takes next to none. In both
    cases the queue may have its messages back a moment after the channel has closed. This waits for them for
    a limited time: a second reader would see fewer, unless another consumer takes them at once.
    """
    if 0 < taken <= PORTION:
        channel.send(encode_method(channel.number, Method.BASIC_NACK, 0, True, True))
    await channel.close()
    loop = asyncio.get_running_loop()
    ends = loop.time() + RETURN_S
    while taken and loop.time() < ends:
        waiting, consumers = await session.look_at(queue)
        if waiting >= taken or consumers:
            return
        await asyncio.sleep(RETURN_POLL_S)


class _Removal:
    """How many letters were removed, and which were refused, by their places in the request."""

    def __init__(self, letter_ids: Sequence[int | str]) -> None:
        self.wanted = {letter_id: place for place, letter_id in enumerate(letter_ids)}
        self.refused: dict[int, str] = {}
        self.count = 0


async def _remove(
    session: Session, queue: str, letter_ids: Sequence[int | str], send_first: SendFirst
) -> _Removal:
    """Take these letters out of the queue, each portion after `send_first`; the others go back."""
    rest = (await session.counts([queue])).get(queue, 0)
    removal, channel, taken = _Removal(letter_ids), await session.link.channel(), 0
    try:
        while rest > 0 and removal.wanted:
            found = await _get_messages(channel, queue, min(PORTION, rest))
            taken += len(found)
            chosen = [
                (incoming, letter)
                for incoming in found
                if (letter := letter_of(incoming)).letter_id in removal.wanted
            ]
            refused = await send_first([letter for _, letter in chosen])
            for number, (incoming, letter) in enumerate(chosen):
                place = removal.wanted.pop(letter.letter_id)
                if number in refused:
                    removal.refused[place] = refused[number]
                else:
                    channel.send(encode_ack(channel.number, incoming.fields[0]))
                    removal.count += 1
                    taken -= 1
            rest = rest - len(found) if found else 0
    finally:
        if channel.error is None:
            await _put_back(session, channel, queue, taken)
    return removal


# ---- moving ----------------------------------------------------------------------------------------


async def _move_some(session: Session, place: str, source: str, target: str, limit: int) -> int:
    """Move up to `limit` messages that wait in this place, one portion at most; return how many moved."""
    async with session.link.temporary_channel() as channel:
        found = await _get_messages(channel, place, min(limit, PORTION))
        return await _move_taken(session, channel, found, place, source, target)


async def _move_taken(
    session: Session, channel: Channel, found: Sequence[Incoming], place: str, source: str, target: str
) -> int:
    rest = {incoming.fields[0]: incoming for incoming in found}
    try:
        await session.catch_up()  # the counts of starts, and which messages are unstarted, must be known
        moving = list(_unsigned(session, found, source, target))
        if found and not moving:
            raise signed_for(source)
        await session.send([start for each in moving for start in each.counted])  # or nothing is moved
        refused = await session.try_send([each.post for each in moving])
        moved = [each for number, each in enumerate(moving) if number not in refused]
        for each in moved:
            channel.send(encode_ack(channel.number, each.incoming.fields[0]))
            del rest[each.incoming.fields[0]]
        await session.send([post for each in moved for post in each.ended])
        if refused:
            raise BrokerRefused(
                f"{len(moved)} of the last {len(moved) + len(refused)} messages moved; RabbitMQ refused the "
                f"others for {target!r}, and they stay where they are: {refused[min(refused)]}"
            )
    finally:
        if channel.error is None:
            if place == source:  # messages from the ladder arrive without the flag
                new = (decode(incoming) for incoming in rest.values() if not incoming.fields[1])
                unstarted = [message.correlation_id for message, state, _ in new if not state.ran]
                await session.note_unstarted(source, unstarted)
            await _put_back(session, channel, place, len(rest))
    return len(found) - len(rest)


class _Moving(NamedTuple):
    """A message to be moved. Its starts are `counted` for the target first, then `ended` for the source."""

    incoming: Incoming
    post: Post
    counted: Sequence[Post] = ()
    ended: Sequence[Post] = ()


def _unsigned(session: Session, found: Sequence[Incoming], source: str, target: str) -> Iterator[_Moving]:
    """Yield the messages before the first signed one, each with its posts."""
    for incoming in found:
        _, redelivered, exchange, key, _ = incoming.fields
        message, state, _ = decode(incoming, exchange, key)
        if HEADER.encode() in message.headers:
            return
        if message.content_type == UNREADABLE_CONTENT and not message.headers:
            yield _Moving(incoming, _unchanged(session, incoming, target))
            continue
        known, name = session.views.starts, message.correlation_id
        starts, is_unstarted = known.count(source, name), known.is_unstarted(source, name)
        counted = [publishing.start_entry(target, name, starts)] if starts else []
        ended = [publishing.start_entry(source, name, 0)] if starts or is_unstarted else []
        ran = state.ran or (redelivered and not is_unstarted)
        outgoing = Outgoing(target, message, state.due, ran)
        try:
            post = publishing.task(outgoing, session.queues, cluster_now())
        except (WireError, ValueError):
            post = _unchanged(session, incoming, target)
        yield _Moving(incoming, post, counted, ended)


def _unchanged(session: Session, incoming: Incoming, target: str) -> Post:
    """Return a post of the bytes of a message that cannot be encoded again.

    That it may have run cannot be recorded on it.
    """
    return Post(target, incoming.properties, incoming.body, session.queues.queue(target))
