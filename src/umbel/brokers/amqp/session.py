"""Session: everything of a broker that lives and ends with its connections.

There are two connections: one consumes and asks, the other publishes. A server that is short of memory or
disk stops reading from publishing connections; acknowledgements must not wait for that. When one ends, so
does the other.

`Sessions` returns the live session and opens the next when it has ended. RabbitMQ has then requeued the
messages claimed on the old connection, and the views continue to read where they stopped. If the server has
lost its data, no other process knows which messages were claimed, and `Sessions` remembers that.

A writer to the stream of facts learns here whether its entry counted. RabbitMQ confirms an entry a moment
before its readers get it. So a writer adds a barrier entry and reads until the barrier arrives: then it has
read its entry, and all earlier ones.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from secrets import token_hex

from umbel.brokers.amqp import topology
from umbel.brokers.amqp.claims import Claims
from umbel.brokers.amqp.confirms import Unanswered
from umbel.brokers.amqp.consumer import Arrived, Consumer
from umbel.brokers.amqp.frames import Method
from umbel.brokers.amqp.handshake import Addresses, CannotDeclare, ChannelClosed, Location, QueueRefused
from umbel.brokers.amqp.link import Channel, Link, open_link
from umbel.brokers.amqp.publisher import Publisher
from umbel.brokers.amqp.publishing import Post, Refusals, entry, freeing, refusal, start_entry
from umbel.brokers.amqp.signature_view import SignatureView, signatures_lost
from umbel.brokers.amqp.streams import (
    BarrierFact,
    Changed,
    ClockView,
    Fact,
    FactsView,
    QueueFact,
    RevokeView,
    StartsView,
    StreamPosition,
    Tails,
    encode_record,
)
from umbel.brokers.amqp.topology import DELAY_DELIVERY, TaskQueues
from umbel.brokers.interface import BrokerSettings, Replaced, Tag
from umbel.brokers.links import MAIN, LinkWatch, ignore_link
from umbel.clock import cluster_now
from umbel.errors import BrokerError, BrokerUnavailable
from umbel.protocol.shutdown import LinkChange

log = logging.getLogger("umbel.brokers.amqp")
PROBES_AT_ONCE = 8
HEARTBEAT_S = 30
FACT_POLL_S = 0.002  # until a fact that RabbitMQ has confirmed is delivered
RECOGNISE_S, RECOGNISE_POLL_S = 1.0, 0.01  # until a stream delivers the last entry read again
# From a quorum queue that was not declared as one (the virtual host's default), or from RabbitMQ after 4.
_LIMIT_REFUSED = "global qos"


class Views:
    """The views of the streams that this broker has read."""

    def __init__(self, *, remembers_signatures: bool = False) -> None:
        self.revokes = RevokeView()
        self.starts = StartsView()
        self.facts = FactsView()
        self.clock = ClockView()
        self.signatures = SignatureView()
        self.followed: Mapping[str, StreamPosition] = {
            topology.REVOKES: StreamPosition(self.revokes),
            topology.STARTS: StreamPosition(self.starts),
            topology.FACTS: StreamPosition(self.facts),
            topology.CLOCK: StreamPosition(self.clock),
            **({topology.SIGNATURES: StreamPosition(self.signatures)} if remembers_signatures else {}),
        }


class Session:
    """One pair of connections. `on_deleted`: a queue was deleted with these claims. `on_lost`: these streams
    were lost and created again.
    """

    def __init__(
        self,
        link: Link,
        outgoing: Link,
        views: Views,
        settings: BrokerSettings,
        queues: TaskQueues,
        unanswered: Unanswered[Channel],
        *,
        on_deleted: Callable[[str, set[Tag]], None],
        on_lost: Callable[[Sequence[str]], None],
        channel_limits: bool = True,
    ) -> None:
        self.link = link
        self._outgoing = outgoing
        outgoing.on_end = link.end
        self.queues = queues
        self._on_lost = on_lost
        self.unanswered = unanswered
        self.publisher = Publisher(outgoing, unanswered)
        self.claims = Claims(
            link,
            settings.lease_s,
            starts=views.starts,
            prefetch_floor=settings.prefetch_floor,
            needs_own_limit=lambda queue: (
                not channel_limits or queue in self.publisher.differing or queues.limits_each_consumer(queue)
            ),
            expires_all=queues.expires_all,
            on_deleted=on_deleted,
            may_park=lambda: not self.publisher.is_blocked,
        )
        self.claims.on_lost_uses = self._free_soon
        self.views = views
        views.facts.on_pause = self.claims.wake
        self._settings = settings
        self.holder = token_hex(8)  # names this session in the entries of the signatures that it uses
        self._tails: Tails | None = None
        self._beginning = asyncio.Lock()
        self._freeing: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Declare the streams and read them to their ends.

        Called again when the channel of a stream has ended.
        """
        async with self._beginning:
            if self._tails is not None and not self._tails.ended:
                return
            self.publisher.forget_declared()  # other things may have been deleted too
            # Concurrently: a server that has none of them yet is slow to create each.
            await asyncio.gather(*map(self.publisher.declare, topology.streams(self._settings)))
            if self._settings.remembers_signatures:
                # The session's lock is on the connection that has the claims, so both end together.
                await self.link.run(*topology.session_queue(self.holder).calls())
            tails = await self._new_tails()
            if tails.unrecognised:
                await tails.close()
                tails = await self._reread_lost(tails.unrecognised)
            self._tails = tails
            if self.views.signatures.has_read:
                await self.note_lost_signatures()

    async def note_lost_signatures(self) -> None:
        """Record in an empty stream of signatures that the signatures used before are unknown."""
        if self._settings.remembers_signatures and not self.views.followed[topology.SIGNATURES].next_offset:
            await self.publisher.send(
                [entry(topology.SIGNATURES, encode_record(signatures_lost(cluster_now())))]
            )

    async def free_lost(self, owner: str = "") -> None:
        """Free the signatures of claims that ended without a verdict; with `owner`, of all its claims too."""
        lost, self.claims.lost_uses = self.claims.lost_uses, []
        held = [claimed.used for claimed in self.claims.active.values() if owner and claimed.owner == owner]
        uses = [*lost, *(use for use in held if use is not None)]
        try:
            if uses:
                await self.publisher.send([freeing(use) for use in uses])
        except BaseException:
            self.claims.lost_uses += lost
            raise

    def _free_soon(self) -> None:
        """Free the signatures in the background: RabbitMQ has the messages again, and may deliver them at any
        moment.
        """
        if self._freeing is None or self._freeing.done():
            self._freeing = asyncio.get_running_loop().create_task(self._free_all())

    async def _free_all(self) -> None:
        with suppress(BrokerError):  # the next renewal of a lease retries
            while self.claims.lost_uses:
                await self.free_lost()

    async def catch_up(self) -> None:
        """Read all that was confirmed before this call into the views."""
        assert self._tails is not None
        if self._tails.ended:  # a stream was deleted or changed its leader: the claims on the link stay
            await self.begin()
        await self._tails.catch_up()

    async def send(self, posts: Sequence[Post]) -> None:
        """Publish all posts; raise BrokerRefused if some were refused."""
        if refused := await self.try_send(posts):
            raise refusal(refused, posts)

    async def try_send(self, posts: Sequence[Post]) -> Refusals:
        """Publish, announce new task queues, and return which messages were refused."""
        return await self.publisher.announce_and_try_send(posts, self.views.facts.queues)

    @contextmanager
    def all_or_again(self, posts: Sequence[Post]) -> Iterator[None]:
        """Remember accepted posts if the block fails: when everything is repeated, they are not sent
        again.
        """
        try:
            yield
        except BaseException:
            self.unanswered.add_accepted(posts)
            raise

    async def leave(self, owner: str, queue: str, *, is_busy: bool = False) -> None:
        """Return the messages of the queue that the owner has fetched and not claimed, recorded as
        unstarted.
        """
        async with self.claims.leaving(owner, queue, is_busy=is_busy) as fetched:
            new = [arrived.message.correlation_id for arrived in fetched if not arrived.redelivered]
            await self.note_unstarted(queue, new)

    async def forget(self, owner: str) -> int:
        """End the owner's claims and consumers; return the number of returned claims.

        Messages that it has fetched and not claimed go back as unstarted, if RabbitMQ can still record that.
        """
        await self.free_lost(owner)
        with suppress(BrokerError):
            for queue in self.claims.queues_of(owner):
                await self.leave(owner, queue)
        return await self.claims.forget(owner)

    async def note_unstarted(self, queue: str, messages: Sequence[str]) -> None:
        """Record for all workers that these messages return unstarted, because RabbitMQ will flag them as
        redelivered.
        """
        if posts := [start_entry(queue, message, 0, unstarted=True) for message in messages if message]:
            await self.publisher.send(posts)

    async def take_unstarted(self, taken: Sequence[tuple[Consumer, Arrived]]) -> set[tuple[str, str]]:
        """Return those of the redelivered messages that have not started, by queue and id.

        They may start from now on. So the record is withdrawn first: if this worker dies with them, they may
        have run.
        """
        again = {
            (consumer.queue, arrived.message.correlation_id)
            for consumer, arrived in taken
            if arrived.redelivered
        }
        found = {key for key in again if self.views.starts.is_unstarted(*key)}
        if found:
            await self.publisher.send([start_entry(*key, 0) for key in sorted(found)])
        return found

    async def make_queue(self, name: str) -> None:
        """Declare the queue and announce it to all nodes, unless that was done."""
        if name not in self.publisher.declared:
            try:
                await self.publisher.declare(self.queues.queue(name), exactly=self.queues.is_declared(name))
                if self.queues.needs_ladder:
                    await self._join_ladder(name)
            except (ChannelClosed, CannotDeclare) as refused:
                raise QueueRefused(name, refused) from None
        if name not in self.views.facts.queues:
            await self.publisher.send([entry(topology.FACTS, encode_record(QueueFact(name)))])

    async def close(self) -> None:
        """Close both connections."""
        if self._freeing is not None:
            self._freeing.cancel()
        await asyncio.gather(self.link.close(), self._outgoing.close())

    async def _join_ladder(self, name: str) -> None:
        """Let messages arrive that Celery's clients send to the ladder of delays."""
        if DELAY_DELIVERY.name not in self.publisher.exchanges:
            await self.publisher.make("Celery's queues for delays", self.queues.ladder())
            self.publisher.exchanges.add(DELAY_DELIVERY.name)
        if calls := self.queues.ladder_bindings(name):
            await self.publisher.make(f"the delays of the queue {name!r}", calls)

    async def counts(self, names: Sequence[str]) -> dict[str, int]:
        """Return how many messages wait in each of these queues; missing queues are left out."""
        found: dict[str, int] = {}
        gate = asyncio.Semaphore(PROBES_AT_ONCE)

        async def probe(name: str) -> None:
            async with gate:
                try:
                    (answer,) = await self.link.run(topology.passive(name))
                    found[name] = answer.fields[1]
                except ChannelClosed as refused:
                    if refused.code not in (ChannelClosed.NOT_FOUND, ChannelClosed.LOCKED):
                        raise

        await asyncio.gather(*map(probe, names))
        return found

    async def look_at(self, queue: str) -> tuple[int, int]:
        """Return how many messages wait in an existing queue, and how many consumers it has."""
        (answer,) = await self.link.run(topology.passive(queue))
        return answer.fields[1], answer.fields[2]

    async def purge(self, queue: str) -> int:
        """Remove the waiting messages of the queue; return their number."""
        (answer,) = await self.link.run((Method.QUEUE_PURGE, (0, queue, False)))
        return int(answer.fields[0])

    async def _new_tails(self) -> Tails:
        tails = Tails(await self.link.channel(), self.views.followed)
        await tails.begin()
        loop = asyncio.get_running_loop()
        ends = loop.time() + RECOGNISE_S
        while tails.unrecognised and loop.time() < ends:
            await asyncio.sleep(RECOGNISE_POLL_S)
            await tails.catch_up()
        return tails

    async def _reread_lost(self, lost: Sequence[str]) -> Tails:
        """Read from the beginning the successors of streams that the server lost, for example with
        its disk.
        """
        log.warning("RabbitMQ lost cluster records; reading them again", extra={"streams": ",".join(lost)})
        for stream in lost:
            self.views.followed[stream].restart()
        tails = await self._new_tails()
        self._on_lost(lost)
        return tails


class Sessions:
    """The live session, opened when it is needed."""

    def __init__(
        self,
        settings: BrokerSettings,
        name: str,
        on_replaced: Callable[[Replaced], None] = lambda _: None,
        on_link: Callable[[LinkChange], None] = ignore_link,
    ) -> None:
        self.on_link = on_link
        self.unknown: set[Tag] = set()  # claims that were lost with their queue, and are not settled
        self._on_replaced = on_replaced
        self.views = Views(remembers_signatures=settings.remembers_signatures)
        self._addresses = Addresses(settings.url)
        self._settings = settings
        self._queues = TaskQueues(settings)
        self._unanswered: Unanswered[Channel] = Unanswered()
        self._name = name
        self._session: Session | None = None
        self._opening = asyncio.Lock()
        self._watch = LinkWatch(MAIN, on_link, ends_claims=True)
        self._closed = False
        self._channel_limits = True

    @property
    def alive(self) -> Session | None:
        """The session if its connections live; nothing is opened."""
        session = self._session
        return session if session is not None and session.link.error is None else None

    async def get(self) -> Session:
        """Return the live session. Without one, connect; raise BrokerUnavailable if that fails or after
        `close`.
        """
        session = self._session
        if session is not None and session.link.error is None:
            return session
        async with self._opening:
            if self.alive is None:
                if self._closed:
                    raise BrokerUnavailable(
                        "this process has already closed its broker connection, at shutdown or by close(); "
                        "nothing more can be sent or fetched with it"
                    )
                if session is not None and _LIMIT_REFUSED in str(session.link.error):
                    self._channel_limits = False
                self._session = await self._addresses.connected(self._open_at)
                self._watch.restored()
            assert self._session is not None
            return self._session

    def _note_ended(self, outgoing: Link, error: BrokerError) -> None:
        outgoing.end(error)
        if not self._closed:
            self._watch.lost(str(error))

    def _deleted(self, queue: str, claimed: set[Tag]) -> None:
        self.unknown |= claimed
        self._on_replaced(Replaced(f"the queue {queue!r} was deleted", len(self.unknown)))

    def _lost(self, streams: Sequence[str]) -> None:
        """Report lost streams. Until another connection is open, the last session still has the claims of the
        old one.
        """
        if self._session is not None and self._session.link.error is not None and topology.FACTS in streams:
            self.unknown |= self._session.claims.active.keys()
        self._on_replaced(Replaced(f"the streams {', '.join(streams)} were deleted", len(self.unknown)))

    async def close(self) -> None:
        """Close the session; none is opened any more."""
        self._closed = True
        if self._session is not None:
            await self._session.close()

    async def _open_at(self, location: Location) -> Session:
        # The claims belong to this connection, so its heartbeat follows the lease.
        link = await self._open_link(location, self._name, max(1, round(self._settings.lease_s / 2)))
        try:
            outgoing = await self._open_link(location, f"{self._name} (sending)", HEARTBEAT_S)
        except BaseException:
            link.abort("set-up failed")
            raise
        session = Session(
            link,
            outgoing,
            self.views,
            self._settings,
            self._queues,
            self._unanswered,
            on_deleted=self._deleted,
            on_lost=self._lost,
            channel_limits=self._channel_limits,
        )
        try:
            await session.begin()
        except BaseException:
            link.abort("set-up failed")
            outgoing.abort("set-up failed")
            raise
        link.on_end = partial(self._note_ended, outgoing)
        if link.error is not None:  # it ended meanwhile
            raise link.error
        return session

    async def _open_link(self, location: Location, name: str, heartbeat_s: int) -> Link:
        timeout_s = self._settings.connect_timeout_s
        return await open_link(location, timeout_s=timeout_s, heartbeat_s=heartbeat_s, name=name)


# ---- writing facts ----------------------------------------------------------------------------------


async def write_if_current(session: Session, fact: Changed, *, timeout_s: float) -> bool:
    """Write a new version of a lease or election; return whether it counted, because no other writer was
    faster.
    """
    with session.views.facts.attempt(fact) as counted:
        await write_facts(session, fact, timeout_s=timeout_s)
        return counted()


async def write_facts(session: Session, *facts: Fact, timeout_s: float) -> None:
    """Write facts. On return they are confirmed, and the views know them and all earlier ones."""
    barrier, read = BarrierFact(token_hex(8)), asyncio.Event()
    awaited = session.views.facts.awaited
    awaited[barrier.nonce] = read.set
    try:
        entries = [entry(topology.FACTS, encode_record(fact)) for fact in (*facts, barrier)]
        await session.publisher.send(entries)
        async with asyncio.timeout(timeout_s):
            await session.catch_up()
            while not read.is_set():
                await asyncio.sleep(FACT_POLL_S)
                await session.catch_up()
    except TimeoutError:
        raise BrokerUnavailable(
            f"RabbitMQ confirmed a write to {topology.FACTS} but did not deliver it within "
            f"{timeout_s:g} s; try again"
        ) from None
    finally:
        awaited.pop(barrier.nonce, None)
