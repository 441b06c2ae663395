"""Locks: exclusive queues as locks that die with their holder's connection.

RabbitMQ lets one connection at a time have an exclusive queue of a name and removes it when that
connection ends, for whatever reason. They have a separate connection, so that a channel full
of messages never delays its heartbeats.

A lock also ends when it was not declared again for its time to live (`x-expires`), by the server's clock:
the server keeps the connection of a holder that was cut off for two to three heartbeats, and others need
not wait for that. The holder must have given up before. It counts from the sending of a declaration that the
server has answered, and has a connection whose two heartbeats are at least the time to live. What stands
between the two and ends the connection towards the server only, defeats that.

A passive declaration would prolong another's lock, unless it asks for no answer (`is_locked`).
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from umbel.brokers.amqp import topology
from umbel.brokers.amqp.frames import Method, encode_method
from umbel.brokers.amqp.link import Channel, Link, open_link
from umbel.brokers.amqp.location import Location
from umbel.brokers.amqp.refusals import ChannelClosed
from umbel.brokers.amqp.session import Session
from umbel.brokers.evidence import Evidence
from umbel.brokers.links import LinkWatch, unheard
from umbel.errors import BrokerError, BrokerUnavailable
from umbel.protocol.outage import LinkChange

HOLDS = "leases"  # how the link is called
HEARTBEATS_S = (1, 2, 4, 8, 16, 32, 60)


def heartbeat_for(ttl_s: float) -> int:
    """So long that the server keeps a lock for `ttl_s` after it last heard of its holder."""
    return next((one for one in HEARTBEATS_S if 2 * one >= ttl_s), HEARTBEATS_S[-1])


def boot_time() -> float:
    """Goes on while the machine sleeps, as the server's clock does."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class Locks:
    def __init__(
        self, timeout_s: float, heartbeat_s: int, name: str, on_link: Callable[[LinkChange], None] = unheard
    ) -> None:
        self._timeout_s = timeout_s
        self._heartbeat_s = heartbeat_s
        self._name = name
        self._watch = LinkWatch(HOLDS, on_link)
        self._is_closed = False
        self._location: Location | None = None
        self._link: Link | None = None
        # Locks are given up on one channel, and taken on others, when it has answered that what was
        # given up before is gone.
        self._channel: Channel | None = None
        self._renewals: Channel | None = None  # locks are prolonged on one more
        self._prolonging = asyncio.Lock()
        self._lock = asyncio.Lock()
        self._held: dict[str, topology.Queue] = {}
        self._taking: set[asyncio.Future[float | None]] = set()

    @property
    def proof_s(self) -> float:
        """For how long after it heard of us the server surely keeps what we hold."""
        return 2.0 * (self._heartbeat_s if self._link is None else self._link.heartbeat_s)

    def has(self, what: str) -> bool:
        return what in self._held and self._link is not None and self._link.error is None

    async def prolong(self, what: str) -> float:
        """Declare it again; the boot time from which on it is ours for another time to live."""
        queue = self._held.get(what)
        if queue is None or self._link is None:
            raise BrokerUnavailable(f"this process does not hold the lock {what!r} in RabbitMQ any more")
        async with self._prolonging:  # one at a time: a refusal ends the channel
            if self._renewals is None or self._renewals.error is not None:
                self._renewals = await self._link.channel()
            sent_at = boot_time()
            try:
                for method, fields in queue.calls():
                    await self._renewals.call(method, *fields)
            except ChannelClosed as refused:  # it had ended, and another was faster
                self._held.pop(what, None)
                raise BrokerUnavailable(
                    f"this process lost the lock {what!r} in RabbitMQ, and another process holds it now; "
                    f"this one waits until it is free: {refused.text}"
                ) from None
        return sent_at

    async def _barrier(self) -> float:
        """The server has done what was asked of it before; the boot time of asking.

        It refuses to give up what had ended and is another's by now. What was given up after that, if
        anything, ends with its time.
        """
        assert self._channel is not None
        sent_at = boot_time()
        try:
            await self._channel.call(Method.BASIC_QOS, 0, 0, False)
        except ChannelClosed as refused:
            if refused.code != ChannelClosed.LOCKED:
                raise
        return sent_at

    async def take(self, what: str, ttl_s: float, location: Location) -> float | None:
        """The boot time from which on it is ours; None if it is somebody else's.

        Not for two at once with the same name. Who is cancelled meanwhile leaves nothing held: what
        was asked of the server is waited for in the background, and given up.
        """
        wanted = asyncio.Event()
        wanted.set()
        taking = asyncio.ensure_future(self._take(topology.hold_queue(what, ttl_s), what, location, wanted))
        self._taking.add(taking)
        taking.add_done_callback(self._taken)
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:
            wanted.clear()
            if taking.done():
                self.drop(what)
            raise

    def _taken(self, taking: asyncio.Future[float | None]) -> None:
        self._taking.discard(taking)
        if not taking.cancelled():
            taking.exception()  # nobody asks for it if the caller was cancelled, and asyncio would log it

    async def _take(
        self, queue: topology.Queue, what: str, location: Location, wanted: asyncio.Event
    ) -> float | None:
        async with self._lock:
            link = await self._open(location)
            sent_at = await self._barrier()
            channel = await link.channel()
            try:
                for method, fields in queue.calls():
                    await channel.call(method, *fields)
            except ChannelClosed as refused:
                if refused.code != ChannelClosed.LOCKED:
                    raise
                return None
            await channel.close()
            self._held[what] = queue
            if not wanted.is_set():
                self.drop(what)
            return sent_at

    def drop(self, what: str) -> None:
        """Give it up; a later `take` of ours comes after it."""
        if self.has(what) and self._channel is not None and self._channel.error is None:
            name = topology.hold_queue(what).name
            delete = encode_method(self._channel.number, Method.QUEUE_DELETE, 0, name, False, False, True)
            self._channel.send(delete)
        self._held.pop(what, None)

    async def drop_now(self, what: str) -> None:
        """Give it up; when this returns, anybody can take it."""
        held = self.has(what)
        if (
            held
            and self._channel is not None
            and self._channel.error is not None
            and self._location is not None
        ):
            async with self._lock:  # closed by a refusal: see `_barrier`
                await self._open(self._location)
        self.drop(what)
        if held:
            await self._barrier()

    async def reconnect(self) -> None:
        """Reconnect if the connection was lost; holders try to acquire their locks again."""
        if self._watch.is_lost and self._location is not None:
            async with self._lock:
                await self._open(self._location)

    async def close(self) -> None:
        self._is_closed = True
        self._held.clear()
        if self._link is not None:
            await self._link.close()

    async def _open(self, location: Location) -> Link:
        if self._link is None or self._link.error is not None:
            self._held.clear()
            self._link = await open_link(
                location, timeout_s=self._timeout_s, heartbeat_s=self._heartbeat_s, name=self._name
            )
            self._location, self._link.on_end = location, self._note_ended
            self._watch.restored()
        if self._channel is None or self._channel.error is not None:
            self._channel = await self._link.channel()
        return self._link

    def _note_ended(self, error: BrokerError) -> None:
        """The loss of a connection without locks is not reported."""
        if self._held and not self._is_closed:
            self._watch.lost(str(error))


@dataclass(slots=True)
class Own:
    """What this process holds: under which term, and until when on its own clock."""

    locks: Locks
    holder: str
    term: int
    ttl_s: float
    deadline: float = 0.0

    @property
    def left_s(self) -> float:
        return self.deadline - boot_time()

    def prolong(self, proven_at: float) -> None:
        self.deadline = proven_at + min(self.ttl_s, self.locks.proof_s)


async def is_locked(session: Session, what: str) -> bool:
    """Whether anybody's connection has it; asked on a connection that has none."""
    channel = await session.link.channel()
    name = topology.hold_queue(what).name
    flags = (True, False, False, False, True)  # passive, and without an answer
    channel.send(encode_method(channel.number, Method.QUEUE_DECLARE, 0, name, *flags, {}))
    try:
        await channel.call(Method.BASIC_QOS, 0, 0, False)
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
