"""Publisher: declares what is missing, publishes, and returns when the server has answered for all.

A message for a queue that was deleted since it was declared comes back; it is declared and sent
again, once. What the server refuses is reported by its place, so that the others count: a queue that
cannot be declared refuses its messages, a full one (`reject-publish`) answers each, and a message
over the server's size limit closes its channel, so large ones are sent alone.
"""

from collections.abc import Sequence

from umbel.brokers.amqp import topology
from umbel.brokers.amqp.frames import encode_publish
from umbel.brokers.amqp.link import Channel, Link
from umbel.brokers.amqp.outbox import Post, Refusals, refusal
from umbel.brokers.amqp.refusals import FULL, ChannelClosed, closed_publish
from umbel.brokers.amqp.topology import Exchange, Queue
from umbel.errors import BrokerRefused, WireError

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
        refused: Refusals = {}
        if not posts:
            return refused
        bad_queues = await self._declare_missing(posts)
        together, alone = list[int](), list[int]()
        for place, post in enumerate(posts):
            if bad_queues and post.queue is not None and post.queue.name in bad_queues:
                refused[place] = bad_queues[post.queue.name]
            else:
                (alone if len(post.body) > ALONE_BYTES else together).append(place)
        try:
            await self._publish(posts, together, refused)
        except ChannelClosed as error:
            raise closed_publish(self._link.location, error) from None
        for place in alone:
            try:
                await self._publish(posts, [place], refused)
            except ChannelClosed as error:
                refused[place] = error.text
        return refused

    async def declare(self, what: Queue | Exchange) -> None:
        """Make it, or agree with what is there: a queue may have been made with other arguments."""
        channel = await self._link.channel()
        try:
            for answer in [channel.ask(method, *fields) for method, fields in what.calls()]:
                await channel.answer(answer)
        except ChannelClosed as refused:
            if refused.code != ChannelClosed.PRECONDITION or not isinstance(what, Queue):
                raise BrokerRefused(f"cannot declare {what.name!r}: {refused.text}") from None
            channel = await self._link.channel()
            method, fields = topology.passive(what.name)
            await channel.call(method, *fields)
            self.peculiar.add(what.name)
        await channel.close()
        (self.declared if isinstance(what, Queue) else self.exchanges).add(what.name)

    def forget_declared(self) -> None:
        """Things were deleted: what is needed is declared again."""
        self.declared.clear()
        self.exchanges.clear()

    async def _declare_missing(self, posts: Sequence[Post]) -> dict[str, str]:
        """Queues that cannot be declared, and why."""
        refused: dict[str, str] = {}
        for post in posts:
            queue = post.queue
            if queue is not None and queue.name not in self.declared and queue.name not in refused:
                try:
                    await self.declare(queue)
                except (BrokerRefused, WireError) as error:
                    refused[queue.name] = str(error)
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
        for nacked in await channel.publish(frames.values()):
            refused[sent[nacked]] = FULL
        if channel.returned:
            await self._send_again(channel, posts, places, refused)

    async def _open_channel(self) -> Channel:
        if self._channel is None or self._channel.error is not None:
            self._channel = await self._link.channel(confirms=True)
        return self._channel

    async def _send_again(
        self, channel: Channel, posts: Sequence[Post], places: Sequence[int], refused: Refusals
    ) -> None:
        returned, channel.returned = channel.returned, []
        wanted = {posts[place].key: posts[place].queue for place in places}
        for key in {incoming.fields[3] for incoming in returned}:
            self.declared.discard(key)
            if (queue := wanted.get(key)) is not None:
                await self.declare(queue)
        await channel.publish(
            encode_publish(channel.number, "", one.fields[3], one.properties, one.body, mandatory=True)
            for one in returned
        )
        lost, channel.returned = {one.fields[3] for one in channel.returned}, []
        for place in places:
            if posts[place].key in lost:
                refused[place] = "its queue was deleted twice while publishing"
