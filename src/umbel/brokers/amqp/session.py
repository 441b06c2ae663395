"""Session: everything of a broker that lives and dies with its connection.

That is two: one consumes and asks, the other publishes. A server that is short of memory or disk stops to
read from those that publish; acknowledgements must not wait behind that. When one ends, so does the other.

`Sessions` hands out the one that lives and opens the next when it has died: what was claimed on
the old connection is then RabbitMQ's again, and the views go on reading where they stopped. Unless the
server lost what it had: then nobody else knows what was claimed, and `Sessions` remembers that.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import cycle

from umbel.brokers.amqp import topology
from umbel.brokers.amqp.claims import Claims
from umbel.brokers.amqp.declared import DELAY_DELIVERY, TaskQueues
from umbel.brokers.amqp.frames import Method
from umbel.brokers.amqp.link import Link, open_link
from umbel.brokers.amqp.location import Location, locations_from_url
from umbel.brokers.amqp.outbox import Post, Refusals, entry, refusal
from umbel.brokers.amqp.publisher import Publisher
from umbel.brokers.amqp.records import (
    ClockView,
    FactsView,
    QueueFact,
    RevokeView,
    SignaturesView,
    StartsView,
    encode_record,
)
from umbel.brokers.amqp.refusals import ChannelClosed, QueueRefused
from umbel.brokers.amqp.streams import Followed, Tails
from umbel.brokers.interface import BrokerSettings, Replaced, Tag
from umbel.brokers.links import MAIN, LinkWatch, unheard
from umbel.errors import BrokerError, BrokerRefused, BrokerUnavailable
from umbel.protocol.outage import LinkChange

log = logging.getLogger("umbel.brokers.amqp")
PROBES_AT_ONCE = 8
HEARTBEAT_S = 30
RECOGNISE_S, LOOK_AGAIN_S = 1.0, 0.01
# A quorum queue that looks like any other (the virtual host's default), or RabbitMQ after 4.
_LIMIT_REFUSED = "global qos"


class Views:
    """What this broker has read from the streams."""

    def __init__(self, *, remembers_signatures: bool = False) -> None:
        self.revokes, self.starts, self.facts, self.clock = (
            RevokeView(),
            StartsView(),
            FactsView(),
            ClockView(),
        )
        self.signatures = SignaturesView()
        self.followed: Mapping[str, Followed] = {
            topology.REVOKES: Followed(self.revokes),
            topology.STARTS: Followed(self.starts),
            topology.FACTS: Followed(self.facts),
            topology.CLOCK: Followed(self.clock),
            **({topology.SIGNATURES: Followed(self.signatures)} if remembers_signatures else {}),
        }


class Session:
    """`on_deleted`: a queue went with these claims. `on_lost`: these streams are other ones than before."""

    def __init__(
        self,
        link: Link,
        outgoing: Link,
        views: Views,
        settings: BrokerSettings,
        queues: TaskQueues,
        *,
        on_deleted: Callable[[str, set[Tag]], None],
        on_lost: Callable[[Sequence[str]], None],
        channel_limits: bool = True,
    ) -> None:
        self.link = link
        self._outgoing = outgoing
        outgoing.on_end = link.end
        self.queues = queues
        self._on_lost = on_lost
        self.publisher = Publisher(outgoing)
        self.claims = Claims(
            link,
            settings.lease_s,
            starts_of=views.starts.count,
            prefetch_floor=settings.prefetch_floor,
            needs_own_limit=lambda queue: (
                not channel_limits or queue in self.publisher.peculiar or queues.limits_each_consumer(queue)
            ),
            on_deleted=on_deleted,
        )
        self.views = views
        views.facts.on_pause = self.claims.wake
        self._settings = settings
        self._tails: Tails | None = None
        self._beginning = asyncio.Lock()

    async def begin(self) -> None:
        async with self._beginning:
            if self._tails is not None and not self._tails.ended:
                return
            self.publisher.forget_declared()  # what else is gone is not known
            # At once: a server that has none of them yet takes its time for each.
            await asyncio.gather(*map(self.publisher.declare, topology.streams(self._settings)))
            tails = await self._new_tails()
            if tails.strange:
                await tails.close()
                tails = await self._anew(tails.strange)
            self._tails = tails

    async def catch_up(self) -> None:
        assert self._tails is not None
        if self._tails.ended:  # a stream was deleted or changed its leader: the claims on the link live on
            await self.begin()
        await self._tails.catch_up()

    async def send(self, posts: Sequence[Post]) -> None:
        if refused := await self.try_send(posts):
            raise refusal(refused, posts)

    async def try_send(self, posts: Sequence[Post]) -> Refusals:
        """Publish, let new queues be known, and say which messages were refused."""
        news = self._announcements(posts)
        refused = await self.publisher.try_send([*news, *posts])
        return {place - len(news): why for place, why in refused.items() if place >= len(news)}

    async def make_queue(self, name: str) -> None:
        """The queue is there, and is known to those who list queues."""
        if name not in self.publisher.declared:
            try:
                await self.publisher.declare(self.queues.queue(name), exactly=self.queues.is_declared(name))
                if self.queues.needs_ladder:
                    await self._join_ladder(name)
            except BrokerRefused as refused:
                raise QueueRefused(name, refused) from None
        if name not in self.views.facts.queues:
            await self.publisher.send([entry(topology.FACTS, encode_record(QueueFact(name)))])

    async def close(self) -> None:
        await asyncio.gather(self.link.close(), self._outgoing.close())

    async def _join_ladder(self, name: str) -> None:
        """Let messages come that Celery's clients send to the ladder of delays."""
        if DELAY_DELIVERY.name not in self.publisher.exchanges:
            await self.publisher.make("Celery's queues for delays", self.queues.ladder())
            self.publisher.exchanges.add(DELAY_DELIVERY.name)
        if calls := self.queues.ladder_bindings(name):
            await self.publisher.make(f"the delays of the queue {name!r}", calls)

    async def counts(self, names: Sequence[str]) -> dict[str, int]:
        """How many messages wait in each of these queues; those that are not there are left out."""
        found: dict[str, int] = {}
        gate = asyncio.Semaphore(PROBES_AT_ONCE)

        async def probe(name: str) -> None:
            async with gate:
                channel = await self.link.channel()
                method, fields = topology.passive(name)
                try:
                    found[name] = (await channel.call(method, *fields)).fields[1]
                    await channel.close()
                except ChannelClosed as refused:
                    if refused.code not in (ChannelClosed.NOT_FOUND, ChannelClosed.LOCKED):
                        raise

        await asyncio.gather(*map(probe, names))
        return found

    async def look_at(self, queue: str) -> tuple[int, int]:
        """How many messages wait in the queue, which is there, and how many consume it."""
        channel = await self.link.channel()
        method, fields = topology.passive(queue)
        _, waiting, consumers = (await channel.call(method, *fields)).fields
        await channel.close()
        return waiting, consumers

    async def purge(self, queue: str) -> int:
        channel = await self.link.channel()
        count: int = (await channel.call(Method.QUEUE_PURGE, 0, queue, False)).fields[0]
        await channel.close()
        return count

    async def _new_tails(self) -> Tails:
        tails = Tails(await self.link.channel(), self.views.followed)
        await tails.begin()
        loop = asyncio.get_running_loop()
        ends = loop.time() + RECOGNISE_S
        while tails.strange and loop.time() < ends:
            await asyncio.sleep(LOOK_AGAIN_S)
            await tails.catch_up()
        return tails

    async def _anew(self, lost: Sequence[str]) -> Tails:
        """The server lost what it had, as one does whose disk was not kept: read from the beginning."""
        log.warning("RabbitMQ lost cluster records; reading them again", extra={"streams": ",".join(lost)})
        for stream in lost:
            self.views.followed[stream].begin_anew()
        tails = await self._new_tails()
        self._on_lost(lost)
        return tails

    def _announcements(self, posts: Sequence[Post]) -> list[Post]:
        known, declared = self.views.facts.queues, self.publisher.declared
        new = {
            post.queue.name
            for post in posts
            if post.queue is not None and post.queue.name not in declared and post.queue.is_task
        }
        return [entry(topology.FACTS, encode_record(QueueFact(name))) for name in new - known]


class Sessions:
    """The session that lives; opened when it is asked for."""

    def __init__(
        self,
        settings: BrokerSettings,
        name: str,
        on_replaced: Callable[[Replaced], None] = lambda _: None,
        on_link: Callable[[LinkChange], None] = unheard,
    ) -> None:
        self.on_link = on_link
        self.unknown: set[Tag] = set()  # claims that went with their queue, and are not settled
        self._on_replaced = on_replaced
        self.views = Views(remembers_signatures=settings.remembers_signatures)
        self.locations = locations_from_url(settings.url)
        self._settings = settings
        self._queues = TaskQueues(settings)
        self._name = name
        self._turns = cycle(self.locations)
        self._session: Session | None = None
        self._opening = asyncio.Lock()
        self._watch = LinkWatch(MAIN, on_link, ends_claims=True)
        self._closed = False
        self._channel_limits = True

    @property
    def alive(self) -> Session | None:
        session = self._session
        return session if session is not None and session.link.error is None else None

    async def get(self) -> Session:
        session = self._session
        if session is not None and session.link.error is None:
            return session
        async with self._opening:
            if self.alive is None:
                if self._closed:
                    raise BrokerUnavailable(
                        "this process has already closed its broker connection, at shutdown or by close(); "
                        "nothing more can be sent or fetched with it"
                    )
                if session is not None and _LIMIT_REFUSED in str(session.link.error):
                    self._channel_limits = False
                self._session = await self._open()
                self._watch.restored()
            assert self._session is not None
            return self._session

    def _note_ended(self, outgoing: Link, error: BrokerError) -> None:
        outgoing.end(error)
        if not self._closed:
            self._watch.lost(str(error))

    def _deleted(self, queue: str, claimed: set[Tag]) -> None:
        self.unknown |= claimed
        self._on_replaced(Replaced(f"the queue {queue!r} was deleted", len(self.unknown)))

    def _lost(self, streams: Sequence[str]) -> None:
        """While another connection is made, the last session still has what was claimed on the old one."""
        if self._session is not None and self._session.link.error is not None and topology.FACTS in streams:
            self.unknown |= self._session.claims.standing.keys()
        self._on_replaced(Replaced(f"the streams {', '.join(streams)} were deleted", len(self.unknown)))

    async def close(self) -> None:
        self._closed = True
        if self._session is not None:
            await self._session.close()

    async def _open(self) -> Session:
        error = BrokerUnavailable("no RabbitMQ address to connect to; set 'broker'")
        for location in [next(self._turns) for _ in self.locations]:
            try:
                return await self._open_at(location)
            except BrokerUnavailable as refused:
                error = refused
        raise error

    async def _open_at(self, location: Location) -> Session:
        # The claims are of the one connection, so that one tells the server that we live.
        link = await self._open_link(location, self._name, max(1, round(self._settings.lease_s / 2)))
        try:
            outgoing = await self._open_link(location, f"{self._name} (sending)", HEARTBEAT_S)
        except BaseException:
            link.abort("set-up failed")
            raise
        session = Session(
            link,
            outgoing,
            self.views,
            self._settings,
            self._queues,
            on_deleted=self._deleted,
            on_lost=self._lost,
            channel_limits=self._channel_limits,
        )
        try:
            await session.begin()
        except BaseException:
            link.abort("set-up failed")
            outgoing.abort("set-up failed")
            raise
        link.on_end = partial(self._note_ended, outgoing)
        if link.error is not None:  # meanwhile
            raise link.error
        return session

    async def _open_link(self, location: Location, name: str, heartbeat_s: int) -> Link:
        timeout_s = self._settings.connect_timeout_s
        return await open_link(location, timeout_s=timeout_s, heartbeat_s=heartbeat_s, name=name)
