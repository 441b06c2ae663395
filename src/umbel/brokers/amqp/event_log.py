"""Event log: a stream, read by recorders from where they stopped.

Entries are written while a recorder is registered, which the facts tell. RabbitMQ bounds a stream
by bytes and age; the bound by number is kept here, by the reader: of what a recorder has not
acknowledged it gets the newest `event_log_max`, and what was passed over is counted as lost.

Offsets are the stream's, from 1. A recorder's registration is an entry too, so that it knows
where it begins: offsets grow, but not always by one.
"""

from time import time

import msgspec

from umbel.brokers.amqp import topology
from umbel.brokers.amqp.frames import Incoming
from umbel.brokers.amqp.outbox import entry, log_entries
from umbel.brokers.amqp.records import LogEntry, RecorderFact, encode_record
from umbel.brokers.amqp.session import Session
from umbel.brokers.amqp.streams import read_stream
from umbel.brokers.interface import BrokerSettings, LoggedEvent

_decoder = msgspec.json.Decoder(LogEntry)


class EventLog:
    def __init__(self, settings: BrokerSettings) -> None:
        self._settings = settings

    async def register(self, session: Session, name: str) -> int:
        await self._ready(session)
        known = session.views.facts.recorders.get(name)
        if known is not None:
            return known
        await session.publisher.send([entry(topology.EVENTS, encode_record(LogEntry(time(), "", name)))])
        start = await self._last_offset(session)
        await self._tell(session, RecorderFact(name, start))
        return start

    async def forget(self, session: Session, name: str) -> None:
        await self._tell(session, RecorderFact(name, None))

    async def append(self, session: Session, events: list[tuple[str, bytes]]) -> int:
        if not session.views.facts.recorders or not events:
            return 0
        await self._ready(session)
        await session.publisher.send(log_entries(events, time()))
        return len(events)

    async def read(self, session: Session, name: str, limit: int) -> list[LoggedEvent]:
        await self._ready(session)
        acknowledged = session.views.facts.recorders.get(name)
        if acknowledged is None:
            return []
        first = max(acknowledged, await self._last_offset(session) - self._settings.event_log_max)
        found: list[LoggedEvent] = []

        def keep(offset: int, incoming: Incoming) -> None:
            try:
                logged = _decoder.decode(incoming.body)
            except msgspec.MsgspecError:
                return
            if logged.routing_key and len(found) < limit:
                body = logged.body.encode("utf-8", "surrogateescape")
                found.append(LoggedEvent(offset + 1, logged.recorded_at, logged.routing_key, body))

        await read_stream(session.link, topology.EVENTS, first, limit, keep)
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

        await read_stream(session.link, topology.EVENTS, "last", 1_000_000, keep)
        return last
