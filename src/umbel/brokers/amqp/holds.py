"""Holds: exclusive queues as locks that die with their holder's connection.

RabbitMQ lets one connection at a time have an exclusive queue of a name and removes it when that
connection ends, for whatever reason. Holds have a connection of their own, so that a channel full
of messages never delays its heartbeats.

A holder that is cut off without being told must have given up before the server lets go. The
server waits for two to three heartbeats after it last heard of a connection; so whoever holds for
`ttl_s` at a time does so on a connection whose two heartbeats are at least that, and counts
from the sending of a question that the server has answered. What stands between the two and ends the
connection towards the server only, defeats that.
"""

import asyncio
import time

from umbel.brokers.amqp import topology
from umbel.brokers.amqp.frames import Method, encode_method
from umbel.brokers.amqp.link import Channel, Link, open_link
from umbel.brokers.amqp.location import Location
from umbel.brokers.amqp.refusals import ChannelClosed
from umbel.brokers.amqp.session import Session
from umbel.brokers.evidence import Evidence
from umbel.errors import BrokerUnavailable

HEARTBEATS_S = (1, 2, 4, 8, 16, 32, 60)


def heartbeat_for(ttl_s: float) -> int:
    """So long that the server keeps a hold for `ttl_s` after it last heard of its holder."""
    return next((one for one in HEARTBEATS_S if 2 * one >= ttl_s), HEARTBEATS_S[-1])


def boot_time() -> float:
    """Goes on while the machine sleeps, as the server's clock does."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class Holds:
    def __init__(self, *, timeout_s: float, heartbeat_s: int, name: str) -> None:
        self._timeout_s = timeout_s
        self._heartbeat_s = heartbeat_s
        self._name = name
        self._link: Link | None = None
        # Holds are given up on one channel, which nothing that is refused closes; and taken on others,
        # when it has answered that what was given up before is gone.
        self._channel: Channel | None = None
        self._lock = asyncio.Lock()
        self._held: set[str] = set()
        self._taking: set[asyncio.Future[float | None]] = set()

    @property
    def proof_s(self) -> float:
        """For how long after it heard of us the server surely keeps what we hold."""
        return 2.0 * (self._heartbeat_s if self._link is None else self._link.heartbeat_s)

    def has(self, what: str) -> bool:
        return what in self._held and self._link is not None and self._link.error is None

    async def prove(self) -> float:
        """Ask the server anything; the boot time from which on it has heard of us."""
        if self._channel is None:
            raise BrokerUnavailable("nothing is held")
        sent_at = boot_time()
        await self._channel.call(Method.BASIC_QOS, 0, 0, False)
        return sent_at

    async def take(self, what: str, location: Location) -> float | None:
        """The boot time from which on it is ours; None if it is somebody else's.

        Not for two at once with the same name. Who is cancelled meanwhile leaves nothing held: what
        was asked of the server is waited for in the background, and given up.
        """
        wanted = asyncio.Event()
        wanted.set()
        taking = asyncio.ensure_future(self._take(what, location, wanted))
        self._taking.add(taking)
        taking.add_done_callback(self._taking.discard)
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:
            wanted.clear()
            if taking.done():
                self.drop(what)
            raise

    async def _take(self, what: str, location: Location, wanted: asyncio.Event) -> float | None:
        async with self._lock:
            link = await self._open(location)
            sent_at = await self.prove()
            channel = await link.channel()
            try:
                for method, fields in topology.hold_queue(what).calls():
                    await channel.call(method, *fields)
            except ChannelClosed as refused:
                if refused.code != ChannelClosed.LOCKED:
                    raise
                return None
            await channel.close()
            self._held.add(what)
            if not wanted.is_set():
                self.drop(what)
            return sent_at

    def drop(self, what: str) -> None:
        """Give it up; a later `take` of ours comes after it."""
        if self.has(what) and self._channel is not None and self._channel.error is None:
            name = topology.hold_queue(what).name
            delete = encode_method(self._channel.number, Method.QUEUE_DELETE, 0, name, False, False, True)
            self._channel.send(delete)
        self._held.discard(what)

    async def drop_now(self, what: str) -> None:
        """Give it up; when this returns, anybody can take it."""
        held = self.has(what)
        self.drop(what)
        if held:
            await self.prove()

    async def close(self) -> None:
        self._held.clear()
        if self._link is not None:
            await self._link.close()

    async def _open(self, location: Location) -> Link:
        if self._link is None or self._link.error is not None:
            self._held.clear()
            self._link = await open_link(
                location, timeout_s=self._timeout_s, heartbeat_s=self._heartbeat_s, name=self._name
            )
        if self._channel is None or self._channel.error is not None:
            self._channel = await self._link.channel()
        return self._link


async def is_held(session: Session, what: str) -> bool:
    """Whether anybody's connection has it; asked on a connection that has none."""
    channel = await session.link.channel()
    method, fields = topology.passive(topology.hold_queue(what).name)
    try:
        await channel.call(method, *fields)
    except ChannelClosed as refused:
        if refused.code not in (ChannelClosed.LOCKED, ChannelClosed.NOT_FOUND):
            raise
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
