"""Service: what the asynchronous face asks of Pub/Sub, in whole steps."""

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from umbel.brokers.gcpubsub import api, posts
from umbel.brokers.gcpubsub.address import address_from_url
from umbel.brokers.gcpubsub.api import Received
from umbel.brokers.gcpubsub.link import REPLY_S, Link
from umbel.brokers.gcpubsub.names import DEAD, Names
from umbel.brokers.gcpubsub.posts import Post
from umbel.brokers.gcpubsub.refusals import AcksRefused, Missing
from umbel.brokers.gcpubsub.tokens import Tokens
from umbel.brokers.gcpubsub.topology import Calls, Topology, next_of
from umbel.brokers.interface import BrokerSettings
from umbel.brokers.refusals import unbound
from umbel.errors import BrokerRefused, BrokerSilent
from umbel.wire.message import Outgoing

PULL_S = 120.0  # Pub/Sub ends an idle pull earlier
ACK_ATTEMPTS = 3
_AT_ONCE = 8


class Service:
    def __init__(self, settings: BrokerSettings) -> None:
        self.address = address_from_url(settings.url)
        self.project = self.address.project
        self.link = Link(self.address, Tokens(self.address), connect_timeout_s=settings.connect_timeout_s)
        exactly_once = settings.exactly_once or self.address.exactly_once
        self.topology = Topology(settings, self.project, exactly_once=exactly_once)
        self._making = asyncio.Lock()

    @property
    def names(self) -> Names:
        return self.topology.names

    def close(self) -> None:
        self.link.close()

    # -- making ----------------------------------------------------------------------------------

    async def make_queue(self, queue: str) -> int:
        """The ack deadline of its subscription."""
        if queue not in self.topology.made:
            await self._make(self.topology.make_queue(queue))
        return self.topology.made[queue]

    async def make_dead(self) -> None:
        if DEAD not in self.topology.topics:
            await self._make(self.topology.make_dead())

    async def make_topic(self, topic: str, retention_s: float) -> None:
        if topic not in self.topology.topics:
            await self._make(self.topology.make_topic(topic, retention_s))

    async def _make(self, calls: Calls) -> None:
        async with self._making:
            answer: bytes | BrokerRefused | None = None
            while (call := next_of(calls, answer)) is not None:
                try:
                    answer = await self.link.call(call)
                except BrokerRefused as refused:
                    answer = refused

    # -- sending ---------------------------------------------------------------------------------

    async def make_for(self, batch: Sequence[Outgoing]) -> dict[int, str]:
        """See to it that the queues are there; by their places, why some cannot be."""
        refused: dict[int, str] = {}
        problems: dict[str, str] = {}
        for place, one in enumerate(batch):
            if one.exchange or one.queue in self.topology.made:
                continue
            if one.queue not in problems:
                try:
                    await self.make_queue(one.queue)
                    continue
                except BrokerRefused as error:
                    problems[one.queue] = str(error)
            refused[place] = problems[one.queue]
        return refused

    async def try_send(self, sent: Sequence[Post]) -> dict[int, str]:
        """Send them; by their places, why some were refused."""
        refused: dict[int, str] = {}
        turns = asyncio.Semaphore(_AT_ONCE)

        async def send(places: list[int]) -> None:
            async with turns:
                why = await self._send([sent[place] for place in places])
            refused.update({places[nth]: text for nth, text in why.items()})

        await together([send(places) for places in posts.requests(sent)])
        return refused

    async def _send(self, sent: list[Post]) -> Mapping[int, str]:
        try:
            await self.link.call(api.publish(self.project, sent))
        except Missing:
            topic = sent[0].topic
            queues = [queue for queue in self.topology.made if self.names.place(queue).topic == topic]
            is_dead = topic == DEAD and DEAD in self.topology.topics
            self.topology.forget(topic)
            if not queues and not is_dead:
                return {place: _unbound(one) for place, one in enumerate(sent)}
            for queue in queues:  # deleted by somebody
                await self.make_queue(queue)
            if is_dead:
                await self.make_dead()
            await self.link.call(api.publish(self.project, sent))
        except BrokerRefused as refused:
            if len(sent) == 1:
                return {0: str(refused)}
            found: dict[int, str] = {}
            for place, one in enumerate(sent):  # which one is it?
                if why := await self._send([one]):
                    found[place] = why[0]
            return found
        return {}

    # -- receiving -------------------------------------------------------------------------------

    async def pull(self, subscription: str, count: int, *, waits: bool) -> list[Received]:
        call = api.pull(self.project, subscription, count, waits=waits)
        try:
            return api.read_pulled(await self.link.call(call, timeout_s=PULL_S if waits else REPLY_S))
        except BrokerSilent:
            if waits:
                return []
            raise

    async def acknowledge(self, subscription: str, ack_ids: Sequence[str]) -> frozenset[str]:
        """Those that came too late, as far as Pub/Sub says so: an exactly-once subscription does."""
        late: set[str] = set()
        for first in range(0, len(ack_ids), api.ACK_IDS_MAX):
            portion = ack_ids[first : first + api.ACK_IDS_MAX]
            for attempt in range(ACK_ATTEMPTS):
                try:
                    await self.link.call(api.acknowledge(self.project, subscription, portion))
                    break
                except AcksRefused as refused:
                    late |= refused.late
                    portion = [one for one in portion if one in refused.again]
                    if not portion or attempt == ACK_ATTEMPTS - 1:
                        late.update(portion)
                        break
        return frozenset(late)

    async def set_deadline(
        self, subscription: str, ack_ids: Sequence[str], deadline_s: int
    ) -> frozenset[str]:
        """Those that are lost already, as far as Pub/Sub says so."""
        late: set[str] = set()
        for first in range(0, len(ack_ids), api.ACK_IDS_MAX):
            portion = ack_ids[first : first + api.ACK_IDS_MAX]
            try:
                await self.link.call(api.set_deadline(self.project, subscription, portion, deadline_s))
            except AcksRefused as refused:
                late |= refused.late
        return frozenset(late)


async def together(work: Sequence[Coroutine[Any, Any, None]]) -> None:
    """All at once; the first error ends the others, and is raised as it is."""
    if len(work) == 1:
        await work[0]
        return
    try:
        async with asyncio.TaskGroup() as group:
            for one in work:
                group.create_task(one)
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from None


def _unbound(post: Post) -> str:
    return unbound(post.topic, post.attributes.get("routing_key", ""))
