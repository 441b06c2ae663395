"""Letters: dead letters and waiting messages that a person lists, moves and removes.

Pub/Sub has no way to read a message without taking it. So messages to be shown are pulled and returned; each
time counts as a delivery.
"""

from collections.abc import Awaitable, Callable, Sequence

from umbel.brokers.gcpubsub import posts
from umbel.brokers.gcpubsub.api import Received
from umbel.brokers.gcpubsub.posts import DEAD, MessageState, Post
from umbel.brokers.gcpubsub.service import Service
from umbel.brokers.interface import DEAD_LETTER_PEEK_MAX, MOVED_AT_ONCE_MAX, DeadLetter, Delivery
from umbel.brokers.refusals import partly_requeued, signed_for
from umbel.clock import cluster_now
from umbel.errors import BrokerRefused
from umbel.wire.envelope_redis import unseal
from umbel.wire.message import Message
from umbel.wire.signing import HEADER, Signer

READ_MAX = 10_000
PORTION = 1000


class Letters:
    """Lists, moves and removes messages that no worker has claimed."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def peek(self, queue: str, limit: int) -> Sequence[Delivery]:
        """Return the first messages of the queue, which stay there."""
        found = await self._read(await self._subscription(queue), limit)
        deliveries: list[Delivery] = []
        for received in found:
            state, message = _state_of(received), unseal(received.message.data).message
            deliveries.append(Delivery("", queue, message, state.starts, state.ran))
        return deliveries

    async def purge(self, queue: str, on_purged: Callable[[Sequence[Message]], Awaitable[None]]) -> int:
        """Delete the waiting messages and pass them to `on_purged` in portions; return their number."""
        subscription, count = await self._subscription(queue), 0
        while found := await self._take(subscription, PORTION):
            await self._service.acknowledge(subscription, [received.ack_id for received in found])
            await on_purged([unseal(received.message.data).message for received in found])
            count += len(found)
        return count

    async def move(self, source: str, target: str, limit: int) -> int:
        """Move messages to another queue, up to the first signed one; return their number."""
        await self._service.make_queue(target)
        subscription, names = await self._subscription(source), self._service.names
        found = await self._take(subscription, min(limit, MOVED_AT_ONCE_MAX))
        moved = 0
        try:
            unsigned: list[Received] = []
            for received in found:
                if HEADER.encode() in unseal(received.message.data).message.headers:
                    break
                unsigned.append(received)
            if found and not unsigned:
                raise signed_for(source)
            copies = [
                posts.copy_of(received.message.data, target, names, _state_of(received))
                for received in unsigned
            ]
            if refused := await self._service.try_send(copies):
                why = refused[min(refused)]
                raise BrokerRefused(f"messages cannot be moved to {target!r}: {why}")
            await self._service.acknowledge(subscription, [received.ack_id for received in unsigned])
            moved = len(unsigned)
        finally:
            await self._give_back(subscription, found[moved:])
        return moved

    async def dead_letters(self, limit: int = DEAD_LETTER_PEEK_MAX) -> Sequence[DeadLetter]:
        """Return up to `limit` dead letters, which stay where they are."""
        await self._service.make_dead()
        return [_letter_in(received)[0] for received in await self._read(DEAD, limit)]

    async def requeue_dead(
        self, letter_ids: Sequence[int | str], signer: Signer | None, *, even_if_used: bool
    ) -> int:
        """Requeue dead letters; return their number.

        A letter that is refused stays; BrokerRefused names it after the others are requeued.
        """
        now, names = cluster_now(), self._service.names

        def post_of(letter: DeadLetter, data: bytes) -> Post:
            if not letter.message.headers:  # the envelope cannot be read: the data is sent unchanged
                return posts.copy_of(data, letter.queue, names, MessageState(ran=True))
            return posts.task(letter.requeued(signer, now, even_if_used=even_if_used), names, now)

        return await self._remove(letter_ids, post_of)

    async def drop_dead(self, letter_ids: Sequence[int | str]) -> int:
        """Delete dead letters; return their number."""
        return await self._remove(letter_ids, None)

    async def _remove(
        self, letter_ids: Sequence[int | str], post_of: Callable[[DeadLetter, bytes], Post] | None
    ) -> int:
        """Remove these letters, after sending their posts, if any; the others go back."""
        await self._service.make_dead()
        places = {letter_id: place for place, letter_id in enumerate(letter_ids)}
        found = await self._take(DEAD, READ_MAX)
        removed: set[str] = set()
        refused: dict[int, str] = {}
        try:
            for received in found:
                letter, data = _letter_in(received)
                if letter.letter_id not in places:
                    continue
                if post_of is not None and (why := await self._send(letter, data, post_of)):
                    refused[places[letter.letter_id]] = why
                    continue
                await self._service.acknowledge(DEAD, [received.ack_id])
                removed.add(received.ack_id)
        finally:
            await self._give_back(DEAD, [received for received in found if received.ack_id not in removed])
        if refused:
            raise partly_requeued(len(removed), refused)
        return len(removed)

    async def _send(
        self, letter: DeadLetter, data: bytes, post_of: Callable[[DeadLetter, bytes], Post]
    ) -> str:
        """Send the letter's message; return why it was refused, or ""."""
        try:
            if letter.queue:
                await self._service.make_queue(letter.queue)
            return next(iter((await self._service.try_send([post_of(letter, data)])).values()), "")
        except BrokerRefused as error:
            return str(error)

    async def _subscription(self, queue: str) -> str:
        await self._service.make_queue(queue)
        return self._service.names.place(queue).subscription

    async def _read(self, subscription: str, limit: int) -> list[Received]:
        found = await self._take(subscription, limit)
        await self._give_back(subscription, found)
        return found

    async def _take(self, subscription: str, limit: int) -> list[Received]:
        """Pull until nothing more comes, or `limit` messages are here."""
        found: list[Received] = []
        while len(found) < limit:
            portion = await self._service.pull(subscription, min(PORTION, limit - len(found)), waits=False)
            if not portion:
                break
            found += portion
        return found

    async def _give_back(self, subscription: str, found: Sequence[Received]) -> None:
        if found:
            await self._service.set_deadline(subscription, [received.ack_id for received in found], 0)


def _state_of(received: Received) -> MessageState:
    state = posts.read_state(received.message.attributes)
    return MessageState(state.starts, state.ran or received.deliveries > 1, state.due)


def _letter_in(received: Received) -> tuple[DeadLetter, bytes]:
    message = received.message
    return posts.read_letter(message.data, message.message_id, message.published)
