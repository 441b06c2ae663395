"""AmqpAsyncProducer: publishing from an event loop, confirmed on return, on one connection.

RabbitMQ cannot tell whether it has a message already. A connection that is cut before the confirmation
leaves the sender without an answer, so nothing is sent again by itself: it may be there, and then run twice.
"""

import asyncio
import os
from collections.abc import Sequence
from itertools import cycle

from umbel.brokers.amqp import outbox, topology
from umbel.brokers.amqp.capabilities import CAPABILITIES
from umbel.brokers.amqp.declared import TaskQueues
from umbel.brokers.amqp.link import Link, open_link
from umbel.brokers.amqp.location import Location, locations_from_url
from umbel.brokers.amqp.outbox import Post, entry, refusal
from umbel.brokers.amqp.publisher import Publisher
from umbel.brokers.amqp.records import QueueFact, encode_record
from umbel.brokers.amqp.refusals import blocked_by
from umbel.brokers.interface import Attempt, BrokerSettings, Capabilities
from umbel.clock import cluster_now
from umbel.errors import AccessRefused, BrokerUnavailable, NotSupported
from umbel.wire.message import Outgoing

HEARTBEAT_S = 30


class AmqpAsyncProducer:
    repeats = False

    def __init__(self, settings: BrokerSettings) -> None:
        self._timeout_s = settings.connect_timeout_s
        self._queues = TaskQueues(settings)
        self._locations = locations_from_url(settings.url)
        self._turns = cycle(self._locations)
        self._link: Link | None = None
        self._publisher: Publisher | None = None
        self._opening = asyncio.Lock()

    @property
    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    async def publish(self, batch: Sequence[Outgoing], attempt: Attempt) -> None:
        publisher = await self._ready()
        if self._link is not None and self._link.blocked:  # it reads nothing: what is written stays in memory
            raise blocked_by(self._link.location, self._link.blocked)
        posts = outbox.tasks(batch, self._queues, cluster_now())
        news = await _announcements(publisher, posts)
        attempt.is_out = True
        try:
            refused = await publisher.try_send([*news, *posts])
        except AccessRefused:  # the server's answer: of what goes straight to queues it has taken nothing
            attempt.is_out = any(post.exchange for post in posts)
            raise
        of_posts = {place - len(news): why for place, why in refused.items() if place >= len(news)}
        if of_posts:
            raise refusal(of_posts, posts)

    async def hold_unique(self, key: str, task_id: str, *, ttl_s: float) -> str:
        raise NotSupported(CAPABILITIES.reasons["unique"])

    async def release_unique(self, held: Sequence[tuple[str, str]]) -> None:
        raise NotSupported(CAPABILITIES.reasons["unique"])

    async def close(self) -> None:
        link, self._link, self._publisher = self._link, None, None
        if link is not None:
            await link.close()

    def abandon(self) -> None:
        self._link = self._publisher = None

    async def _ready(self) -> Publisher:
        if self._link is not None and self._link.error is None and self._publisher is not None:
            return self._publisher
        async with self._opening:
            if self._link is None or self._link.error is not None or self._publisher is None:
                self._link = await self._open()
                self._publisher = Publisher(self._link, may_repeat=False)
            return self._publisher

    async def _open(self) -> Link:
        error = BrokerUnavailable("no RabbitMQ address to connect to; set 'broker'")
        for location in [next(self._turns) for _ in self._locations]:
            try:
                return await self._open_at(location)
            except BrokerUnavailable as refused:
                error = refused
        raise error

    async def _open_at(self, location: Location) -> Link:
        name = f"umbel client {os.getpid()}"
        return await open_link(location, timeout_s=self._timeout_s, heartbeat_s=HEARTBEAT_S, name=name)


async def _announcements(publisher: Publisher, posts: Sequence[Post]) -> list[Post]:
    """Let task queues be known that this connection has not declared yet."""
    new = {
        post.queue.name
        for post in posts
        if post.queue is not None and post.queue.is_task and post.queue.name not in publisher.declared
    }
    if new:
        await publisher.need(topology.stream_of_facts())
    return [entry(topology.FACTS, encode_record(QueueFact(name))) for name in sorted(new)]
