"""Streams: reading RabbitMQ's append-only queues on the event loop.

All tails of a connection share one channel. That is what makes `catch_up` work: the server sends
new entries to a channel in the order in which it answers its questions.
"""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from umbel.brokers.amqp.frames import Incoming, Method, encode_ack
from umbel.brokers.amqp.records import View
from umbel.brokers.amqp.table import decode_properties

if TYPE_CHECKING:  # clients read streams too, and have no event loop
    from umbel.brokers.amqp.link import Channel, Link

PREFETCH = 1000
OFFSET = "x-stream-offset"


@dataclass(slots=True)
class Followed:
    """A view and how far it has come; both outlive the connection."""

    view: View
    next_offset: int = 0


class Tails:
    """Every followed stream, on one connection."""

    def __init__(self, channel: "Channel", followed: Mapping[str, Followed]) -> None:
        self._channel = channel
        self._followed = followed
        self._received = 0
        channel.on_delivery = self._receive

    @property
    def ended(self) -> bool:
        return self._channel.error is not None

    async def begin(self) -> None:
        await self._question()
        for stream, followed in self._followed.items():
            start = {OFFSET: followed.next_offset or "first"}
            await self._channel.call(
                Method.BASIC_CONSUME, 0, stream, stream, False, False, False, False, start
            )
        await self.catch_up()

    async def catch_up(self) -> None:
        """When this returns, the views know what was confirmed before it was called.

        Two questions, because the news of an entry and the entry itself are two steps inside the
        server; and again for as long as more arrives.
        """
        received = -1
        while received != self._received:
            received = self._received
            await self._question()
            await self._question()

    async def _question(self) -> None:
        await self._channel.call(Method.BASIC_QOS, 0, PREFETCH, False)

    def _receive(self, incoming: Incoming) -> None:
        stream, tag, _, _ = incoming.fields
        self._received += 1
        followed, offset = self._followed[stream], offset_of(incoming)
        if offset >= followed.next_offset:
            followed.view.apply(offset, incoming.body)
            followed.next_offset = offset + 1
        self._channel.send(encode_ack(self._channel.number, tag))


async def read_stream(
    link: "Link", stream: str, offset: int | str, limit: int, keep: Callable[[int, Incoming], None]
) -> None:
    """Show `keep` up to `limit` entries from an offset, and return at the end of the stream."""
    channel = await link.channel()
    received = 0

    def receive(incoming: Incoming) -> None:
        nonlocal received
        received += 1
        # A stream begins to send at the chunk that has the offset in it.
        if isinstance(offset, str) or offset_of(incoming) >= offset:
            keep(offset_of(incoming), incoming)
        if channel.error is None:
            channel.send(encode_ack(channel.number, incoming.fields[1]))

    channel.on_delivery = receive
    await channel.call(Method.BASIC_QOS, 0, PREFETCH, False)
    await channel.call(Method.BASIC_CONSUME, 0, stream, "r", False, False, False, False, {OFFSET: offset})
    seen = -1
    while seen != received and received < limit + PREFETCH:
        seen = received
        await channel.call(Method.BASIC_QOS, 0, PREFETCH, False)
        await channel.call(Method.BASIC_QOS, 0, PREFETCH, False)
    await channel.close()


def offset_of(incoming: Incoming) -> int:
    """Where the entry stands; -1 for one that a stranger wrote so that nobody can tell."""
    try:
        offset = (decode_properties(incoming.properties).headers or {}).get(OFFSET)
    except (ValueError, IndexError, struct.error):
        return -1
    return offset if isinstance(offset, int) else -1
