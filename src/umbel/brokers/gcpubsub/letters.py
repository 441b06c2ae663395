"""Letters: dead letters and waiting messages as people look at them, move and remove them.

Pub/Sub has no way to look at a message without taking it. So those that are looked at are pulled, and
given back; each look counts as a delivery.
"""

from collections.abc import Callable, Sequence

from umbel.brokers.gcpubsub import posts
from umbel.brokers.gcpubsub.api import Received
from umbel.brokers.gcpubsub.names import DEAD
from umbel.brokers.gcpubsub.posts import Mark, Post
from umbel.brokers.gcpubsub.service import Service
from umbel.brokers.interface import MOVED_AT_ONCE_MAX, DeadLetter, Delivery
from umbel.brokers.refusals import signed_for
from umbel.errors import BrokerRefused
from umbel.wire.envelope_redis import unseal
from umbel.wire.message import outgoing_of_letter
from umbel.wire.signing import HEADER, Keyring

LOOK_MAX = 10_000
PORTION = 1000


async def take_all(service: Service, subscription: str, limit: int) -> list[Received]:
    """Pull until nothing comes, or enough has."""
    found: list[Received] = []
    while len(found) < limit:
        portion = await service.pull(subscription, min(PORTION, limit - len(found)), waits=False)
        if not portion:
            break
        found += portion
    return found


async def give_back(service: Service, subscription: str, found: Sequence[Received]) -> None:
    if found:
        await service.set_deadline(subscription, [one.ack_id for one in found], 0)


async def peek(service: Service, queue: str, limit: int) -> list[Delivery]:
    await service.make_queue(queue)
    subscription = service.names.place(queue).subscription
    found = await take_all(service, subscription, limit)
    await give_back(service, subscription, found)
    return [_delivery(queue, one) for one in found]


async def purge(service: Service, queue: str) -> int:
    await service.make_queue(queue)
    subscription, count = service.names.place(queue).subscription, 0
    while found := await take_all(service, subscription, PORTION):
        await service.acknowledge(subscription, [one.ack_id for one in found])
        count += len(found)
    return count


async def move(service: Service, source: str, target: str, limit: int) -> int:
    for queue in (source, target):
        await service.make_queue(queue)
    subscription = service.names.place(source).subscription
    found = await take_all(service, subscription, min(limit, MOVED_AT_ONCE_MAX))
    moved = 0
    try:
        free: list[Received] = []
        for one in found:
            if HEADER.encode() in unseal(one.data).message.headers:
                break
            free.append(one)
        if found and not free:
            raise signed_for(source)
        refused = await service.try_send([_moved(service, one, target) for one in free])
        if refused:
            raise BrokerRefused(f"messages cannot be moved to {target!r}: {refused[min(refused)]}")
        await service.acknowledge(subscription, [one.ack_id for one in free])
        moved = len(free)
    finally:
        await give_back(service, subscription, found[moved:])
    return moved


async def dead_letters(service: Service, limit: int) -> list[DeadLetter]:
    await service.make_dead()
    found = await take_all(service, DEAD, limit)
    await give_back(service, DEAD, found)
    return [posts.read_letter(one.data, one.message_id, one.published)[0] for one in found]


async def requeue(service: Service, ids: Sequence[int | str], now: float, keyring: Keyring | None) -> int:
    def sent(letter: DeadLetter, data: bytes) -> Post:
        outgoing = outgoing_of_letter(letter.queue, letter.message)
        if keyring is not None:
            return posts.task(keyring.requeued(outgoing, letter.reason, now), service.names, now)
        if outgoing.exchange:
            return posts.task(outgoing, service.names, now)
        return posts.again(data, letter.queue, service.names, Mark())

    return await _remove(service, ids, sent)


async def drop(service: Service, ids: Sequence[int | str]) -> int:
    return await _remove(service, ids, None)


async def _remove(
    service: Service, ids: Sequence[int | str], sent: Callable[[DeadLetter, bytes], Post] | None
) -> int:
    """Take those letters out, and first send what is to be sent for each; the rest goes back."""
    await service.make_dead()
    wanted, found = set(ids), await take_all(service, DEAD, LOOK_MAX)
    removed: set[str] = set()
    problem = ""
    try:
        for one in found:
            letter, data = posts.read_letter(one.data, one.message_id, one.published)
            if letter.letter_id not in wanted:
                continue
            if sent is not None and (problem_now := await _send(service, letter, data, sent)):
                problem = problem_now
                continue
            await service.acknowledge(DEAD, [one.ack_id])
            removed.add(one.ack_id)
    finally:
        await give_back(service, DEAD, [one for one in found if one.ack_id not in removed])
    if problem:
        raise BrokerRefused(f"{len(removed)} dead letters requeued, others refused: {problem}")
    return len(removed)


async def _send(
    service: Service, letter: DeadLetter, data: bytes, sent: Callable[[DeadLetter, bytes], Post]
) -> str:
    """Why it was refused; empty: it was sent."""
    try:
        if letter.queue:
            await service.make_queue(letter.queue)
        return next(iter((await service.try_send([sent(letter, data)])).values()), "")
    except BrokerRefused as error:
        return str(error)


def _moved(service: Service, one: Received, target: str) -> Post:
    mark = posts.read_mark(one.attributes)
    ran = mark.ran or one.deliveries > 1
    return posts.again(one.data, target, service.names, Mark(mark.starts, ran, mark.due))


def _delivery(queue: str, one: Received) -> Delivery:
    opened, mark = unseal(one.data), posts.read_mark(one.attributes)
    return Delivery("", queue, opened.message, mark.starts, mark.ran or one.deliveries > 1)
