"""Publisher: declares what is missing, publishes, and returns when the server has answered for all.

A message for a queue that was deleted since it was declared comes back; it is declared and sent
again, once. What the server refuses is reported by its place, so that the others count: a queue that
cannot be declared refuses its messages, a full one (`reject-publish`) answers each, and a message
over the server's size limit closes its channel, so large ones are sent alone.
"""

from collections.abc import Mapping, Sequence

from umbel.brokers.amqp import topology
from umbel.brokers.amqp.declared import mismatch
from umbel.brokers.amqp.frames import Incoming, encode_publish
from umbel.brokers.amqp.link import Channel, Link, route_of
from umbel.brokers.amqp.outbox import Post, Refusals, refusal
from umbel.brokers.amqp.refusals import FULL, ChannelClosed, closed_publish
from umbel.brokers.amqp.topology import Call, Exchange, Queue
from umbel.brokers.refusals import unbound
from umbel.errors import BrokerRefused, WireError

DELETED_AGAIN = "its queue was deleted twice while publishing"
ALONE_BYTES = 8 * 1024 * 1024  # the smallest limit that a RabbitMQ has by default is 16 MiB


class Publisher:
    def __init__(self, link: Link) -> None:
        self.declared: set[str] = set()
        self.exchanges: set[str] = set()
        self.peculiar: set[str] = set()  # queues that somebody made with arguments of their own
        self._link = link
        self._channel: Channel | None = None

    async def send(self, posts: Sequence[Post]) -> None:
        """Publish all of them; BrokerRefused if the server refused some."""
        if refused := await self.try_send(posts):
            raise refusal(refused, posts)

    async def try_send(self, posts: Sequence[Post]) -> Refusals:
        """Publish, and say which were refused."""
        if not posts:
            return {}
        try:
            return await self._try_send(posts)
        except ChannelClosed as error:
            if error.code == ChannelClosed.NOT_FOUND and any(post.via is not None for post in posts):
                self.exchanges.clear()  # one was deleted: what none of them took is sent again
                return await self._try_send(posts)
            raise closed_publish(self._link.location, error) from None

    async def _try_send(self, posts: Sequence[Post]) -> Refusals:
        refused: Refusals = {}
        bad = await self._declare_missing(posts)
        together, alone = list[int](), list[int]()
        for place, post in enumerate(posts):
            if bad and (problem := bad.get(post.needs)):
                refused[place] = problem
            else:
                (alone if len(post.body) > ALONE_BYTES else together).append(place)
        await self._publish(posts, together, refused)
        for place in alone:
            try:
                await self._publish(posts, [place], refused)
            except ChannelClosed as error:
                refused[place] = error.text
        return refused

    async def declare(self, what: Queue | Exchange, *, exactly: bool = False) -> None:
        """Make it, or agree with what is there, unless it must be `exactly` so.

        A queue may have been made with other arguments, and an exchange of another kind still takes messages.
        """
        channel = await self._link.channel()
        try:
            for answer in [channel.ask(method, *fields) for method, fields in what.calls()]:
                await channel.answer(answer)
        except ChannelClosed as refused:
            if refused.code != ChannelClosed.PRECONDITION or exactly:
                why = mismatch(what.name, refused.text) if refused.code == ChannelClosed.PRECONDITION else ""
                raise BrokerRefused(f"cannot declare {what.name!r}: {why or refused.text}") from None
            channel = await self._link.channel()
            method, fields = topology.passive(what.name) if isinstance(what, Queue) else what.passive()
            await channel.call(method, *fields)
            self.peculiar.add(what.name)
        await channel.close()
        (self.declared if isinstance(what, Queue) else self.exchanges).add(what.name)

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
                    await self.declare(what)
                except (BrokerRefused, WireError) as error:
                    refused[post.needs] = str(error)
        return refused

    async def _publish(self, posts: Sequence[Post], places: Sequence[int], refused: Refusals) -> None:
        if not places:
            return
        channel = await self._open_channel()
        frames: dict[int, bytes] = {}
        for place in places:
            try:
                frames[place] = posts[place].frames(channel.number)
            except WireError as error:  # a name that is too long
                refused[place] = str(error)
        sent = list(frames)
        done = await channel.publish(frames.values(), lambda: [posts[place].route for place in sent])
        for nacked in done.refused:
            refused[sent[nacked]] = FULL
        if done.returned:
            refused |= await self._send_again(channel, done.returned, {place: posts[place] for place in sent})

    async def _open_channel(self) -> Channel:
        if self._channel is None or self._channel.error is not None:
            self._channel = await self._link.channel(confirms=True)
        return self._channel

    async def _send_again(
        self, channel: Channel, returned: Sequence[Incoming], posts: Mapping[int, Post]
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
        done = await channel.publish(
            (
                encode_publish(channel.number, *route_of(one), one.properties, one.body, mandatory=True)
                for one in again
            ),
            lambda: map(route_of, again),
        )
        lost = {route_of(one) for one in done.returned}
        return {
            place: unbound(*post.route) if post.route in unroutable else DELETED_AGAIN
            for place, post in posts.items()
            if post.route in unroutable or post.route in lost
        }
