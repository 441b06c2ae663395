"""Publisher: declares missing queues, publishes, and returns when the server has answered for all messages.

The server returns a message for a queue that was deleted since it was declared. The queue is then declared
and the message sent again, once. Refused messages are reported by their places, so that the others count: a
queue that cannot be declared refuses its messages, and a full one (`reject-publish`) refuses each. A message
to a deleted exchange, or over the server's size limit, closes its channel; all that is unconfirmed on the
channel is published again without the cause.

`AmqpAsyncProducer` publishes with it from any event loop. RabbitMQ cannot tell whether it has a message
already. If the connection is cut before the confirmation, the producer does not send the messages again by
itself: they may have arrived, and would run twice. If the caller sends them again, they are not written twice
on one connection, and are flagged as redelivered on another (`Unanswered`).
"""

import asyncio
import os
from collections.abc import Collection, Sequence

from umbel.brokers.amqp import publishing, topology
from umbel.brokers.amqp.confirms import Unanswered
from umbel.brokers.amqp.handshake import (
    FULL,
    Addresses,
    CannotDeclare,
    ChannelClosed,
    Location,
    NotPermitted,
    Undecided,
    blocked_by,
)
from umbel.brokers.amqp.link import Channel, Link, open_link
from umbel.brokers.amqp.publishing import ALONE_BYTES, DELETED_AGAIN, Post, Refusals, entry, refusal
from umbel.brokers.amqp.streams import QueueFact, encode_record
from umbel.brokers.amqp.topology import CAPABILITIES, Call, Exchange, Queue, TaskQueues, mismatch
from umbel.brokers.interface import Attempt, BrokerSettings
from umbel.brokers.refusals import unbound, unsupported
from umbel.clock import cluster_now
from umbel.errors import AccessRefused, BrokerError, BrokerRefused, WireError
from umbel.wire.message import Outgoing

# ---- publisher -------------------------------------------------------------------------------------

# Names of channels. The channel of an exchange is named by a slash and the exchange.
ALONE, OTHERS = "alone", "others"
CHANNELS_MAX = 16


class Publisher:
    """Publishes on one connection. `unanswered` outlives the connection: it belongs to the owner of all
    sends.

    If a message makes the server close its channel, the answers for other messages in flight there are lost.
    So each exchange has a separate channel, and large messages go alone. The server may have accepted
    messages that were in flight with the cause. With `may_repeat` they are sent again, each alone, which
    shows which one is refused; otherwise the error is `Undecided`.

    Nothing is written to a server that has announced a resource alarm. Messages that were written and have no
    answer are not written again on the same connection.
    """

    def __init__(self, link: Link, unanswered: Unanswered[Channel], *, may_repeat: bool = True) -> None:
        self.declared: set[str] = set()
        self.exchanges: set[str] = set()
        self.differing: set[str] = set()  # queues that exist with other arguments than ours
        self._link = link
        self._unanswered = unanswered
        self._may_repeat = may_repeat
        self._channels: dict[str, Channel] = {}
        self._opening, self._alone = asyncio.Lock(), asyncio.Lock()
        self._declaring: dict[str, asyncio.Lock] = {}

    @property
    def is_blocked(self) -> bool:
        """Whether the server has announced a resource alarm, and accepts no messages now."""
        return bool(self._link.blocked)

    async def send(self, posts: Sequence[Post]) -> None:
        """Publish all posts; raise BrokerRefused if the server refused some."""
        if refused := await self.try_send(posts):
            raise refusal(refused, posts)

    async def try_send(self, posts: Sequence[Post]) -> Refusals:
        """Publish, and return which posts were refused and why."""
        if posts and self._link.blocked:
            raise blocked_by(self._link.location, self._link.blocked)
        refused: Refusals = {}
        bad = await self._declare_missing(posts)
        together, alone = dict[str, list[int]](), list[int]()
        for place, post in enumerate(posts):
            if bad and (problem := bad.get(post.needs)):
                refused[place] = problem
            elif len(post.body) > ALONE_BYTES:
                alone.append(place)
            else:
                together.setdefault(post.exchange, []).append(place)
        answered: list[int] = []
        try:
            for exchange, places in together.items():
                await self._publish_together(exchange, posts, places, refused)
                answered += places
            for place in alone:
                await self._publish_alone(posts, [place], refused)
                answered.append(place)
        except BaseException:
            self._unanswered.add_accepted([posts[place] for place in answered if place not in refused])
            raise
        if self._unanswered.given_up:
            self._unanswered.forget(posts)
        return refused

    async def announce_and_try_send(self, posts: Sequence[Post], known: Collection[str] = ()) -> Refusals:
        """Publish, and return which posts were refused and why. Task queues that were not declared here yet
        are announced to all nodes first, unless they are `known`.
        """
        new = {
            post.queue.name
            for post in posts
            if post.queue is not None and post.queue.is_task and post.queue.name not in self.declared
        }.difference(known)
        if not new:
            return await self.try_send(posts)
        await self.need(topology.stream_of_facts())
        news = [entry(topology.FACTS, encode_record(QueueFact(name))) for name in sorted(new)]
        refused = await self.try_send([*news, *posts])
        return {place - len(news): why for place, why in refused.items() if place >= len(news)}

    async def _publish_together(
        self, exchange: str, posts: Sequence[Post], places: Sequence[int], refused: Refusals
    ) -> None:
        """Publish on the channel that other senders to this exchange use too."""
        try:
            return await self._publish(self._channel_for(exchange), posts, places, refused)
        except Undecided as error:
            closed, is_theirs = error.closed, False
        except ChannelClosed as error:
            closed, is_theirs = error, bool(exchange) or len(places) == 1
            self._raise_if_broadcast(closed, posts[places[0]])
        is_gone = closed.code == ChannelClosed.NOT_FOUND
        if is_gone:
            self.exchanges.clear()
        if is_theirs:  # the server has accepted none of them
            self._unanswered.forget([posts[place] for place in places])
        if is_theirs and not is_gone:
            refused |= dict.fromkeys(places, closed.text)
        elif is_theirs or self._may_repeat:
            await self._repeat(exchange, posts, places, refused)
        else:
            raise Undecided(closed)
        return None

    async def _repeat(
        self, exchange: str, posts: Sequence[Post], places: Sequence[int], refused: Refusals
    ) -> None:
        """Publish again the messages that were in flight when the channel closed, so that only the cause is
        refused.
        """
        bad = await self._declare_missing([posts[place] for place in places])
        refused |= {place: bad[posts[place].needs] for place in places if posts[place].needs in bad}
        left = [place for place in places if place not in refused]
        for some in [left] if exchange else [[place] for place in left]:
            await self._publish_alone(posts, some, refused)

    async def _publish_alone(self, posts: Sequence[Post], places: Sequence[int], refused: Refusals) -> None:
        """Publish one message, or messages for one exchange: if the channel closes, one of these is the
        cause.
        """
        if not places:
            return
        try:
            async with self._alone:
                await self._publish(ALONE, posts, places, refused)
        except ChannelClosed as error:
            self._raise_if_broadcast(error, posts[places[0]])
            refused |= dict.fromkeys(places, error.text)
            self._unanswered.forget([posts[place] for place in places])

    def _raise_if_broadcast(self, closed: ChannelClosed, post: Post) -> None:
        """Raise the error to the sender of a broadcast, which declares the exchange itself."""
        if post.exchange and post.via is None:
            raise closed from None

    async def declare(self, what: Queue | Exchange, *, exactly: bool = False) -> None:
        """Create it. If it exists with other arguments, use it so, unless it must be `exactly` so.

        An exchange of another kind still takes messages. A user who may not create queues and exchanges can
        still use existing ones.
        """
        try:
            await self._link.run(*what.calls())
        except ChannelClosed as refused:
            is_other = refused.code == ChannelClosed.PRECONDITION
            is_theirs = isinstance(refused, NotPermitted) and not refused.may_configure
            if exactly or not (is_other or is_theirs):
                why = mismatch(what.name, refused.text) if is_other else ""
                raise CannotDeclare(repr(what.name), refused, why) from None
            try:
                await self._link.run(
                    topology.passive(what.name) if isinstance(what, Queue) else what.passive()
                )
            except ChannelClosed:
                if is_other:
                    raise
                raise CannotDeclare(repr(what.name), refused) from None
            self.differing.add(what.name)
        (self.declared if isinstance(what, Queue) else self.exchanges).add(what.name)

    async def need(self, what: Queue | Exchange) -> None:
        """Declare it unless that was done; callers that need the same meanwhile wait for it."""
        known = self.declared if isinstance(what, Queue) else self.exchanges
        name = str(type(what)) + what.name
        async with self._declaring.setdefault(name, asyncio.Lock()):
            try:
                if what.name not in known:
                    await self.declare(what)
            finally:
                self._declaring.pop(name, None)

    async def make(self, what: str, calls: Sequence[Call]) -> None:
        """Declare and bind several things at once; raise CannotDeclare."""
        try:
            await self._link.run(*calls)
        except ChannelClosed as refused:
            raise CannotDeclare(what, refused) from None

    def forget_declared(self) -> None:
        """Forget which queues and exchanges exist, because some were deleted."""
        self.declared.clear()
        self.exchanges.clear()

    async def _declare_missing(self, posts: Sequence[Post]) -> dict[str, str]:
        """Declare missing queues and exchanges; return why some cannot be declared, by `Post.needs`."""
        refused: dict[str, str] = {}
        for post in posts:
            what: Queue | Exchange | None = post.via if post.queue is None else post.queue
            if what is None:
                continue
            if isinstance(what, Queue) and what.reserved:
                refused[post.needs] = what.reserved
                continue
            known = self.declared if isinstance(what, Queue) else self.exchanges
            if what.name not in known and post.needs not in refused:
                try:
                    await self.need(what)
                except (BrokerRefused, WireError) as error:
                    refused[post.needs] = str(error)
        return refused

    async def _publish(
        self, name: str, posts: Sequence[Post], places: Sequence[int], refused: Refusals
    ) -> None:
        wanted = {place: posts[place] for place in places}
        to_send = await self._not_answered(wanted, refused) if self._unanswered.given_up else wanted
        if returned := await self._write(name, to_send, refused):
            await self._send_again(name, returned, refused)
        if self._unanswered.given_up:
            self._unanswered.add_accepted([post for place, post in wanted.items() if place not in refused])

    async def _not_answered(self, wanted: dict[int, Post], refused: Refusals) -> dict[int, Post]:
        """Wait for the answers to earlier sends of these messages; return the messages that must still be
        sent.
        """
        posts, places = [*wanted.values()], [*wanted]
        for batch, channel in self._unanswered.under_way(posts):
            try:
                await channel.answered(batch)
            except BrokerError:
                if batch.is_under_way:
                    raise
        plan = self._unanswered.plan(posts)
        refused |= {places[number]: FULL for number in plan.refused}
        return {places[number]: post for number, post in plan.to_send.items()}

    async def _write(self, name: str, posts: dict[int, Post], refused: Refusals) -> dict[int, Post]:
        """Publish these on one channel; return those that no queue took."""
        channel = await self._open_channel(name)
        frames: dict[int, bytes] = {}
        for place, post in posts.items():
            try:
                frames[place] = post.frames(channel.number)
            except WireError as error:  # a name that is too long
                refused[place] = str(error)
        sent = [posts[place] for place in frames]
        batch = channel.publish([*frames.values()], lambda: [post.sent for post in sent])
        try:
            await channel.answered(batch)
        except BaseException:
            self._unanswered.add(sent, batch, channel)
            raise
        places = [*frames]
        for nacked in batch.refused:
            refused[places[nacked]] = FULL
        if batch.returned:  # accepted ones are not sent again, even if a later step fails
            self._unanswered.add(sent, batch, channel)
        return {places[number]: sent[number] for number in batch.returned}

    async def _send_again(self, name: str, returned: dict[int, Post], refused: Refusals) -> None:
        """Declare the missing queues and send their messages again; the others are refused."""
        again: dict[int, Post] = {}
        for place, post in returned.items():
            if post.exchange:
                refused[place] = unbound(*post.route)
                continue
            again[place] = post
        for queue in {post.key: post.queue for post in again.values()}.values():
            if queue is not None:
                self.declared.discard(queue.name)
                await self.declare(queue)
        refused |= dict.fromkeys(await self._write(name, again, refused) if again else (), DELETED_AGAIN)

    def _channel_for(self, exchange: str) -> str:
        name = f"/{exchange}"
        return name if name in self._channels or len(self._channels) < CHANNELS_MAX else OTHERS

    async def _open_channel(self, name: str) -> Channel:
        if (channel := self._channels.get(name)) is not None and channel.error is None:
            return channel
        async with self._opening:
            channel = self._channels.get(name)
            if channel is None or channel.error is not None:
                channel = self._channels[name] = await self._link.channel(confirms=True)
        return channel


# ---- amqp async producer ---------------------------------------------------------------------------

HEARTBEAT_S = 30


class AmqpAsyncProducer:
    """The producer for asyncio applications, on one connection."""

    repeats = False
    capabilities = CAPABILITIES
    hold_unique = release_unique = unsupported(CAPABILITIES.reasons["unique"])

    def __init__(self, settings: BrokerSettings) -> None:
        self._timeout_s = settings.connect_timeout_s
        self._queues = TaskQueues(settings)
        self._addresses = Addresses(settings.url)
        self._unanswered: Unanswered[Channel] = Unanswered()
        self._link: Link | None = None
        self._publisher: Publisher | None = None
        self._opening = asyncio.Lock()

    async def publish(self, batch: Sequence[Outgoing], attempt: Attempt) -> None:
        """Send task messages, confirmed on return. After an error, `attempt.is_out` tells whether some may
        have arrived.
        """
        publisher = await self._ready()
        posts = publishing.sendable_tasks(batch, self._queues, cluster_now())
        try:
            refused = await publisher.announce_and_try_send(posts)
        except AccessRefused:  # the server's answer: it accepted nothing of what goes straight to queues
            attempt.is_out = any(post.exchange for post in posts)
            raise
        except BaseException:
            attempt.is_out = self._unanswered.may_have_arrived(posts)
            raise
        if refused:
            raise refusal(refused, posts)

    async def close(self) -> None:
        """Close the connection; the next send opens another."""
        link, self._link, self._publisher = self._link, None, None
        if link is not None:
            await link.close()

    def abandon(self) -> None:
        """Forget the connection, whose event loop is closed."""
        self._link = self._publisher = None

    async def _ready(self) -> Publisher:
        if self._link is not None and self._link.error is None and self._publisher is not None:
            return self._publisher
        async with self._opening:
            if self._link is None or self._link.error is not None or self._publisher is None:
                self._link = await self._addresses.connected(self._open_at)
                self._publisher = Publisher(self._link, self._unanswered, may_repeat=False)
            return self._publisher

    async def _open_at(self, location: Location) -> Link:
        name = f"umbel client {os.getpid()}"
        return await open_link(location, timeout_s=self._timeout_s, heartbeat_s=HEARTBEAT_S, name=name)
