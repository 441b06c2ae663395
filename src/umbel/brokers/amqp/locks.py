"""Locks: exclusive queues as locks that end with their holder's connection.

RabbitMQ lets one connection at a time have an exclusive queue of a name and removes it when that connection
ends, for whatever reason. Locks have a separate connection, so that a channel full of messages never delays
its heartbeats.

A lock also ends when it was not declared again for its time to live (`x-expires`), by the server's clock. The
server keeps the connection of a holder that was cut off for two to three heartbeats, and others need not wait
for that. The holder must have given up before. It counts from the sending of a declaration that the server
has answered, and its connection has a heartbeat of at least half the time to live. A device between the two
that ends the connection towards the server only defeats this.

A passive declaration would extend another process's lock, unless it asks for no answer (`is_locked`).
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from umbel.brokers.amqp import topology
from umbel.brokers.amqp.frames import Method, encode_method
from umbel.brokers.amqp.handshake import ChannelClosed, Location
from umbel.brokers.amqp.link import Channel, Link, open_link
from umbel.brokers.amqp.session import Session
from umbel.brokers.interface import Evidence
from umbel.brokers.links import LinkWatch, ignore_link
from umbel.errors import BrokerError, BrokerUnavailable
from umbel.protocol.shutdown import LinkChange

LEASES = "leases"  # the name of this link in reports
HEARTBEATS_S = (1, 2, 4, 8, 16, 32, 60)


def heartbeat_for(ttl_s: float) -> int:
    """Return the shortest heartbeat with which the server keeps a lock for `ttl_s` after the last data from
    its holder.
    """
    return next((heartbeat_s for heartbeat_s in HEARTBEATS_S if 2 * heartbeat_s >= ttl_s), HEARTBEATS_S[-1])


def boot_time() -> float:
    """Return the time of a clock that continues while the machine sleeps, like the server's clock."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class Locks:
    """The locks that this process holds on one connection with one heartbeat."""

    def __init__(
        self,
        timeout_s: float,
        heartbeat_s: int,
        name: str,
        on_link: Callable[[LinkChange], None] = ignore_link,
    ) -> None:
        self._timeout_s = timeout_s
        self._heartbeat_s = heartbeat_s
        self._name = name
        self._watch = LinkWatch(LEASES, on_link)
        self._is_closed = False
        self._location: Location | None = None
        self._link: Link | None = None
        # Locks are given up on this channel. They are taken on others, after this one has answered that
        # what was given up before is gone.
        self._channel: Channel | None = None
        self._renewals: Channel | None = None  # locks are extended on this channel
        self._extending = asyncio.Lock()
        self._lock = asyncio.Lock()
        self._held: dict[str, topology.Queue] = {}
        self._taking: set[asyncio.Future[float | None]] = set()

    @property
    def proof_s(self) -> float:
        """How long the server surely keeps our locks after it received data from us."""
        return 2.0 * (self._heartbeat_s if self._link is None else self._link.heartbeat_s)

    def has(self, what: str) -> bool:
        """Whether this process holds the lock, as far as it knows without asking."""
        return what in self._held and self._link is not None and self._link.error is None

    async def extend(self, what: str) -> float:
        """Declare the lock again; return the boot time from which it is ours for another time to live.
        BrokerUnavailable: it is lost.
        """
        queue = self._held.get(what)
        if queue is None or self._link is None:
            raise BrokerUnavailable(f"this process does not hold the lock {what!r} in RabbitMQ any more")
        async with self._extending:  # one call at a time: a refusal ends the channel
            if self._renewals is None or self._renewals.error is not None:
                self._renewals = await self._link.channel()
            sent_at = boot_time()
            try:
                for method, fields in queue.calls():
                    await self._renewals.call(method, *fields)
            except ChannelClosed as refused:  # it had ended, and another process took it
                self._held.pop(what, None)
                raise BrokerUnavailable(
                    f"this process lost the lock {what!r} in RabbitMQ, and another process holds it now; "
                    f"this one waits until it is free: {refused.text}"
                ) from None
        return sent_at

    async def _barrier(self) -> float:
        """Wait until the server has handled all earlier requests; return the boot time of this request.

        The server refuses to remove a lock that had ended and belongs to another process by now. A lock that
        was given up after such a refusal ends with its time to live.
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
        """Take the lock; return the boot time from which it is ours, or None if another process has it.

        Two callers must not take the same name at once. A cancelled call leaves nothing locked: the server's
        answer is awaited in the background, and the lock is given up.
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
            taking.exception()  # retrieved, or asyncio logs it if the caller was cancelled

    async def _take(
        self, queue: topology.Queue, what: str, location: Location, wanted: asyncio.Event
    ) -> float | None:
        async with self._lock:
            link = await self._open(location)
            sent_at = await self._barrier()
            try:
                await link.run(*queue.calls())
            except ChannelClosed as refused:
                if refused.code != ChannelClosed.LOCKED:
                    raise
                return None
            self._held[what] = queue
            if not wanted.is_set():
                self.drop(what)
            return sent_at

    def drop(self, what: str) -> None:
        """Give the lock up; a later `take` by this process comes after that."""
        if self.has(what) and self._channel is not None and self._channel.error is None:
            name = topology.hold_queue(what).name
            delete = encode_method(self._channel.number, Method.QUEUE_DELETE, 0, name, False, False, True)
            self._channel.send(delete)
        self._held.pop(what, None)

    async def drop_now(self, what: str) -> None:
        """Give the lock up; when this returns, any process can take it."""
        held = self.has(what)
        if (
            held
            and self._channel is not None
            and self._channel.error is not None
            and self._location is not None
        ):
            async with self._lock:  # a refusal closed the channel: see `_barrier`
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
        """Close the connection, which ends all locks."""
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
        """Report the loss of the connection, unless it had no locks."""
        if self._held and not self._is_closed:
            self._watch.lost(str(error))


@dataclass(slots=True)
class HeldLock:
    """A lock that this process holds: under which term, and until when by this machine's clock."""

    locks: Locks
    holder: str
    term: int
    ttl_s: float
    deadline: float = 0.0

    @property
    def left_s(self) -> float:
        """For how long the lock is certainly ours; negative if it has ended."""
        return self.deadline - boot_time()

    def extend(self, proven_at: float) -> None:
        """Extend it by its time to live, counted from when the server is known to have extended it."""
        self.deadline = proven_at + min(self.ttl_s, self.locks.proof_s)


async def is_locked(session: Session, what: str) -> bool:
    """Whether any connection has the lock; asked on a connection that has no locks."""
    name = topology.hold_queue(what).name
    flags = (True, False, False, False, True)  # passive, and without an answer
    try:
        async with session.link.temporary_channel() as channel:
            channel.send(encode_method(channel.number, Method.QUEUE_DECLARE, 0, name, *flags, {}))
            await channel.call(Method.BASIC_QOS, 0, 0, False)
    except ChannelClosed as refused:
        if refused.code not in (ChannelClosed.LOCKED, ChannelClosed.NOT_FOUND):
            raise
        return refused.code == ChannelClosed.LOCKED
    return False


async def probe_mailbox(session: Session, node: str) -> Evidence:
    """Return whether a node listens on its mailbox, which is exclusive; the mailbox of Celery before 5.7 is
    not.
    """
    try:
        (declared,) = await session.link.run(topology.passive(topology.mailbox(node)))
    except ChannelClosed as refused:
        if refused.code == ChannelClosed.LOCKED:
            return Evidence.ALIVE
        if refused.code == ChannelClosed.NOT_FOUND:
            return Evidence.GONE
        raise
    consumers = declared.fields[2]
    return Evidence.ALIVE if consumers else Evidence.UNKNOWN
