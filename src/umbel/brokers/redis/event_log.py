"""The event log: a stream that keeps what happened until recorders have read it (`event_log.lua`)."""

from collections.abc import Sequence

from umbel.brokers.interface import EventLogState, LoggedEvent
from umbel.brokers.redis.keys import Keys
from umbel.brokers.redis.link import Link
from umbel.brokers.redis.scripts import script

_LOG = script("event_log")


async def register(link: Link, keys: Keys, name: str) -> int:
    acknowledged: int = await link.run(_LOG, "register", keys.prefix, name)
    return acknowledged


async def append(link: Link, keys: Keys, events: Sequence[tuple[str, bytes]], most: int) -> int:
    if not events:
        return 0
    kept: int = await link.run(_LOG, *append_arguments(keys, events, most))
    return kept


def append_arguments(keys: Keys, events: Sequence[tuple[str, bytes]], most: int) -> list[str | bytes | int]:
    return ["append", keys.prefix, most, *(part for event in events for part in event)]


async def read(link: Link, keys: Keys, name: str, limit: int, after: int) -> list[LoggedEvent]:
    """The events after what the recorder has acknowledged, oldest first."""
    acknowledged = await link.call("HGET", keys.recorders, name)
    if acknowledged is None:
        return []
    first = max(int(acknowledged), after) + 1
    found = await link.call("XRANGE", keys.events, f"{first}-0", "+", "COUNT", limit)
    return [_event(int(stream_id.partition(b"-")[0]), fields) for stream_id, fields in found]


def _event(offset: int, fields: list[bytes]) -> LoggedEvent:
    """What others wrote into the stream has nothing to read, but a place."""
    try:
        return LoggedEvent(offset, float(fields[1]), fields[3].decode(), fields[5])
    except (ValueError, IndexError):
        return LoggedEvent(offset, 0.0, "", b"")


async def acknowledge(link: Link, keys: Keys, name: str, offset: int) -> None:
    await link.run(_LOG, "acknowledge", keys.prefix, name, offset)


async def lost(link: Link, keys: Keys) -> int:
    return int(await link.call("GET", keys.events_lost) or 0)


async def state(link: Link, keys: Keys) -> EventLogState:
    last, recorders = await link.call_all([("GET", keys.events_offset), ("HGETALL", keys.recorders)])
    pairs = (
        recorders.items()
        if isinstance(recorders, dict)
        else zip(recorders[::2], recorders[1::2], strict=True)
    )
    acknowledged = {name.decode(): int(offset) for name, offset in pairs}
    return EventLogState(int(last or 0), acknowledged, await lost(link, keys))


async def sweep(link: Link, keys: Keys, older_than: float, most: int) -> int:
    swept: int = await link.run(_LOG, "sweep", keys.prefix, f"{older_than:.6f}", most)
    return swept
