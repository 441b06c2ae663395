"""Subscription: the broadcasts of one exchange, for one listener.

Requests go to a topic to which every node has a subscription. Replies go to one topic with the asking
client's id as their routing key. An emulator ignores the filter of a subscription, so the key is compared
here again. Each listener has separate subscriptions, removed when it leaves and by Pub/Sub a day after its
process died.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from uuid import uuid4

from umbel.backoff import Backoff
from umbel.brokers.gcpubsub import api
from umbel.brokers.gcpubsub.api import Received
from umbel.brokers.gcpubsub.http import NotFound
from umbel.brokers.gcpubsub.posts import ROUTING_KEY, Place, checked_name
from umbel.brokers.gcpubsub.service import Service
from umbel.brokers.interface import Broadcast
from umbel.brokers.links import LinkWatch, link_of
from umbel.errors import BrokerError
from umbel.protocol.shutdown import LinkChange
from umbel.wire.control import REQUEST_EXCHANGE
from umbel.wire.envelope_redis import unseal

ACK_DEADLINE_S = 10
AT_ONCE = 100
ID_DIGITS_MAX = 20  # of a message id


class PubsubSubscription:
    """The broadcasts of one exchange, for one listener; iterating retries after lost connections."""

    def __init__(
        self,
        service: Service,
        exchange: str,
        patterns: Sequence[str],
        *,
        on_link: Callable[[LinkChange], None],
    ) -> None:
        self._service = service
        self._exchange = exchange
        self._keys = frozenset(patterns)
        self._to_all = exchange == REQUEST_EXCHANGE
        self._watch = LinkWatch(link_of(exchange), on_link)
        self._places = [self._place(pattern) for pattern in patterns]
        self._entering: asyncio.Task[None] | None = None

    def _place(self, pattern: str) -> Place:
        name = self._service.names.subscription(f"{pattern}.{self._exchange}")
        if self._to_all:
            name = f"{name}-{uuid4()}"
        return Place(pattern, self._exchange, pattern, checked_name(name, pattern))

    async def enter(self) -> None:
        """Create the subscriptions; broadcasts from now on arrive."""
        self._entering = asyncio.create_task(self._make())
        await asyncio.shield(self._entering)

    async def leave(self) -> None:
        """Delete the subscriptions, once Pub/Sub has answered `enter`: a request that is cut off may be
        executed later.
        """
        if self._entering is not None:
            await asyncio.gather(self._entering, return_exceptions=True)
        for place in self._places:
            with suppress(BrokerError):
                await self._service.link.call(api.remove(self._service.project, place.subscription))

    async def __aiter__(self) -> AsyncIterator[Broadcast]:
        inbox: asyncio.Queue[list[Received]] = asyncio.Queue(maxsize=1)
        listeners = [asyncio.create_task(self._listen(place, inbox)) for place in self._places]
        try:
            while True:
                for message in await inbox.get():
                    if (broadcast := self._read(message)) is not None:
                        yield broadcast
        finally:
            for listener in listeners:
                listener.cancel()

    async def _make(self) -> None:
        retention_s = float(api.FAN_OUT_RETENTION_S)
        for place in self._places:
            await self._service.make_topic(self._exchange)
            call = api.make_subscription(
                self._service.project,
                place,
                ack_deadline_s=ACK_DEADLINE_S,
                retention_s=retention_s,
                expires_s=self._service.topology.expires_s,
                is_filtered=not self._to_all,
            )
            try:
                await self._service.link.call(call)
            except NotFound:  # the topic was deleted
                await self._service.make_again(self._exchange)
                await self._service.link.call(call)

    async def _listen(self, place: Place, inbox: "asyncio.Queue[list[Received]]") -> None:
        """Pull broadcasts into the inbox, through lost connections.

        A broadcast is acknowledged before it is read: one that makes its reader fail does not come again.
        """
        backoff = Backoff()
        while True:
            try:
                found = await self._service.pull(place.subscription, AT_ONCE, waits=True)
                if found:
                    ids = [message.ack_id for message in found]
                    await self._service.acknowledge(place.subscription, ids)
            except BrokerError as error:
                self._watch.lost(str(error))
                await backoff.pause()
                if isinstance(error, NotFound):  # deleted, or expired while this machine slept
                    with suppress(BrokerError):
                        await self._make()
                continue
            backoff.reset()
            self._watch.restored()
            if found:
                await inbox.put(sorted(found, key=_order))

    def _read(self, received: Received) -> Broadcast | None:
        message = unseal(received.message.data).message
        key = received.message.attributes.get(ROUTING_KEY, message.routing_key)
        if not self._to_all and key not in self._keys:
            return None
        return Broadcast(self._exchange, "" if self._to_all else key, message.body, message.headers)


def _order(received: Received) -> tuple[str, int]:
    message, number = received.message, received.message.message_id
    is_number = number.isdecimal() and len(number) <= ID_DIGITS_MAX
    return message.published, int(number) if is_number else 0
