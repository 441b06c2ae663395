"""The event log: a stream that keeps what happened until recorders have read it (`event_log.lua`)."""

from collections.abc import Sequence

from umbel.brokers.interface import EventLogState, LoggedEvent
from umbel.brokers.redis.keys import Keys
from umbel.brokers.redis.link import Link
from umbel.brokers.redis.scripts import script

SWEEP_MAX = 100  # entries at once, with all their events: the server waits meanwhile
_LOG = script("event_log")


async def register(link: Link, keys: Keys, name: str) -> int:
    acknowledged: int = await link.run(_LOG, "register", keys.prefix, name)
    return acknowledged


async def append(
    link: Link, keys: Keys, entries: Sequence[tuple[str, bytes]], counts: Sequence[int], most: int
) -> int:
    if not entries:
        return 0
    kept: int = await link.run(_LOG, *append_arguments(keys, entries, counts, most))
    return kept


def append_arguments(
    keys: Keys, entries: Sequence[tuple[str, bytes]], counts: Sequence[int], most: int
) -> list[str | bytes | int]:
    arguments: list[str | bytes | int] = ["append", keys.prefix, most]
    for (key, body), count in zip(entries, counts or [1] * len(entries), strict=True):
        arguments += (key, count, body)
    return arguments


async def read(link: Link, keys: Keys, name: str, limit: int, after: int) -> list[LoggedEvent]:
    """The events after what the recorder has acknowledged, oldest first."""
    acknowledged = await link.call("HGET", keys.recorders, name)
    if acknowledged is None:
        return []
    place = max(int(acknowledged), after)
    found = await link.call("XRANGE", keys.events, f"{place + 1}-0", f"{place + limit}-0")
    if not found:  # the next entry may be longer than that, or those before it are gone
        found = await link.call("XRANGE", keys.events, f"{place + 1}-0", "+", "COUNT", 1)
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


async def sweep(link: Link, keys: Keys, older_than: float) -> bool:
    """Whether there may be more to remove."""
    swept: int = await link.run(_LOG, "sweep", keys.prefix, f"{older_than:.6f}", SWEEP_MAX)
    return swept >= SWEEP_MAX
