"""Dead letters, failures and paused queues: messages taken out of a queue, shown, moved and put back.

RabbitMQ has no way to read a queue without taking from it. A reader claims the messages for a moment, and
they go back to their places when the channel closes; meanwhile another reader sees fewer, and RabbitMQ flags
them as redelivered.

Messages are requeued, moved and retried in portions: one portion is published, confirmed and acknowledged
before the next is taken. A crash in between leaves at most one portion in both queues, under the same ids.

The message of a failed task goes to the queue of failures, whose limits drop the oldest. It is published and
confirmed before the message of its task is acknowledged, so a crash may store it twice: a retry takes the
newest of a task and removes the others. A pause is an entry in the stream of facts: every worker knows of it
a few milliseconds after `pause` has returned, and before its first claim when it starts or reconnects.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from umbel.brokers.amqp import outbox, topology
from umbel.brokers.amqp.envelope import decode, decode_properties
from umbel.brokers.amqp.frames import Incoming, Method, encode_ack, encode_method
from umbel.brokers.amqp.link import Channel, Link
from umbel.brokers.amqp.outbox import Post, Refusals
from umbel.brokers.amqp.session import Session, Sessions, write_facts
from umbel.brokers.amqp.streams import PauseFact, Start, encode_record
from umbel.brokers.amqp.topology import Queue
from umbel.brokers.amqp.verdicts import bury_unkept
from umbel.brokers.interface import DeadLetter, Delivery, Depth, Pause, Refused, Resend, Resent
from umbel.brokers.refusals import partly_requeued, signed_for
from umbel.clock import cluster_now
from umbel.errors import BrokerRefused, WireError
from umbel.wire.message import COUNT_MAX, LATEST_S, UNREADABLE_CONTENT, Outgoing
from umbel.wire.retried import requeued
from umbel.wire.signing import HEADER, Signer

# ---- dead letters, and showing queues --------------------------------------------------------------
#
# Messages taken out, shown, and put back.
#
# RabbitMQ has no way to read a queue without taking from it. A reader claims the messages for a moment, and
# they go back to their places when the channel closes; meanwhile another reader sees fewer, and RabbitMQ
# flags them as redelivered.
#
# Dead letters are requeued in portions: one portion is published, confirmed and acknowledged before the
# next is taken. If the connection ends in between, at most one portion of letters is sent twice.

PORTION = 100
RETURN_S, LOOK_AGAIN_S = 10.0, 0.02
# What is done with a portion of letters before they are removed. Returns why some stay, by their places.
First = Callable[[Sequence[DeadLetter]], Awaitable[dict[int, str]]]


async def hold_messages(link: Link, queue: str, limit: int) -> tuple[list[Incoming], Channel]:
    """Up to `limit` messages of a queue, held until the channel is given to `put_back`."""
    channel, found = await link.channel(), list[Incoming]()
    while len(found) < limit:
        wanted = min(PORTION, limit - len(found))
        got = await get_messages(channel, queue, wanted)
        found += got
        if len(got) < wanted:
            break
    return found, channel


async def put_back(session: Session, channel: Channel, queue: str, held: int) -> None:
    """Return what the channel holds to its places.

    Naming messages to RabbitMQ to put them back takes a time that grows with the square of their number (38 s
    for 10,000, in which the queue answers no other client). Closing their channel takes next to none. In both
    cases the queue may learn of it a moment after the channel has closed: without waiting, a second look
    would see fewer.
    """
    if 0 < held <= PORTION:
        channel.send(encode_method(channel.number, Method.BASIC_NACK, 0, True, True))
    await channel.close()
    if held:
        await _wait_returned(session, queue, held)


async def get_messages(channel: Channel, queue: str, limit: int) -> list[Incoming]:
    """Up to `limit` messages of a queue, which the channel holds until they are acknowledged."""
    asked = [channel.ask(Method.BASIC_GET, 0, queue, False) for _ in range(limit)]
    answers = [await channel.answer(future) for future in asked]
    return [answer for answer in answers if answer.method == Method.BASIC_GET_OK]


async def _wait_returned(session: Session, queue: str, held: int) -> None:
    """Wait a limited time until the queue has its messages again: another consumer may take them at once."""
    ends = asyncio.get_running_loop().time() + RETURN_S
    while asyncio.get_running_loop().time() < ends:
        waiting, consumers = await session.look_at(queue)
        if waiting >= held or consumers:
            return
        await asyncio.sleep(LOOK_AGAIN_S)


async def peek(session: Session, queue: str, limit: int) -> list[Delivery]:
    """The first messages of a queue, those that wait in this process first; their tags claim nothing."""
    here = [
        Delivery("", queue, arrived.message, 0, arrived.redelivered)
        for consumer in session.claims.consumers()
        if consumer.queue == queue
        for arrived in consumer.waiting()
    ]
    if len(here) >= limit or queue not in await session.counts([queue]):
        return here[:limit]
    found, channel = await hold_messages(session.link, queue, limit - len(here))
    new: list[str] = []
    for incoming in found:
        _, redelivered, exchange, key, _ = incoming.fields
        message, state, _ = decode(incoming, exchange, key)
        if not redelivered:
            new.append(message.correlation_id)
        here.append(Delivery("", queue, message, 0, redelivered or state.ran))
    await session.note_unstarted(queue, new)
    await put_back(session, channel, queue, len(found))
    return here


async def read_letters(session: Session, limit: int) -> list[DeadLetter]:
    """Up to `limit` dead letters, which stay where they are."""
    if topology.DEAD not in await session.counts([topology.DEAD]):
        return []
    found, channel = await hold_messages(session.link, topology.DEAD, limit)
    letters = [letter_of(incoming) for incoming in found]
    await put_back(session, channel, topology.DEAD, len(found))
    return letters


async def requeue_letters(
    session: Session,
    letter_ids: Sequence[int | str],
    now: float,
    signer: Signer | None,
    *,
    even_if_used: bool,
) -> int:
    """Publish the letters to their queues, then acknowledge them here; the others go back.

    A letter that its queue refuses stays, and is reported after the others are requeued.
    """

    async def send(letters: Sequence[DeadLetter]) -> dict[int, str]:
        return await _send(letters, session, now, signer, even_if_used=even_if_used)

    removal = await remove_letters(session, letter_ids, send)
    if removal.problems:
        raise partly_requeued(removal.count, removal.problems)
    return removal.count


async def drop_letters(session: Session, letter_ids: Sequence[int | str]) -> int:
    """Acknowledge the letters, so that they are deleted; the others go back. How many were deleted."""

    async def keep_none(_letters: Sequence[DeadLetter]) -> dict[int, str]:
        return {}

    return (await remove_letters(session, letter_ids, keep_none)).count


async def remove_letters(
    session: Session, letter_ids: Sequence[int | str], first: First, queue: str = topology.DEAD
) -> "_Removal":
    """Take these letters out of the queue, each portion after `first` has handled it; the others go back."""
    left = (await session.counts([queue])).get(queue, 0)
    removal = _Removal(session, await session.link.channel(), letter_ids, queue)
    try:
        while left > 0 and removal.wanted:
            found = await get_messages(removal.channel, queue, min(PORTION, left))
            await removal.portion(found, first)
            left = left - len(found) if found else 0
    finally:
        await removal.end()
    return removal


class _Removal:
    """What was removed so far, what the channel holds, and which letters were refused, by their places."""

    def __init__(
        self, session: Session, channel: Channel, letter_ids: Sequence[int | str], queue: str
    ) -> None:
        self.channel = channel
        self._queue = queue
        self.wanted = {letter_id: place for place, letter_id in enumerate(letter_ids)}
        self.problems: dict[int, str] = {}
        self.count = 0
        self._held = 0
        self._session = session

    async def portion(self, found: Sequence[Incoming], first: First) -> None:
        """Let `first` handle the wanted letters of a portion, and acknowledge those that
        it does not refuse.
        """
        self._held += len(found)
        chosen = [
            (incoming, letter)
            for incoming in found
            if (letter := letter_of(incoming)).letter_id in self.wanted
        ]
        refused = await first([letter for _, letter in chosen])
        for number, (incoming, letter) in enumerate(chosen):
            place = self.wanted.pop(letter.letter_id)
            if number in refused:
                self.problems[place] = refused[number]
            else:
                self.channel.send(encode_ack(self.channel.number, incoming.fields[0]))
                self.count += 1
                self._held -= 1

    async def end(self) -> None:
        """Return everything that the channel still holds."""
        if self.channel.error is None:
            await put_back(self._session, self.channel, self._queue, self._held)


async def _send(
    letters: Sequence[DeadLetter], session: Session, now: float, signer: Signer | None, *, even_if_used: bool
) -> dict[int, str]:
    """Publish one portion; returns which were refused, by their places, and why."""
    posts: list[outbox.Post] = []
    for letter in letters:
        outgoing = requeued(
            letter.queue,
            letter.message,
            starts=letter.starts,
            stored=letter.stored,
            signer=signer,
            now=now,
            even_if_used=even_if_used,
        )
        fresh = Start(letter.queue, letter.message.correlation_id, 0)
        posts += [
            outbox.entry(topology.STARTS, encode_record(fresh)),
            outbox.task(outgoing, session.queues, now),
        ]
    refused = await session.try_send(posts)
    return {place // 2: why for place, why in refused.items()}


def letter_of(incoming: Incoming, *, failed: bool = False) -> DeadLetter:
    """The dead letter in a message. Any program may write to the queue: a malformed number counts as 0."""
    message, _, ours = decode(incoming)
    return DeadLetter(
        letter_id=decode_properties(incoming.properties).message_id,
        queue=str(ours.get(outbox.QUEUE, "")),
        message=message,
        stored=str(ours.get(outbox.REASON, "")),
        starts=int(_number(ours.get(outbox.STARTS), COUNT_MAX)),
        buried_at=_number(ours.get(outbox.BURIED_AT), LATEST_S),
        failed=failed,
    )


def _number(value: object, most: float) -> float:
    return value if isinstance(value, int | float) and 0 <= value <= most else 0.0


# ---- failures --------------------------------------------------------------------------------------
#
# Messages of failed tasks in a separate queue, whose limits drop the oldest.
#
# A failure is published, and confirmed, before the message of its task is acknowledged. A worker that dies
# in between runs the task again, and so may store its message twice: a retry takes the newest of a task and
# removes the others.
#
# A retry is published, and confirmed, before its letter is acknowledged here, a portion at a time. If it is
# killed in between, the next retry finds the same letters, and with ids made from those of the letters it
# sends the same messages again. So no retry is lost, and a repeated one has the id of the first.

LOOK_MAX = 100_000


class FailureStore:
    """The part of the broker that stores, lists and retries the messages of failed tasks."""

    _sessions: Sessions
    _failed: Queue

    async def keep_failed(self, failed: Sequence[Refused]) -> None:
        """Store the messages of failed tasks, so that they can be retried."""
        await store_failures(await self._sessions.get(), failed, cluster_now(), self._failed)

    async def failed(self, limit: int, *, task_id: str = "") -> Sequence[DeadLetter]:
        """Up to `limit` stored failures, newest first; with `task_id`, of that task only."""
        return await read_failures(await self._sessions.get(), limit, task_id)

    async def resend(self, letters: Sequence[Resend]) -> Resent:
        """Retry or discard stored failures and dead letters; reports which were sent and which refused."""
        return await resend_failures(await self._sessions.get(), letters, cluster_now())


async def store_failures(session: Session, failed: Sequence[Refused], now: float, into: Queue) -> None:
    """Publish the messages of failed tasks; those that their queue refuses become dead letters."""
    letters = [failure for failure in failed if isinstance(failure.part, Outgoing)]
    posts = []
    for failure in letters:
        assert isinstance(failure.part, Outgoing)
        letter = failure.part.as_letter()
        posts.append(outbox.kept_failure(letter.queue, letter.message, failure.reason, 0, now, into))
    refused = await session.try_send(posts)
    await bury_unkept(session, [(letters[place], why) for place, why in refused.items()], now)


async def read_failures(session: Session, limit: int, task_id: str) -> list[DeadLetter]:
    """Up to `limit` failures, newest first. The newest are the last in the queue, so all are taken, read and
    put back.
    """
    if topology.FAILED not in await session.counts([topology.FAILED]):
        return []
    found, channel = await hold_messages(session.link, topology.FAILED, LOOK_MAX)
    letters = [letter_of(incoming, failed=True) for incoming in reversed(found)]
    await put_back(session, channel, topology.FAILED, len(found))
    return [letter for letter in letters if not task_id or letter.message.correlation_id == task_id][:limit]


async def resend_failures(session: Session, letters: Sequence[Resend], now: float) -> Resent:
    """Send the follow-up of each letter, then remove the letter, a portion at a time.

    If this is killed in between, the next retry finds the same letters, and with ids made from those of the
    letters it sends the same messages again. So no retry is lost, and a repeated one has the id of the first.
    """
    sent: set[int] = set()
    refused: dict[int, str] = {}
    for queue, is_failed in ((topology.FAILED, True), (topology.DEAD, False)):
        places = {
            asked.letter.letter_id: place
            for place, asked in enumerate(letters)
            if asked.letter.failed is is_failed
        }
        if places:
            await _resend_from(session, queue, letters, places, now, sent, refused)
    return Resent(frozenset(sent), refused)


async def _resend_from(
    session: Session,
    queue: str,
    letters: Sequence[Resend],
    places: Mapping[int | str, int],
    now: float,
    sent: set[int],
    refused: dict[int, str],
) -> None:
    async def send(found: Sequence[DeadLetter]) -> dict[int, str]:
        asked = [letters[places[letter.letter_id]].outgoing for letter in found]
        posted = [nth for nth, outgoing in enumerate(asked) if outgoing is not None]
        posts = [outbox.task(outgoing, session.queues, now) for outgoing in asked if outgoing is not None]
        problems = {posted[nth]: why for nth, why in (await session.try_send(posts)).items()}
        refused.update({places[found[nth].letter_id]: why for nth, why in problems.items()})
        sent.update(places[found[nth].letter_id] for nth in posted if nth not in problems)
        return problems

    await remove_letters(session, list(places), send, queue)


# ---- pauses ----------------------------------------------------------------------------------------
#
# Which queues are not consumed, and moving the messages of a queue.
#
# A pause is a fact (`records.py`), which every broker reads as it is written: a worker knows of it a few
# milliseconds after `pause` has returned, and before its first claim when it starts or reconnects.
#
# Messages are moved in portions: one portion is published, confirmed and acknowledged before the next is
# taken. A move that is killed in between leaves at most one portion in both queues, under the same ids. A
# message that the target refuses, because it is full, stays and ends the move.
#
# A moved message retains its count of starts, and counts as redelivered if it did before. A message that
# was read and stays does not count as redelivered, though RabbitMQ flags it so.


async def pause(session: Session, queue: str, mark: Pause, *, timeout_s: float) -> None:
    """Pause the queue for all workers; when this returns, this broker knows it too."""
    await write_facts(session, PauseFact(queue, mark), timeout_s=timeout_s)


async def resume(session: Session, queue: str, *, timeout_s: float) -> bool:
    """End the pause; whether the queue was paused."""
    await session.catch_up()
    was_paused = queue in session.views.facts.paused
    await write_facts(session, PauseFact(queue, None), timeout_s=timeout_s)
    return was_paused


async def paused(session: Session) -> Mapping[str, Pause]:
    """The paused queues, by name."""
    await session.catch_up()
    return dict(sorted(session.views.facts.paused.items()))


def with_pause_state(session: Session, name: str, depth: Depth) -> Depth:
    """The queue's depth, with the pause if it is paused."""
    is_paused = name in session.views.facts.paused
    return Depth(depth.ready, depth.delayed, depth.claimed, paused=True) if is_paused else depth


def not_paused(session: Session, queues: Sequence[str]) -> Sequence[str]:
    """Those of the queues that are not paused."""
    known = session.views.facts.paused
    return [queue for queue in queues if queue not in known] if known else queues


async def leave_paused(session: Session, owner: str, queues: Sequence[str]) -> None:
    """Return to a paused queue what this owner has prefetched from it."""
    known = session.views.facts.paused
    for queue in queues if known else ():
        if queue in known:
            await session.leave(owner, queue)


async def move(session: Session, source: str, target: str, limit: int) -> int:
    """Move one portion of messages, from the queue or a level of its delay ladder; how many were moved.

    A moved message retains its count of starts, and counts as redelivered if it did before.
    """
    names = [source, *delay_queues(source)]
    there = await session.counts(names)
    for name in names:
        if there.get(name) and (moved := await _move_some(session, name, source, target, limit)):
            return moved
    return 0


def delay_queues(queue: str) -> list[str]:
    """The queues in which messages wait that are not due."""
    return [topology.delay_queue(queue, step).name for step in topology.DELAY_STEPS_MS]


async def _move_some(session: Session, place: str, source: str, target: str, limit: int) -> int:
    channel = await session.link.channel()
    found = await get_messages(channel, place, min(limit, PORTION))
    left = {incoming.fields[0]: incoming for incoming in found}
    try:
        await session.catch_up()  # the counts of starts, and what is unstarted, must be known
        sent = list(_unsigned(session, found, source, target))
        if found and not sent:
            raise signed_for(source)
        await session.send(
            [start for moving in sent for start in moving.counted]
        )  # if this fails, nothing is moved
        refused = await session.try_send([moving.post for moving in sent])
        gone = [moving for number, moving in enumerate(sent) if number not in refused]
        for moving in gone:
            channel.send(encode_ack(channel.number, moving.incoming.fields[0]))
            del left[moving.incoming.fields[0]]
        await session.send([post for moving in gone for post in moving.ended])
        if refused:
            raise _partly(target, len(gone), refused)
    finally:
        if channel.error is None:
            if place == source:  # messages from the ladder arrive without the flag
                stay = [incoming for incoming in left.values() if not incoming.fields[1]]
                await session.note_unstarted(source, _first_runs(stay))
            await put_back(session, channel, place, len(left))
    return len(found) - len(left)


def _first_runs(found: Sequence[Incoming]) -> list[str]:
    """Ids of those that have not run, though RabbitMQ will flag all of them as redelivered."""
    decoded = (decode(incoming) for incoming in found)
    return [message.correlation_id for message, state, _ in decoded if not state.ran]


def _partly(target: str, moved: int, refused: Refusals) -> BrokerRefused:
    why = refused[min(refused)]
    return BrokerRefused(
        f"{moved} of the last {moved + len(refused)} messages moved; RabbitMQ refused the others "
        f"for {target!r}, and they stay where they are: {why}"
    )


class _Moving(NamedTuple):
    """A message to be moved. Its starts are `counted` for the target first, then `ended` for the source."""

    incoming: Incoming
    post: Post
    counted: Sequence[Post] = ()
    ended: Sequence[Post] = ()


def _unsigned(session: Session, found: Sequence[Incoming], source: str, target: str) -> Iterator[_Moving]:
    """The messages before the first signed one, and what is published for each."""
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
        counted = [outbox.start_entry(target, name, starts)] if starts else []
        ended = [outbox.start_entry(source, name, 0)] if starts or is_unstarted else []
        ran = state.ran or (redelivered and not is_unstarted)
        outgoing = Outgoing(target, message, state.due, ran)
        try:
            post = outbox.task(outgoing, session.queues, cluster_now())
        except (WireError, ValueError):
            post = _unchanged(session, incoming, target)
        yield _Moving(incoming, post, counted, ended)


def _unchanged(session: Session, incoming: Incoming, target: str) -> Post:
    """A message that cannot be encoded again moves unchanged; that it may have run cannot
    be recorded on it.
    """
    return Post(target, incoming.properties, incoming.body, session.queues.queue(target))
