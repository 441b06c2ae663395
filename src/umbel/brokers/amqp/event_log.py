"""Event log and subscriptions: a stream that recorders resume where they stopped, and lossy broadcasts.

Log entries are written while a recorder is registered, which the facts say. RabbitMQ bounds a stream by bytes
and age; the bound by number is applied by the reader: of what a recorder has not acknowledged it gets the
newest `event_log_max`, and what was skipped is counted as lost.

A subscription is one listener's exclusive queue on an exchange, declared again after a lost connection. What
is broadcast while the link is down is missed; a reader that needs all events reads the event log.
"""

import asyncio
import struct
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from time import monotonic, time
from uuid import uuid4

import msgspec

from umbel.brokers.amqp import topology
from umbel.brokers.amqp.envelope import decode_broadcast, decode_properties
from umbel.brokers.amqp.frames import Incoming, Method, encode_ack
from umbel.brokers.amqp.handshake import ChannelClosed
from umbel.brokers.amqp.link import Channel
from umbel.brokers.amqp.outbox import entry, log_entries
from umbel.brokers.amqp.session import Session, Sessions
from umbel.brokers.amqp.streams import LogEntry, RecorderFact, encode_record, read_stream
from umbel.brokers.interface import Broadcast, BrokerSettings, EventLogState, LoggedEvent
from umbel.brokers.links import LinkWatch, link_of
from umbel.chance import random
from umbel.errors import BrokerError
from umbel.protocol.delivery.states import reconnect_wait_s
from umbel.wire.event import LOGGED
from umbel.wire.values import UNREADABLE

# ---- event log -------------------------------------------------------------------------------------
#
# A stream that recorders resume where they stopped.
#
# Entries are written while a recorder is registered, which the facts say. RabbitMQ bounds a stream by bytes
# and age; the bound by number is applied here, by the reader: of what a recorder has not acknowledged it
# gets the newest `event_log_max`, and what was skipped is counted as lost.
#
# While a recorder is registered the stream is also bound to the exchange of events, so the events of
# Celery's nodes are in it as they were sent. Umbel's workers flag a broadcast event that they also write to
# the log; the reader skips the broadcast copy.
#
# Offsets are the stream's, from 1. A recorder's registration is an entry too, so that it knows where it
# begins: offsets grow, but not always by one. The stream counts entries, so each event of Umbel's is a
# separate entry.

LAST_READS_MAX, READ_AGAIN_S = 10, 0.03  # after that the stream counts as empty, as a new one is
KEPT_FRESH_S = 2.0  # a recorder that reads ahead need not check the limit each time
_decoder = msgspec.json.Decoder(LogEntry)


class EventLog:
    """The event log of one broker.

    While a recorder is registered the stream is also bound to the exchange of events, so the events of
    Celery's nodes are in it as they were sent. Umbel's workers flag a broadcast event that they also write to
    the log; the reader skips the broadcast copy.

    Offsets are the stream's, from 1. A recorder's registration is an entry too, so offsets grow, but not
    always by one.
    """

    def __init__(self, settings: BrokerSettings) -> None:
        self._settings = settings
        self._kept_from = 0  # entries before this offset count as dropped
        self._kept_asked_at = -KEPT_FRESH_S

    async def register(self, session: Session, name: str) -> int:
        """Start to log events for this recorder; the offset behind which it reads."""
        await self._ready(session)
        await self._bind(session, topology.event_binding())
        known = session.views.facts.recorders.get(name)
        if known is not None:
            return known
        await session.publisher.send([entry(topology.EVENTS, encode_record(LogEntry(time(), "", name)))])
        start = await self._last_offset(session, registered=True)
        await self._tell(session, RecorderFact(name, start))
        return start

    async def forget(self, session: Session, name: str) -> None:
        """Remove the recorder; without any recorder nothing is logged any more."""
        await self._ready(session)
        if not session.views.facts.recorders.keys() - {name}:
            await self._bind(session, topology.event_unbinding())
        await self._tell(session, RecorderFact(name, None))

    async def append(
        self, session: Session, entries: Sequence[tuple[str, bytes]], counts: Sequence[int]
    ) -> int:
        """Log events if a recorder is registered; how many entries were logged."""
        if not session.views.facts.recorders or not entries:
            return 0
        await self._ready(session)
        await session.publisher.send(log_entries(entries, counts, time()))
        return len(entries)

    async def read(self, session: Session, name: str, limit: int, after: int) -> list[LoggedEvent]:
        """Up to `limit` events behind `after` and behind what the recorder has acknowledged."""
        await self._ready(session)
        acknowledged = session.views.facts.recorders.get(name)
        if acknowledged is None:
            return []
        if after <= acknowledged or monotonic() - self._kept_asked_at > KEPT_FRESH_S:
            self._kept_from = await self._last_offset(session) - self._settings.event_log_max
            self._kept_asked_at = monotonic()
        first = max(acknowledged, after, self._kept_from)
        found: list[LoggedEvent] = []
        passed = 0

        def keep(offset: int, incoming: Incoming) -> None:
            nonlocal passed
            if len(found) >= limit:
                return
            logged = _logged_event(offset + 1, incoming)
            if logged is None:
                passed = offset + 1
            else:
                found.append(logged)

        await self._read_stream(session, first, limit, keep)
        if not found and passed > first:  # only skipped entries so far; there may be events behind them
            return [LoggedEvent(passed, time(), "", b"")]
        return found

    async def acknowledge(self, session: Session, name: str, offset: int) -> None:
        """The recorder has stored all up to this offset; skipped events are counted as lost."""
        await self._ready(session)
        before = session.views.facts.recorders.get(name)
        if before is None or offset <= before:
            return
        passed_over = await self._last_offset(session) - self._settings.event_log_max - before
        await self._tell(session, RecorderFact(name, offset, lost=max(0, min(passed_over, offset - before))))

    async def lost(self, session: Session) -> int:
        """How many events the recorders have skipped, and how many the slowest recorder will have to."""
        await self._ready(session)
        facts = session.views.facts
        if not facts.recorders:
            return facts.lost
        kept_from = await self._last_offset(session) - self._settings.event_log_max
        return facts.lost + max(0, kept_from - min(facts.recorders.values()))

    async def state(self, session: Session) -> EventLogState:
        """The last offset, the recorders with their offsets, and how many events were lost."""
        lost = await self.lost(session)
        return EventLogState(await self._last_offset(session), dict(session.views.facts.recorders), lost)

    async def _bind(self, session: Session, calls: list[topology.Call]) -> None:
        channel = await session.link.channel()
        for method, fields in calls:
            await channel.call(method, *fields)
        await channel.close()

    async def _ready(self, session: Session) -> None:
        if topology.EVENTS not in session.publisher.declared:
            await session.publisher.declare(topology.event_stream(self._settings))
        await session.catch_up()

    async def _tell(self, session: Session, fact: RecorderFact) -> None:
        await session.publisher.send([entry(topology.FACTS, encode_record(fact))])
        await session.catch_up()

    async def _last_offset(self, session: Session, *, registered: bool = False) -> int:
        """The last offset of the stream. With a recorder it cannot be empty, so a busy server gets more time
        to send it.
        """
        last = 0

        def keep(offset: int, _: Incoming) -> None:
            nonlocal last
            last = max(last, offset + 1)

        await self._read_stream(session, "last", 1_000_000, keep)
        reads = 1
        while not last and (registered or session.views.facts.recorders) and reads < LAST_READS_MAX:
            await asyncio.sleep(READ_AGAIN_S)
            await self._read_stream(session, "last", 1_000_000, keep)
            reads += 1
        return last

    async def _read_stream(
        self, session: Session, offset: int | str, limit: int, keep: Callable[[int, Incoming], None]
    ) -> None:
        try:
            await read_stream(session.link, topology.EVENTS, offset, limit, keep)
        except ChannelClosed as refused:
            if refused.code == ChannelClosed.NOT_FOUND:  # the stream was deleted: the next call declares it
                session.publisher.declared.discard(topology.EVENTS)
            raise


def _logged_event(offset: int, incoming: Incoming) -> LoggedEvent | None:
    """The event for a recorder; None for a recorder's registration, or a broadcast that
    is in the log anyway.
    """
    routing_key = incoming.fields[3]
    if routing_key != topology.EVENTS:  # a broadcast, copied by the binding
        return None if _is_logged(incoming) else LoggedEvent(offset, time(), routing_key, incoming.body)
    try:
        logged = _decoder.decode(incoming.body)
    except UNREADABLE:
        return LoggedEvent(offset, time(), "unknown", incoming.body)
    if not logged.routing_key:
        return None
    body = logged.body.encode("utf-8", "surrogateescape")
    return LoggedEvent(offset, logged.recorded_at, logged.routing_key, body)


def _is_logged(incoming: Incoming) -> bool:
    """Whether the sender of a broadcast has written the event to the log too."""
    try:
        return bool((decode_properties(incoming.properties).headers or {}).get(LOGGED))
    except (ValueError, IndexError, struct.error):
        return False


# ---- amqp subscription -----------------------------------------------------------------------------
#
# One listener's queue on an exchange, declared again after a lost connection.
#
# The queue is exclusive and removed with its connection, so what is broadcast while the link is down is
# missed: broadcasts are lossy; a reader that needs all events reads the event log. At most PREFETCH
# broadcasts wait in this process; the others wait in the queue until its TTL.
#
# The server reports a deleted queue but not a deleted exchange, so a listener that receives nothing binds
# its queue again from time to time.

PREFETCH = 500
BIND_AGAIN_S = 5.0


class AmqpSubscription:
    """The broadcasts of one exchange, for one listener; iterating reconnects by itself.

    What is broadcast while the link is down is missed. At most PREFETCH broadcasts wait in this process; the
    others wait in the queue until its TTL. The server reports a deleted queue but not a deleted exchange, so
    a listener that receives nothing binds its queue again from time to time.
    """

    def __init__(
        self, sessions: Sessions, exchange: str, patterns: Sequence[str], unread_ttl_s: float | None = None
    ) -> None:
        self._unread_ttl_s = unread_ttl_s
        self._sessions = sessions
        self._exchange = exchange
        self._patterns = tuple(patterns)
        self._channel: Channel | None = None
        self._queue: topology.Queue | None = None  # the queue that the channel consumes
        self._watch = LinkWatch(link_of(exchange), sessions.on_link)
        self._is_left = False
        self._waiting: deque[Incoming] = deque()
        self._arrived = asyncio.Event()

    async def enter(self) -> None:
        """Declare, bind and consume the queue; what is broadcast from now on arrives.

        After a failure or a cancellation half-way, `leave` closes what is open.
        """
        self._queue = None
        session = await self._sessions.get()
        self._channel = channel = await session.link.channel()
        queue = topology.listening_queue(
            self._exchange, self._patterns, str(uuid4()), unread_ttl_s=self._unread_ttl_s
        )
        for answer in [channel.ask(method, *fields) for method, fields in queue.calls()]:
            await channel.answer(answer)
        self._waiting.clear()
        channel.on_delivery = self._receive
        channel.on_end = self._note_ended
        await channel.call(Method.BASIC_QOS, 0, PREFETCH, False)
        await channel.call(Method.BASIC_CONSUME, 0, queue.name, "s", False, False, False, False, {})
        self._queue = queue
        self._watch.restored()

    async def leave(self) -> None:
        """Close the channel; the queue is removed with its consumer."""
        channel, self._is_left = self._channel, True
        self._watch.given_up()
        if channel is None or channel.error is not None:
            return
        try:
            await channel.close()
        except BrokerError:
            return  # the connection ended meanwhile

    async def __aiter__(self) -> AsyncIterator[Broadcast]:
        failures = 0
        while True:
            while self._waiting:
                incoming = self._waiting.popleft()
                channel = self._channel
                if channel is not None and channel.error is None:
                    channel.send(encode_ack(channel.number, incoming.fields[1]))
                yield decode_broadcast(incoming, self._exchange)
            self._arrived.clear()
            try:
                if self._channel is None or self._queue is None or self._channel.error is not None:
                    await self.enter()
                elif not await self._hears_within(BIND_AGAIN_S):
                    await self._bind()
                failures = 0
            except BrokerError:
                failures += 1
                await asyncio.sleep(reconnect_wait_s(failures, random()))

    async def _hears_within(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._arrived.wait()
        except TimeoutError:
            return False

    async def _bind(self) -> None:
        assert self._channel is not None
        assert self._queue is not None
        for method, fields in self._queue.binding_calls():
            await self._channel.call(method, *fields)

    def _note_ended(self, error: BrokerError) -> None:
        self._arrived.set()
        if not self._is_left:
            self._watch.lost(str(error))

    def _receive(self, incoming: Incoming) -> None:
        self._waiting.append(incoming)
        self._arrived.set()
