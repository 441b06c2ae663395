"""Event log: a stream, read by recorders from where they stopped.

Entries are written while a recorder is registered, which the facts tell. RabbitMQ bounds a stream
by bytes and age; the bound by number is kept here, by the reader: of what a recorder has not
acknowledged it gets the newest `event_log_max`, and what was passed over is counted as lost.

While a recorder is registered the stream is also bound to the exchange of events, so what Celery's
nodes tell is in it as they sent it. Our own workers say of what they broadcast whether it is in the
log by itself; that is passed over.

Offsets are the stream's, from 1. A recorder's registration is an entry too, so that it knows
where it begins: offsets grow, but not always by one. The stream counts entries, so each of our events is
one by itself.
"""

import struct
from collections.abc import Callable, Sequence
from time import monotonic, time

import msgspec

from umbel.brokers.amqp import topology
from umbel.brokers.amqp.frames import Incoming
from umbel.brokers.amqp.outbox import entry, log_entries
from umbel.brokers.amqp.properties import decode_properties
from umbel.brokers.amqp.records import LogEntry, RecorderFact, encode_record
from umbel.brokers.amqp.refusals import ChannelClosed
from umbel.brokers.amqp.session import Session
from umbel.brokers.amqp.streams import read_stream
from umbel.brokers.interface import BrokerSettings, EventLogState, LoggedEvent
from umbel.wire.event import LOGGED
from umbel.wire.values import UNREADABLE

KEPT_FRESH_S = 2.0  # who reads ahead need not ask each time what the limit leaves
_decoder = msgspec.json.Decoder(LogEntry)


class EventLog:
    def __init__(self, settings: BrokerSettings) -> None:
        self._settings = settings
        self._kept_from = 0  # entries before this place count as dropped
        self._kept_asked_at = -KEPT_FRESH_S

    async def register(self, session: Session, name: str) -> int:
        await self._ready(session)
        await self._bind(session, topology.event_binding())
        known = session.views.facts.recorders.get(name)
        if known is not None:
            return known
        await session.publisher.send([entry(topology.EVENTS, encode_record(LogEntry(time(), "", name)))])
        start = await self._last_offset(session)
        await self._tell(session, RecorderFact(name, start))
        return start

    async def forget(self, session: Session, name: str) -> None:
        await self._ready(session)
        if not session.views.facts.recorders.keys() - {name}:
            await self._bind(session, topology.event_unbinding())
        await self._tell(session, RecorderFact(name, None))

    async def append(
        self, session: Session, entries: Sequence[tuple[str, bytes]], counts: Sequence[int]
    ) -> int:
        if not session.views.facts.recorders or not entries:
            return 0
        await self._ready(session)
        await session.publisher.send(log_entries(entries, counts, time()))
        return len(entries)

    async def read(self, session: Session, name: str, limit: int, after: int) -> list[LoggedEvent]:
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
        if not found and passed > first:  # nothing to read so far, but there may be more behind it
            return [LoggedEvent(passed, time(), "", b"")]
        return found

    async def acknowledge(self, session: Session, name: str, offset: int) -> None:
        await self._ready(session)
        before = session.views.facts.recorders.get(name)
        if before is None or offset <= before:
            return
        passed_over = await self._last_offset(session) - self._settings.event_log_max - before
        await self._tell(session, RecorderFact(name, offset, lost=max(0, min(passed_over, offset - before))))

    async def lost(self, session: Session) -> int:
        """Those that recorders have passed over, and those that the slowest will have to."""
        await self._ready(session)
        facts = session.views.facts
        if not facts.recorders:
            return facts.lost
        kept_from = await self._last_offset(session) - self._settings.event_log_max
        return facts.lost + max(0, kept_from - min(facts.recorders.values()))

    async def state(self, session: Session) -> EventLogState:
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

    async def _last_offset(self, session: Session) -> int:
        last = 0

        def keep(offset: int, _: Incoming) -> None:
            nonlocal last
            last = max(last, offset + 1)

        await self._read_stream(session, "last", 1_000_000, keep)
        return last

    async def _read_stream(
        self, session: Session, offset: int | str, limit: int, keep: Callable[[int, Incoming], None]
    ) -> None:
        try:
            await read_stream(session.link, topology.EVENTS, offset, limit, keep)
        except ChannelClosed as refused:
            if refused.code == ChannelClosed.NOT_FOUND:  # deleted by somebody: the next call makes it
                session.publisher.declared.discard(topology.EVENTS)
            raise


def _logged_event(offset: int, incoming: Incoming) -> LoggedEvent | None:
    """What a recorder is to read; None for a recorder's registration, or what is in the log anyway."""
    routing_key = incoming.fields[3]
    if routing_key != topology.EVENTS:  # from the exchange of events, as it was broadcast
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
    try:
        return bool((decode_properties(incoming.properties).headers or {}).get(LOGGED))
    except (ValueError, IndexError, struct.error):
        return False
