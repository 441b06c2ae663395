"""Streams: reading RabbitMQ's append-only queues on the event loop.

All tails of a connection share one channel. That is what makes `catch_up` work: the server sends
new entries to a channel in the order in which it answers its questions.
"""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from umbel.brokers.amqp.frames import Incoming, Method, encode_ack
from umbel.brokers.amqp.properties import decode_properties
from umbel.brokers.amqp.records import View

if TYPE_CHECKING:  # clients read streams too, and have no event loop
    from umbel.brokers.amqp.link import Channel, Link

PREFETCH = 1000
ACK_EVERY = 250
OFFSET = "x-stream-offset"
# The properties of an entry that Umbel wrote, as RabbitMQ hands them out: a table of nothing but the
# offset, which follows this, and the delivery mode in one byte.
_OWN_OPENING = b"\x30\x00" + (25).to_bytes(4) + bytes((len(OFFSET),)) + OFFSET.encode() + b"l"
_OWN_BYTES = len(_OWN_OPENING) + 9


@dataclass(slots=True)
class Followed:
    """A view and how far it has come; both outlive the connection."""

    view: View
    next_offset: int = 0
    last_entry: int = 0  # its hash

    def read(self, offset: int, body: bytes) -> None:
        if offset >= self.next_offset:
            self.view.apply(offset, body)
            self.next_offset, self.last_entry = offset + 1, hash(body)

    def begin_anew(self) -> None:
        self.view.begin_anew()
        self.next_offset = 0


class Tails:
    """Every followed stream, on one connection."""

    def __init__(self, channel: "Channel", followed: Mapping[str, Followed]) -> None:
        self._channel = channel
        self._followed = followed
        self._received = 0
        self._last_read = {
            stream: (one.next_offset - 1, one.last_entry)
            for stream, one in followed.items()
            if one.next_offset
        }
        channel.on_delivery = self._receive

    @property
    def ended(self) -> bool:
        return self._channel.error is not None

    @property
    def strange(self) -> list[str]:
        """Streams that have not shown again the entry that was read last: they may be new ones."""
        return list(self._last_read)

    async def begin(self) -> None:
        asked = [self._channel.ask(Method.BASIC_QOS, 0, PREFETCH, False)]
        for stream, followed in self._followed.items():
            start = {OFFSET: max(0, followed.next_offset - 1) or "first"}
            flags = (False, False, False, False)
            asked.append(self._channel.ask(Method.BASIC_CONSUME, 0, stream, stream, *flags, start))
        for answer in asked:
            await self._channel.answer(answer)
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

    async def close(self) -> None:
        await self._channel.close()

    async def _question(self) -> None:
        await self._channel.call(Method.BASIC_QOS, 0, PREFETCH, False)

    def _receive(self, incoming: Incoming) -> None:
        stream, tag, *_ = incoming.fields
        self._received += 1
        offset = offset_of(incoming)
        if stream in self._last_read and self._last_read[stream] == (offset, hash(incoming.body)):
            del self._last_read[stream]
        self._followed[stream].read(offset, incoming.body)
        self._channel.send(encode_ack(self._channel.number, tag))


async def read_stream(
    link: "Link", stream: str, offset: int | str, limit: int, keep: Callable[[int, Incoming], None]
) -> None:
    """Show `keep` up to `limit` entries from an offset, and return at the end of the stream."""
    channel = await link.channel()
    received = shown = 0

    def receive(incoming: Incoming) -> None:
        nonlocal received, shown
        received += 1
        place = offset_of(incoming)
        # A stream begins to send at the chunk that has the offset in it.
        if isinstance(offset, str) or place >= offset:
            shown += 1
            keep(place, incoming)
        # Acknowledging is what asks for more: many at once, and no more than are wanted.
        if received % ACK_EVERY == 0 and shown < limit and channel.error is None:
            channel.send(encode_ack(channel.number, incoming.fields[1], multiple=True))

    channel.on_delivery = receive
    await channel.call(Method.BASIC_QOS, 0, PREFETCH, False)
    await channel.call(Method.BASIC_CONSUME, 0, stream, "r", False, False, False, False, {OFFSET: offset})
    seen = -1
    while seen != received and shown < limit:
        seen = received
        await channel.call(Method.BASIC_QOS, 0, PREFETCH, False)
        await channel.call(Method.BASIC_QOS, 0, PREFETCH, False)
    await channel.close()


def offset_of(incoming: Incoming) -> int:
    """Where the entry stands; -1 for one that a stranger wrote so that nobody can tell."""
    properties = incoming.properties
    if len(properties) == _OWN_BYTES and properties.startswith(_OWN_OPENING):
        return int.from_bytes(properties[-9:-1], signed=True)
    try:
        offset = (decode_properties(incoming.properties).headers or {}).get(OFFSET)
    except (ValueError, IndexError, struct.error):
        return -1
    return offset if isinstance(offset, int) else -1
