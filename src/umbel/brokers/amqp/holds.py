"""Holds: exclusive queues as locks that die with their holder's connection.

RabbitMQ lets one connection at a time have an exclusive queue of a name and removes it when that
connection ends, for whatever reason. Holds have a connection of their own, so that a channel full
of messages never delays its heartbeats. One that is black-holed ends within two heartbeats.
"""

import asyncio

from umbel.brokers.amqp import topology
from umbel.brokers.amqp.frames import Method, encode_method
from umbel.brokers.amqp.link import Channel, Link, open_link
from umbel.brokers.amqp.location import Location
from umbel.brokers.amqp.refusals import ChannelClosed
from umbel.brokers.amqp.session import Session
from umbel.brokers.interface import Evidence

HEARTBEAT_S = 5


class Holds:
    def __init__(self, *, timeout_s: float, name: str) -> None:
        self._timeout_s = timeout_s
        self._name = name
        self._link: Link | None = None
        # One channel for all, because only on one channel does the server keep their order.
        self._channel: Channel | None = None
        self._lock = asyncio.Lock()
        self._held: set[str] = set()

    def has(self, what: str) -> bool:
        return what in self._held and self._link is not None and self._link.error is None

    async def take(self, what: str, location: Location) -> bool:
        """Whether it is ours now, or was already: terms tell the holders of one process apart."""
        async with self._lock:
            channel = await self._open_channel(location)
            try:
                for method, fields in topology.hold_queue(what).calls():
                    await channel.call(method, *fields)
            except ChannelClosed as refused:
                if refused.code != ChannelClosed.LOCKED:
                    raise
                return False
            self._held.add(what)
            return True

    async def drop(self, what: str) -> None:
        """Give it up; when this returns, anybody can take it."""
        async with self._lock:
            channel, held = self._channel, what in self._held
            self._held.discard(what)
            if held and channel is not None and channel.error is None:
                name = topology.hold_queue(what).name
                await channel.call(Method.QUEUE_DELETE, 0, name, False, False, False)

    def drop_soon(self, what: str) -> None:
        """The same without waiting; a later `take` of ours comes after it."""
        channel = self._channel
        if what in self._held and channel is not None and channel.error is None:
            name = topology.hold_queue(what).name
            channel.send(encode_method(channel.number, Method.QUEUE_DELETE, 0, name, False, False, True))
        self._held.discard(what)

    async def close(self) -> None:
        self._held.clear()
        if self._link is not None:
            await self._link.close()

    async def _open_channel(self, location: Location) -> Channel:
        if self._link is None or self._link.error is not None:
            self._held.clear()
            self._link = await open_link(
                location, timeout_s=self._timeout_s, heartbeat_s=HEARTBEAT_S, name=self._name
            )
        if self._channel is None or self._channel.error is not None:
            self._channel = await self._link.channel()
        return self._channel


async def is_held(session: Session, what: str) -> bool:
    """Whether anybody's connection has it; asked on a connection that has none."""
    channel = await session.link.channel()
    method, fields = topology.passive(topology.hold_queue(what).name)
    try:
        await channel.call(method, *fields)
    except ChannelClosed as refused:
        return refused.code == ChannelClosed.LOCKED
    await channel.close()
    return False


async def probe_mailbox(session: Session, node: str) -> Evidence:
    """Whether a node listens on its mailbox, which is exclusive; that of Celery before 5.7 is not."""
    channel = await session.link.channel()
    method, fields = topology.passive(topology.mailbox(node))
    try:
        declared = await channel.call(method, *fields)
    except ChannelClosed as refused:
        if refused.code == ChannelClosed.LOCKED:
            return Evidence.ALIVE
        if refused.code == ChannelClosed.NOT_FOUND:
            return Evidence.GONE
        raise
    await channel.close()
    consumers = declared.fields[2]
    return Evidence.ALIVE if consumers else Evidence.UNKNOWN
