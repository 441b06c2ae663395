"""EventLog: what happened, kept until every recorder has acknowledged it."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from umbel.brokers.interface.connection import BrokerInfo


class LoggedEvent(msgspec.Struct, frozen=True, gc=False):
    """One entry: an event, or a list of them; then the offset is that of its last event."""

    offset: int
    recorded_at: float
    routing_key: str
    body: bytes


class EventLogState(msgspec.Struct, frozen=True):
    """The event log as a whole: its last offset, and how far each recorder has acknowledged it."""

    last_offset: int
    acknowledged: Mapping[str, int]
    lost: int


class EventLog(BrokerInfo, Protocol):
    """Keeps events while a recorder is registered, and drops the oldest at its limit."""

    async def register_recorder(self, name: str) -> int:
        """From now on events are logged for this reader; the offset it has acknowledged."""
        ...

    async def forget_recorder(self, name: str) -> None: ...
    async def recorders(self) -> Sequence[str]: ...
    async def log_events(self, entries: Sequence[tuple[str, bytes]], *, counts: Sequence[int] = ()) -> int:
        """Append (routing key, body) while a recorder is registered; how many entries were kept.

        `counts`: how many events each body holds, a JSON list where these are several; without it, one each.
        Limits and offsets count events.
        """
        ...

    async def read_events(self, name: str, limit: int, *, after: int = 0) -> Sequence[LoggedEvent]:
        """The next entries that this recorder has not acknowledged, and after that offset.

        They hold so many events at most, except that there is one entry if there is any.
        An entry without a routing key has nothing to read, but moves the reader's place.
        """
        ...

    async def acknowledge_events(self, name: str, offset: int) -> None: ...
    async def lost_events(self) -> int:
        """How many events the log dropped at its limit since it was made."""
        ...

    async def event_log(self) -> EventLogState: ...
