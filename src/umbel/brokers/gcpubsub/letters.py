"""Letters: dead letters and waiting messages that a person lists, moves and removes.

Pub/Sub has no way to read a message without taking it. So messages to be shown are pulled, and returned; each
look counts as a delivery.
"""

from collections.abc import Awaitable, Callable, Sequence

from umbel.brokers.gcpubsub import posts
from umbel.brokers.gcpubsub.api import Received
from umbel.brokers.gcpubsub.posts import DEAD, Mark, Post
from umbel.brokers.gcpubsub.service import Service
from umbel.brokers.interface import MOVED_AT_ONCE_MAX, DeadLetter, Delivery
from umbel.brokers.refusals import partly_requeued, signed_for
from umbel.errors import BrokerRefused
from umbel.wire.envelope_redis import unseal
from umbel.wire.message import Message
from umbel.wire.retried import requeued
from umbel.wire.signing import HEADER, Signer

LOOK_MAX = 10_000
PORTION = 1000
Ended = Callable[[Sequence[Message]], Awaitable[None]]


async def take_all(service: Service, subscription: str, limit: int) -> list[Received]:
    """Pull until nothing more comes, or `limit` messages are here."""
    found: list[Received] = []
    while len(found) < limit:
        portion = await service.pull(subscription, min(PORTION, limit - len(found)), waits=False)
        if not portion:
            break
        found += portion
    return found


async def give_back(service: Service, subscription: str, found: Sequence[Received]) -> None:
    """Return messages to their subscription."""
    if found:
        await service.set_deadline(subscription, [received.ack_id for received in found], 0)


async def peek(service: Service, queue: str, limit: int) -> list[Delivery]:
    """The first messages of a queue, which are returned to it."""
    await service.make_queue(queue)
    subscription = service.names.place(queue).subscription
    found = await take_all(service, subscription, limit)
    await give_back(service, subscription, found)
    return [_delivery(queue, received) for received in found]


async def purge(service: Service, queue: str, ended: Ended) -> int:
    """Delete what waits; `ended` gets the messages, a portion at a time. How many were deleted."""
    await service.make_queue(queue)
    subscription, count = service.names.place(queue).subscription, 0
    while found := await take_all(service, subscription, PORTION):
        await service.acknowledge(subscription, [received.ack_id for received in found])
        await ended([unseal(received.data).message for received in found])
        count += len(found)
    return count


async def move(service: Service, source: str, target: str, limit: int) -> int:
    """Publish messages of one queue to another, then acknowledge them, up to the first
    signed one; how many.
    """
    for queue in (source, target):
        await service.make_queue(queue)
    subscription = service.names.place(source).subscription
    found = await take_all(service, subscription, min(limit, MOVED_AT_ONCE_MAX))
    moved = 0
    try:
        free: list[Received] = []
        for received in found:
            if HEADER.encode() in unseal(received.data).message.headers:
                break
            free.append(received)
        if found and not free:
            raise signed_for(source)
        refused = await service.try_send([_moved(service, received, target) for received in free])
        if refused:
            raise BrokerRefused(f"messages cannot be moved to {target!r}: {refused[min(refused)]}")
        await service.acknowledge(subscription, [received.ack_id for received in free])
        moved = len(free)
    finally:
        await give_back(service, subscription, found[moved:])
    return moved


async def dead_letters(service: Service, limit: int) -> list[DeadLetter]:
    """Up to `limit` dead letters, which are returned to their subscription."""
    await service.make_dead()
    found = await take_all(service, DEAD, limit)
    await give_back(service, DEAD, found)
    return [
        posts.read_letter(received.data, received.message_id, received.published)[0] for received in found
    ]


async def requeue(
    service: Service, ids: Sequence[int | str], now: float, signer: Signer | None, *, even_if_used: bool
) -> int:
    """Send dead letters to their queues again; BrokerRefused if some were refused, after the others were
    sent.
    """

    def sent(letter: DeadLetter, data: bytes) -> Post:
        if not letter.message.headers:  # the envelope cannot be read: the data is sent unchanged
            return posts.copy_of(data, letter.queue, service.names, Mark(ran=True))
        outgoing = requeued(
            letter.queue,
            letter.message,
            starts=letter.starts,
            stored=letter.stored,
            signer=signer,
            now=now,
            even_if_used=even_if_used,
        )
        return posts.task(outgoing, service.names, now)

    return await _remove(service, ids, sent)


async def drop(service: Service, ids: Sequence[int | str]) -> int:
    """Delete dead letters; how many were deleted."""
    return await _remove(service, ids, None)


async def _remove(
    service: Service, ids: Sequence[int | str], sent: Callable[[DeadLetter, bytes], Post] | None
) -> int:
    """Take these letters out, after sending what `sent` makes of each; the others go back."""
    await service.make_dead()
    places = {letter_id: place for place, letter_id in enumerate(ids)}
    found = await take_all(service, DEAD, LOOK_MAX)
    removed: set[str] = set()
    refused: dict[int, str] = {}
    try:
        for received in found:
            letter, data = posts.read_letter(received.data, received.message_id, received.published)
            if letter.letter_id not in places:
                continue
            if sent is not None and (why := await _send(service, letter, data, sent)):
                refused[places[letter.letter_id]] = why
                continue
            await service.acknowledge(DEAD, [received.ack_id])
            removed.add(received.ack_id)
    finally:
        await give_back(service, DEAD, [received for received in found if received.ack_id not in removed])
    if refused:
        raise partly_requeued(len(removed), refused)
    return len(removed)


async def _send(
    service: Service, letter: DeadLetter, data: bytes, sent: Callable[[DeadLetter, bytes], Post]
) -> str:
    """Send what `sent` makes of the letter; why it was refused, "" if it was not."""
    try:
        if letter.queue:
            await service.make_queue(letter.queue)
        return next(iter((await service.try_send([sent(letter, data)])).values()), "")
    except BrokerRefused as error:
        return str(error)


def _moved(service: Service, received: Received, target: str) -> Post:
    state = posts.read_mark(received.attributes)
    ran = state.ran or received.deliveries > 1
    return posts.copy_of(received.data, target, service.names, Mark(state.starts, ran, state.due))


def _delivery(queue: str, received: Received) -> Delivery:
    opened, state = unseal(received.data), posts.read_mark(received.attributes)
    return Delivery("", queue, opened.message, state.starts, state.ran or received.deliveries > 1)
