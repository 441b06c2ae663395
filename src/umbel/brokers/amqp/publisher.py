"""Publisher: declares what is missing, publishes, and returns when the server has confirmed.

A message for a queue that was deleted since it was declared comes back; it is declared and sent
again, once.
"""

from collections.abc import Sequence

from umbel.brokers.amqp import topology
from umbel.brokers.amqp.frames import encode_publish
from umbel.brokers.amqp.link import Channel, Link
from umbel.brokers.amqp.outbox import Post
from umbel.brokers.amqp.refusals import ChannelClosed
from umbel.brokers.amqp.topology import Exchange, Queue
from umbel.errors import BrokerError


class Publisher:
    def __init__(self, link: Link) -> None:
        self.declared: set[str] = set()
        self.exchanges: set[str] = set()
        self.peculiar: set[str] = set()  # queues that somebody made with arguments of their own
        self._link = link
        self._channel: Channel | None = None

    async def send(self, posts: Sequence[Post]) -> None:
        if not posts:
            return
        for post in posts:
            if post.queue is not None and post.queue.name not in self.declared:
                await self.declare(post.queue)
        channel = await self._open_channel()
        number = channel.number
        await channel.publish([post.frames(number) for post in posts])
        if channel.returned:
            await self._send_again(channel, posts)

    async def declare(self, what: Queue | Exchange) -> None:
        """Make it, or agree with what is there: a queue may have been made with other arguments."""
        channel = await self._link.channel()
        try:
            for answer in [channel.ask(method, *fields) for method, fields in what.calls()]:
                await channel.answer(answer)
        except ChannelClosed as refused:
            if refused.code != ChannelClosed.PRECONDITION or not isinstance(what, Queue):
                raise BrokerError(f"cannot declare {what.name!r}: {refused.text}") from None
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

    async def _open_channel(self) -> Channel:
        if self._channel is None or self._channel.error is not None:
            self._channel = await self._link.channel(confirms=True)
        return self._channel

    async def _send_again(self, channel: Channel, posts: Sequence[Post]) -> None:
        returned, channel.returned = channel.returned, []
        wanted = {post.key: post.queue for post in posts}
        for key in {incoming.fields[3] for incoming in returned}:
            self.declared.discard(key)
            if (queue := wanted.get(key)) is not None:
                await self.declare(queue)
        await channel.publish(
            encode_publish(channel.number, "", one.fields[3], one.properties, one.body, mandatory=True)
            for one in returned
        )
        if channel.returned:
            lost, channel.returned = channel.returned, []
            raise BrokerError(f"the queue {lost[0].fields[3]!r} is deleted again and again: not published")
