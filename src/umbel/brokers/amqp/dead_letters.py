"""Dead letters, and looking into queues: messages taken out, looked at, and put back.

RabbitMQ has no way to read a queue without taking from it. A reader claims the messages for a
moment, and they go back to their places when the channel closes; meanwhile another reader sees
fewer, and RabbitMQ marks them as redelivered.

Letters are requeued in portions: one portion is published, confirmed and acknowledged before the next
is taken. Where the connection ends in between, the letters of one portion at most are sent twice.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from umbel.brokers.amqp import outbox, topology
from umbel.brokers.amqp.envelope import decode
from umbel.brokers.amqp.frames import Incoming, Method, encode_ack, encode_method
from umbel.brokers.amqp.link import Channel, Link
from umbel.brokers.amqp.properties import decode_properties
from umbel.brokers.amqp.records import Start, encode_record
from umbel.brokers.amqp.session import Session
from umbel.brokers.interface import DeadLetter, Delivery
from umbel.errors import BrokerRefused
from umbel.wire.message import outgoing_of_letter
from umbel.wire.signing import Keyring

PORTION = 100
RETURN_S, LOOK_AGAIN_S = 10.0, 0.02
# What is done with a portion of letters before they are removed; why some stay, by their places in it.
First = Callable[[Sequence[DeadLetter]], Awaitable[dict[int, str]]]


async def look(link: Link, queue: str, limit: int) -> tuple[list[Incoming], Channel]:
    """Up to `limit` messages of a queue, held until the channel is given to `put_back`."""
    channel, found = await link.channel(), list[Incoming]()
    while len(found) < limit:
        wanted = min(PORTION, limit - len(found))
        got = await get_some(channel, queue, wanted)
        found += got
        if len(got) < wanted:
            break
    return found, channel


async def put_back(session: Session, channel: Channel, queue: str, held: int) -> None:
    """What the channel holds goes back to its places.

    RabbitMQ takes a time that grows with the square of their number to put messages back that are named
    to it (38 s for 10,000, in which the queue answers nobody), and next to none when their channel ends.
    Either way the queue may hear of it a moment after the channel has closed: who looked and asks again
    would see fewer.
    """
    if 0 < held <= PORTION:
        channel.send(encode_method(channel.number, Method.BASIC_NACK, 0, True, True))
    await channel.close()
    if held:
        await _wait_returned(session, queue, held)


async def get_some(channel: Channel, queue: str, limit: int) -> list[Incoming]:
    asked = [channel.ask(Method.BASIC_GET, 0, queue, False) for _ in range(limit)]
    answers = [await channel.answer(future) for future in asked]
    return [answer for answer in answers if answer.method == Method.BASIC_GET_OK]


async def _wait_returned(session: Session, queue: str, held: int) -> None:
    """For a while only: somebody else may take them at once."""
    ends = asyncio.get_running_loop().time() + RETURN_S
    while asyncio.get_running_loop().time() < ends:
        waiting, consumers = await session.look_at(queue)
        if waiting >= held or consumers:
            return
        await asyncio.sleep(LOOK_AGAIN_S)


async def peek(session: Session, queue: str, limit: int) -> list[Delivery]:
    """The first messages in line, those that wait in this process first; their tags claim nothing."""
    here = [
        Delivery("", queue, arrived.message, 0, arrived.redelivered)
        for consumer in session.claims.consumers()
        if consumer.queue == queue
        for arrived in consumer.waiting()
    ]
    if len(here) >= limit or queue not in await session.counts([queue]):
        return here[:limit]
    found, channel = await look(session.link, queue, limit - len(here))
    for incoming in found:
        _, redelivered, exchange, key, _ = incoming.fields
        message, mark, _ = decode(incoming, exchange, key)
        if not redelivered:
            session.claims.remember_unrun(message.correlation_id)
        here.append(Delivery("", queue, message, 0, redelivered or mark.ran))
    await put_back(session, channel, queue, len(found))
    return here


async def dead_letters(session: Session, limit: int) -> list[DeadLetter]:
    if topology.DEAD not in await session.counts([topology.DEAD]):
        return []
    found, channel = await look(session.link, topology.DEAD, limit)
    letters = [letter_of(incoming) for incoming in found]
    await put_back(session, channel, topology.DEAD, len(found))
    return letters


async def requeue(
    session: Session, letter_ids: Sequence[int | str], now: float, keyring: Keyring | None = None
) -> int:
    """Publish the letters to their queues, then acknowledge them here; the rest goes back.

    A letter that its queue refuses stays, and is reported after the others are requeued.
    """

    async def send(letters: Sequence[DeadLetter]) -> dict[int, str]:
        return await _send(letters, session, now, keyring)

    removal = await remove(session, letter_ids, send)
    if removal.problems:
        raise BrokerRefused(removal.summary(), places=[*removal.problems])
    return removal.count


async def drop(session: Session, letter_ids: Sequence[int | str]) -> int:
    """Acknowledge the letters; the rest goes back."""

    async def keep_none(_letters: Sequence[DeadLetter]) -> dict[int, str]:
        return {}

    return (await remove(session, letter_ids, keep_none)).count


async def remove(
    session: Session, letter_ids: Sequence[int | str], first: First, queue: str = topology.DEAD
) -> "_Removal":
    left = (await session.counts([queue])).get(queue, 0)
    removal = _Removal(session, await session.link.channel(), letter_ids, queue)
    try:
        while left > 0 and removal.wanted:
            found = await get_some(removal.channel, queue, min(PORTION, left))
            await removal.portion(found, first)
            left = left - len(found) if found else 0
    finally:
        await removal.end()
    return removal


class _Removal:
    """What was removed so far, what is held on the channel, and what was refused, by its place."""

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
        self._held += len(found)
        chosen = [(one, letter) for one in found if (letter := letter_of(one)).letter_id in self.wanted]
        refused = await first([letter for _, letter in chosen])
        for number, (one, letter) in enumerate(chosen):
            place = self.wanted.pop(letter.letter_id)
            if number in refused:
                self.problems[place] = refused[number]
            else:
                self.channel.send(encode_ack(self.channel.number, one.fields[0]))
                self.count += 1
                self._held -= 1

    async def end(self) -> None:
        if self.channel.error is None:
            await put_back(self._session, self.channel, self._queue, self._held)

    def summary(self) -> str:
        first = next(iter(self.problems.values()))
        return f"{self.count} dead letters requeued, {len(self.problems)} refused: {first}"


async def _send(
    letters: Sequence[DeadLetter], session: Session, now: float, keyring: Keyring | None
) -> dict[int, str]:
    """Publish one portion; those that were refused, by their places, and why."""
    posts: list[outbox.Post] = []
    for letter in letters:
        outgoing = outgoing_of_letter(letter.queue, letter.message)
        if keyring is not None:
            outgoing = keyring.requeued(outgoing, letter.reason, now)
        fresh = Start(letter.queue, letter.message.correlation_id, 0)
        posts += [
            outbox.entry(topology.STARTS, encode_record(fresh)),
            outbox.task(outgoing, session.queues, now),
        ]
    refused = await session.try_send(posts)
    return {place // 2: why for place, why in refused.items()}


def letter_of(incoming: Incoming, *, failed: bool = False) -> DeadLetter:
    message, _, ours = decode(incoming)
    return DeadLetter(
        letter_id=decode_properties(incoming.properties).message_id,
        queue=str(ours.get(outbox.QUEUE, "")),
        message=message,
        reason=str(ours.get(outbox.REASON, "")),
        starts=int(ours.get(outbox.STARTS, 0)),
        buried_at=float(ours.get(outbox.BURIED_AT, 0.0)),
        failed=failed,
    )
