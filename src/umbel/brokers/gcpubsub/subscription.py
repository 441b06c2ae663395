"""Fan-out: a subscription for each listener, removed when it leaves and by Pub/Sub a day after its process
died.

Requests go to a topic that every node has a subscription of. Replies go to one topic with the asker's id
as their routing key; an emulator ignores the filter of a subscription, so it is compared here again.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from uuid import uuid4

from umbel.brokers.gcpubsub import api
from umbel.brokers.gcpubsub.api import Received
from umbel.brokers.gcpubsub.names import ROUTING_KEY, Place, checked
from umbel.brokers.gcpubsub.refusals import Missing
from umbel.brokers.gcpubsub.service import Service
from umbel.brokers.interface import Broadcast
from umbel.brokers.links import LinkWatch, link_of
from umbel.chance import random
from umbel.errors import BrokerError
from umbel.protocol.outage import LinkChange
from umbel.protocol.retry import reconnect_wait_s
from umbel.wire.control import REQUEST_EXCHANGE
from umbel.wire.envelope_redis import unseal

ACK_DEADLINE_S = 10
AT_ONCE = 100


class PubsubSubscription:
    def __init__(
        self,
        service: Service,
        exchange: str,
        patterns: Sequence[str],
        *,
        expires_s: float,
        on_link: Callable[[LinkChange], None],
    ) -> None:
        self._service = service
        self._exchange = exchange
        self._keys = frozenset(patterns)
        self._to_all = exchange == REQUEST_EXCHANGE
        self._expires_s = expires_s
        self._watch = LinkWatch(link_of(exchange), on_link)
        self._places = [self._place(pattern) for pattern in patterns]

    def _place(self, pattern: str) -> Place:
        name = self._service.names.subscription(f"{pattern}.{self._exchange}")
        if self._to_all:
            name = f"{name}-{uuid4()}"
        return Place(pattern, self._exchange, pattern, checked(name, pattern))

    async def enter(self) -> None:
        retention_s = float(api.FAN_OUT_RETENTION_S)
        for place in self._places:
            await self._service.make_topic(self._exchange, self._expires_s)
            call = api.make_subscription(
                self._service.project,
                place,
                ack_deadline_s=ACK_DEADLINE_S,
                retention_s=retention_s,
                expires_s=self._expires_s,
                is_filtered=not self._to_all,
            )
            try:
                await self._service.link.call(call)
            except Missing:  # the topic was deleted by somebody
                self._service.topology.forget(self._exchange)
                await self._service.make_topic(self._exchange, self._expires_s)
                await self._service.link.call(call)

    async def leave(self) -> None:
        for place in self._places:
            with suppress(BrokerError):
                await self._service.link.call(api.remove(self._service.project, place.subscription))

    async def __aiter__(self) -> AsyncIterator[Broadcast]:
        heard: asyncio.Queue[list[Received]] = asyncio.Queue(maxsize=1)
        listeners = [asyncio.create_task(self._listen(place, heard)) for place in self._places]
        try:
            while True:
                for one in await heard.get():
                    if (broadcast := self._read(one)) is not None:
                        yield broadcast
        finally:
            for listener in listeners:
                listener.cancel()

    async def _listen(self, place: Place, heard: "asyncio.Queue[list[Received]]") -> None:
        failures = 0
        while True:
            try:
                found = await self._service.pull(place.subscription, AT_ONCE, waits=True)
                if found:
                    ids = [one.ack_id for one in found]
                    await self._service.acknowledge(place.subscription, ids)
            except BrokerError as error:
                failures += 1
                self._watch.lost(str(error))
                await asyncio.sleep(reconnect_wait_s(failures, random()))
                if isinstance(error, Missing):  # deleted, or expired while this machine slept
                    with suppress(BrokerError):
                        await self.enter()
                continue
            failures = 0
            self._watch.restored()
            if found:
                await heard.put(sorted(found, key=_order))

    def _read(self, one: Received) -> Broadcast | None:
        message = unseal(one.data).message
        key = one.attributes.get(ROUTING_KEY, message.routing_key)
        if not self._to_all and key not in self._keys:
            return None
        return Broadcast(self._exchange, "" if self._to_all else key, message.body, message.headers)


def _order(one: Received) -> tuple[str, int]:
    return one.published, int(one.message_id) if one.message_id.isdecimal() else 0
