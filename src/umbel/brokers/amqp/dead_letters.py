"""Dead letters, and looking into queues: messages taken out, looked at, and put back.

RabbitMQ has no way to read a queue without taking from it. Whoever looks holds the messages for a
moment, and they go back to their places when the channel closes; meanwhile another reader sees
fewer, and RabbitMQ marks them as redelivered.
"""

from collections.abc import Sequence

from umbel.brokers.amqp import outbox, topology
from umbel.brokers.amqp.envelope import decode
from umbel.brokers.amqp.frames import Incoming, Method, encode_ack, encode_method
from umbel.brokers.amqp.link import Channel, Link
from umbel.brokers.amqp.records import Start, encode_record
from umbel.brokers.amqp.session import Session
from umbel.brokers.amqp.table import decode_properties
from umbel.brokers.interface import DEAD_LETTER_PEEK_MAX, DeadLetter, Delivery
from umbel.protocol.trust import is_replayed
from umbel.wire.message import Outgoing
from umbel.wire.signing import Keyring

_PAGE = 100


async def look(link: Link, queue: str, limit: int) -> tuple[list[Incoming], Channel]:
    """Up to `limit` messages of a queue, held until the channel is given to `put_back`."""
    channel, found = await link.channel(), list[Incoming]()
    while len(found) < limit:
        asked = [
            channel.ask(Method.BASIC_GET, 0, queue, False) for _ in range(min(_PAGE, limit - len(found)))
        ]
        answers = [await channel.answer(future) for future in asked]
        got = [answer for answer in answers if answer.method == Method.BASIC_GET_OK]
        found += got
        if len(got) < len(answers):
            break
    return found, channel


async def put_back(channel: Channel) -> None:
    channel.send(encode_method(channel.number, Method.BASIC_NACK, 0, True, True))
    await channel.close()


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
        message, mark, _ = decode(incoming)
        redelivered = incoming.fields[1]
        if not redelivered:
            session.claims.remember_unrun(message.correlation_id)
        here.append(Delivery("", queue, message, 0, redelivered or mark.ran))
    await put_back(channel)
    return here


async def dead_letters(session: Session, limit: int) -> list[DeadLetter]:
    if topology.DEAD not in await session.counts([topology.DEAD]):
        return []
    found, channel = await look(session.link, topology.DEAD, limit)
    letters = [_letter(incoming) for incoming in found]
    await put_back(channel)
    return letters


async def requeue(
    session: Session, letter_ids: Sequence[int | str], now: float, keyring: Keyring | None = None
) -> int:
    """Publish the letters to their queues, then acknowledge them here; the rest goes back."""
    if topology.DEAD not in await session.counts([topology.DEAD]):
        return 0
    wanted, count = set(letter_ids), 0
    found, channel = await look(session.link, topology.DEAD, DEAD_LETTER_PEEK_MAX * 10)
    for incoming in found:
        letter = _letter(incoming)
        if letter.letter_id not in wanted:
            continue
        outgoing = Outgoing(letter.queue, letter.message)
        if keyring is not None and not is_replayed(letter.reason):
            outgoing = keyring.renewed(outgoing, now)
        fresh = Start(letter.queue, letter.message.correlation_id, 0)
        await session.send(
            [
                outbox.entry(topology.STARTS, encode_record(fresh)),
                outbox.task(outgoing, now),
            ]
        )
        channel.send(encode_ack(channel.number, incoming.fields[0]))
        count += 1
    await put_back(channel)
    return count


def _letter(incoming: Incoming) -> DeadLetter:
    message, _, ours = decode(incoming)
    return DeadLetter(
        letter_id=decode_properties(incoming.properties).message_id,
        queue=str(ours.get(outbox.QUEUE, "")),
        message=message,
        reason=str(ours.get(outbox.REASON, "")),
        starts=int(ours.get(outbox.STARTS, 0)),
        buried_at=float(ours.get(outbox.BURIED_AT, 0.0)),
    )
