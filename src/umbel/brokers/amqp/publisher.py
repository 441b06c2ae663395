"""Publisher: declares what is missing, publishes, and returns when the server has answered for all.

A message for a queue that was deleted since it was declared comes back; it is declared and sent
again, once. What the server refuses is reported by its place, so that the others count: a queue that
cannot be declared refuses its messages, and a full one (`reject-publish`) answers each.

A message to an exchange that was deleted, or over the server's size limit, closes its channel, and with it
goes the answer for others that were under way there. So each exchange has a channel of its own, and large
messages go alone. What was under way beside others when its channel was closed may have been accepted: who
may repeat it sends it again, alone, and then knows whom the refusal concerns; elsewhere it is `Undecided`.
"""

import asyncio
from collections.abc import Mapping, Sequence

from umbel.brokers.amqp import topology
from umbel.brokers.amqp.confirms import route_of, sent_of
from umbel.brokers.amqp.declared import mismatch
from umbel.brokers.amqp.frames import Incoming, encode_publish
from umbel.brokers.amqp.link import Channel, Link
from umbel.brokers.amqp.outbox import ALONE_BYTES, DELETED_AGAIN, Post, Refusals, refusal
from umbel.brokers.amqp.refusals import FULL, ChannelClosed, NotPermitted, Undecided
from umbel.brokers.amqp.topology import Call, Exchange, Queue
from umbel.brokers.refusals import unbound
from umbel.errors import BrokerRefused, WireError

ALONE, OTHERS = "alone", "others"  # channels; those of exchanges have a slash before their name
CHANNELS_MAX = 16


class Publisher:
    def __init__(self, link: Link, *, may_repeat: bool = True) -> None:
        self.declared: set[str] = set()
        self.exchanges: set[str] = set()
        self.peculiar: set[str] = set()  # queues that somebody made with arguments of their own
        self._link = link
        self._may_repeat = may_repeat
        self._channels: dict[str, Channel] = {}
        self._opening, self._alone = asyncio.Lock(), asyncio.Lock()
        self._declaring: dict[str, asyncio.Lock] = {}

    async def send(self, posts: Sequence[Post]) -> None:
        """Publish all of them; BrokerRefused if the server refused some."""
        if refused := await self.try_send(posts):
            raise refusal(refused, posts)

    async def try_send(self, posts: Sequence[Post]) -> Refusals:
        """Publish, and say which were refused."""
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
        for exchange, places in together.items():
            await self._publish_together(exchange, posts, places, refused)
        for place in alone:
            await self._publish_alone(posts, [place], refused)
        return refused

    async def _publish_together(
        self, exchange: str, posts: Sequence[Post], places: Sequence[int], refused: Refusals
    ) -> None:
        """Beside what others send to this exchange."""
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
        bad = await self._declare_missing([posts[place] for place in places])
        refused |= {place: bad[posts[place].needs] for place in places if posts[place].needs in bad}
        left = [place for place in places if place not in refused]
        for some in [left] if exchange else [[place] for place in left]:
            await self._publish_alone(posts, some, refused)

    async def _publish_alone(self, posts: Sequence[Post], places: Sequence[int], refused: Refusals) -> None:
        """What closes the channel is one of these: a single one, or for the same exchange."""
        if not places:
            return
        try:
            async with self._alone:
                await self._publish(ALONE, posts, places, refused)
        except ChannelClosed as error:
            self._raise_if_broadcast(error, posts[places[0]])
            refused |= dict.fromkeys(places, error.text)

    def _raise_if_broadcast(self, closed: ChannelClosed, post: Post) -> None:
        """Who sends one declares its exchange."""
        if post.exchange and post.via is None:
            raise closed from None

    async def declare(self, what: Queue | Exchange, *, exactly: bool = False) -> None:
        """Make it, or agree with what is there, unless it must be `exactly` so.

        A queue may have been made with other arguments, and an exchange of another kind still takes messages.
        One that is there is used by a user who may not make it.
        """
        channel = await self._link.channel()
        try:
            for answer in [channel.ask(method, *fields) for method, fields in what.calls()]:
                await channel.answer(answer)
        except ChannelClosed as refused:
            is_other = refused.code == ChannelClosed.PRECONDITION
            is_theirs = isinstance(refused, NotPermitted) and not refused.may_configure
            if exactly or not (is_other or is_theirs):
                why = mismatch(what.name, refused.text) if is_other else refused.text
                raise BrokerRefused(f"cannot declare {what.name!r}: {why or refused.text}") from None
            channel = await self._link.channel()
            method, fields = topology.passive(what.name) if isinstance(what, Queue) else what.passive()
            try:
                await channel.call(method, *fields)
            except ChannelClosed:
                if is_other:
                    raise
                raise BrokerRefused(f"cannot declare {what.name!r}: {refused.text}") from None
            self.peculiar.add(what.name)
        await channel.close()
        (self.declared if isinstance(what, Queue) else self.exchanges).add(what.name)

    async def need(self, what: Queue | Exchange) -> None:
        """Declare it unless that was done; who needs the same meanwhile waits for it."""
        known, name = (
            self.declared if isinstance(what, Queue) else self.exchanges,
            str(type(what)) + what.name,
        )
        async with self._declaring.setdefault(name, asyncio.Lock()):
            try:
                if what.name not in known:
                    await self.declare(what)
            finally:
                self._declaring.pop(name, None)

    async def make(self, what: str, calls: Sequence[Call]) -> None:
        """Declare and bind several things at once."""
        channel = await self._link.channel()
        try:
            for answer in [channel.ask(method, *fields) for method, fields in calls]:
                await channel.answer(answer)
        except ChannelClosed as refused:
            raise BrokerRefused(f"cannot declare {what}: {refused.text}") from None
        await channel.close()

    def forget_declared(self) -> None:
        """Things were deleted: what is needed is declared again."""
        self.declared.clear()
        self.exchanges.clear()

    async def _declare_missing(self, posts: Sequence[Post]) -> dict[str, str]:
        """What cannot be declared, by the names of queues and exchanges, and why."""
        refused: dict[str, str] = {}
        for post in posts:
            what: Queue | Exchange | None = post.via if post.queue is None else post.queue
            if what is None:
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
        channel = await self._open_channel(name)
        frames: dict[int, bytes] = {}
        for place in places:
            try:
                frames[place] = posts[place].frames(channel.number)
            except WireError as error:  # a name that is too long
                refused[place] = str(error)
        sent = list(frames)
        done = await channel.publish(frames.values(), lambda: [posts[place].sent for place in sent])
        for nacked in done.refused:
            refused[sent[nacked]] = FULL
        if done.returned:
            refused |= await self._send_again(name, done.returned, {place: posts[place] for place in sent})

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

    async def _send_again(
        self, name: str, returned: Sequence[Incoming], posts: Mapping[int, Post]
    ) -> Refusals:
        """Declare the queues that are missing and send what was for them; why the others go nowhere."""
        routes = {route_of(one) for one in returned}
        unroutable = {route for route in routes if route[0]}
        again = [one for one in returned if not route_of(one)[0]]
        wanted = {post.key: post.queue for post in posts.values()}
        for _, key in routes - unroutable:
            self.declared.discard(key)
            if (queue := wanted.get(key)) is not None:
                await self.declare(queue)
        channel = await self._open_channel(name)
        done = await channel.publish(
            (encode_publish(channel.number, *sent_of(one), mandatory=True) for one in again),
            lambda: map(sent_of, again),
        )
        lost = {route_of(one) for one in done.returned}
        return {
            place: unbound(*post.route) if post.route in unroutable else DELETED_AGAIN
            for place, post in posts.items()
            if post.route in unroutable or post.route in lost
        }
