"""Event log: a stream that recorders resume where they stopped.

Entries are written while a recorder is registered, as recorded in the stream of facts. RabbitMQ bounds a
stream by bytes and age. The reader applies the bound by number: it gets the newest `event_log_max` entries
that its recorder has not acknowledged, and the skipped ones are counted as lost.

While a recorder is registered the stream is also bound to the exchange of events, so it has the events of
Celery's nodes as they were sent. Umbel's workers flag a broadcast event that they also write to the log; the
reader skips the broadcast copy.

Offsets are the stream's, from 1. A recorder's registration is an entry too, so that the recorder knows where
it begins: offsets grow, but not always by one. The stream counts entries, so each of Umbel's events is a
separate entry.
"""

import asyncio
import struct
from collections.abc import Callable, Sequence
from time import monotonic, time

import msgspec

from umbel.brokers.amqp import topology
from umbel.brokers.amqp.envelope import decode_properties
from umbel.brokers.amqp.frames import Incoming
from umbel.brokers.amqp.handshake import ChannelClosed
from umbel.brokers.amqp.publishing import entry, log_entries
from umbel.brokers.amqp.session import Session, Sessions
from umbel.brokers.amqp.streams import LogEntry, RecorderFact, encode_record, read_stream
from umbel.brokers.interface import BrokerSettings, EventLogState, LoggedEvent
from umbel.wire.event import LOGGED
from umbel.wire.values import UNREADABLE

LAST_READS_MAX, READ_AGAIN_S = 10, 0.03  # after that the stream counts as empty, like a new one
LIMIT_FRESH_S = 2.0  # a recorder that reads ahead need not check the limit each time
_decode = msgspec.json.Decoder(LogEntry).decode


class EventLog:
    """The event log of one broker."""

    def __init__(self, sessions: Sessions, settings: BrokerSettings) -> None:
        self._sessions = sessions
        self._settings = settings
        self._dropped_before = 0  # entries before this offset count as dropped
        self._limit_read_at = -LIMIT_FRESH_S

    async def register_recorder(self, name: str) -> int:
        """Log events for this recorder from now on; return the offset that it has acknowledged."""
        session = await self._ready()
        await session.link.run(*topology.event_binding())
        known = session.views.facts.recorders.get(name)
        if known is not None:
            return known
        await session.publisher.send([entry(topology.EVENTS, encode_record(LogEntry(time(), "", name)))])
        start = await self._last_offset(session, registered=True)
        await self._write(session, RecorderFact(name, start))
        return start

    async def forget_recorder(self, name: str) -> None:
        """Remove the recorder; without any recorder no events are logged."""
        session = await self._ready()
        if not session.views.facts.recorders.keys() - {name}:
            await session.link.run(*topology.event_unbinding())
        await self._write(session, RecorderFact(name, None))

    async def recorders(self) -> Sequence[str]:
        """Return the names of the registered recorders, sorted."""
        session = await self._sessions.get()
        await session.catch_up()
        return sorted(session.views.facts.recorders)

    async def log_events(self, entries: Sequence[tuple[str, bytes]], *, counts: Sequence[int] = ()) -> int:
        """Log events if a recorder is registered; return the number of logged entries."""
        session = await self._sessions.get()
        if not session.views.facts.recorders or not entries:
            return 0
        await self._catch_up(session)
        await session.publisher.send(log_entries(entries, counts, time()))
        return len(entries)

    async def read_events(self, name: str, limit: int, *, after: int = 0) -> Sequence[LoggedEvent]:
        """Return up to `limit` events behind `after` that the recorder has not acknowledged."""
        session = await self._ready()
        acknowledged = session.views.facts.recorders.get(name)
        if acknowledged is None:
            return []
        if after <= acknowledged or monotonic() - self._limit_read_at > LIMIT_FRESH_S:
            self._dropped_before = await self._last_offset(session) - self._settings.event_log_max
            self._limit_read_at = monotonic()
        first = max(acknowledged, after, self._dropped_before)
        found: list[LoggedEvent] = []
        skipped = 0

        def collect(offset: int, incoming: Incoming) -> None:
            nonlocal skipped
            if len(found) >= limit:
                return
            logged = _logged_event(offset + 1, incoming)
            if logged is None:
                skipped = offset + 1
            else:
                found.append(logged)

        await self._read_stream(session, first, limit, collect)
        if not found and skipped > first:  # only skipped entries so far; there may be events behind them
            return [LoggedEvent(skipped, time(), "", b"")]
        return found

    async def acknowledge_events(self, name: str, offset: int) -> None:
        """Record that the recorder has stored all events up to this offset; skipped ones count as lost."""
        session = await self._ready()
        before = session.views.facts.recorders.get(name)
        if before is None or offset <= before:
            return
        skipped = await self._last_offset(session) - self._settings.event_log_max - before
        lost = max(0, min(skipped, offset - before))
        await self._write(session, RecorderFact(name, offset, lost=lost))

    async def lost_events(self) -> int:
        """Return how many events the recorders have skipped, and how many the slowest one will skip."""
        return await self._lost(await self._ready())

    async def event_log(self) -> EventLogState:
        """Return the last offset, the recorders with their offsets, and how many events were lost."""
        session = await self._ready()
        lost = await self._lost(session)
        recorders = dict(session.views.facts.recorders)
        return EventLogState(await self._last_offset(session), recorders, lost)

    async def _lost(self, session: Session) -> int:
        facts = session.views.facts
        if not facts.recorders:
            return facts.lost
        dropped_before = await self._last_offset(session) - self._settings.event_log_max
        return facts.lost + max(0, dropped_before - min(facts.recorders.values()))

    async def _ready(self) -> Session:
        session = await self._sessions.get()
        await self._catch_up(session)
        return session

    async def _catch_up(self, session: Session) -> None:
        """Declare the stream if needed, and read the facts."""
        if topology.EVENTS not in session.publisher.declared:
            await session.publisher.declare(topology.event_stream(self._settings))
        await session.catch_up()

    async def _write(self, session: Session, fact: RecorderFact) -> None:
        await session.publisher.send([entry(topology.FACTS, encode_record(fact))])
        await session.catch_up()

    async def _last_offset(self, session: Session, *, registered: bool = False) -> int:
        """Return the last offset of the stream.

        With a recorder the stream cannot be empty, so a busy server gets more time to deliver its last entry.
        """
        last = reads = 0

        def collect(offset: int, _: Incoming) -> None:
            nonlocal last
            last = max(last, offset + 1)

        while True:
            await self._read_stream(session, "last", 1_000_000, collect)
            reads += 1
            has_recorders = registered or session.views.facts.recorders
            if last or not has_recorders or reads == LAST_READS_MAX:
                return last
            await asyncio.sleep(READ_AGAIN_S)

    async def _read_stream(
        self, session: Session, offset: int | str, limit: int, collect: Callable[[int, Incoming], None]
    ) -> None:
        try:
            await read_stream(session.link, topology.EVENTS, offset, limit, collect)
        except ChannelClosed as refused:
            if refused.code == ChannelClosed.NOT_FOUND:  # the stream was deleted: the next call declares it
                session.publisher.declared.discard(topology.EVENTS)
            raise


def _logged_event(offset: int, incoming: Incoming) -> LoggedEvent | None:
    """Return the event for a recorder; None for a recorder's registration, or a broadcast that is also in the
    log.
    """
    routing_key = incoming.fields[3]
    if routing_key != topology.EVENTS:  # a broadcast, copied by the binding
        return None if _is_logged(incoming) else LoggedEvent(offset, time(), routing_key, incoming.body)
    try:
        logged = _decode(incoming.body)
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
