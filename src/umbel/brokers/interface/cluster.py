"""Cluster: what the nodes share through the broker besides messages.

Broadcasts (`FanOut`), the event log that recorders read (`EventLog`), and the cluster record
(`ClusterRecord`): elections, leases, revoked tasks, the cluster's id and clock, and which nodes are alive.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from enum import Enum
from typing import TYPE_CHECKING, Protocol

import msgspec

from umbel.brokers.interface.connection import BrokerInfo
from umbel.protocol.delivery.trust import ClusterId
from umbel.wire.records import Revoke

if TYPE_CHECKING:
    from umbel.brokers.coordination import CoordinationStore


# ---- fan out ---------------------------------------------------------------------------------------


class Broadcast(msgspec.Struct, frozen=True, gc=False):
    """One message of the fan-out: an event, a control request, a reply."""

    exchange: str
    routing_key: str
    body: bytes
    headers: bytes = b"{}"


class Subscription(Protocol):
    """The broadcasts since the subscription was entered, in order. Only broadcasts that outlive their TTL are
    lost.
    """

    def __aiter__(self) -> AsyncIterator[Broadcast]: ...


class FanOut(BrokerInfo, Protocol):
    """Sends broadcasts to all listeners, and listens."""

    async def broadcast(self, batch: Sequence[Broadcast], *, ttl_s: float) -> int | None:
        """Send to all listeners; return how many subscriptions received it, None where the broker does not
        count them.

        A broker that does not count may still know that no node received a control request
        (`Capabilities.reports_nobody`).
        """

    def subscribe(
        self, exchange: str, patterns: Sequence[str], *, unread_ttl_s: float | None = None
    ) -> AbstractAsyncContextManager[Subscription]:
        """Listen on routing keys; `*` is one word, `#` any number, like in AMQP.

        Two exchanges differ (`wire/control.py`). On that of control requests every node receives everything,
        and the one pattern is the name of the listening node. On that of replies each pattern is a literal
        routing key, and replies sent to it before the listener came wait for it.

        `unread_ttl_s`: events that this listener has not read for so long are dropped, where the broker has a
        queue for each listener; elsewhere the sender sets that time (`broadcast`).
        """


# ---- event log -------------------------------------------------------------------------------------


class LoggedEvent(msgspec.Struct, frozen=True, gc=False):
    """One entry: an event, or a list of events; then the offset is that of the last one."""

    offset: int
    recorded_at: float
    routing_key: str
    body: bytes


class EventLogState(msgspec.Struct, frozen=True):
    """The event log as a whole: its last offset, how far each recorder has acknowledged it, and how many
    events were lost.
    """

    last_offset: int
    acknowledged: Mapping[str, int]
    lost: int


class EventLog(BrokerInfo, Protocol):
    """Stores events while a recorder is registered, until every recorder has acknowledged them; drops the
    oldest at its limit.
    """

    async def register_recorder(self, name: str) -> int:
        """Log events for this recorder from now on; return the offset it has acknowledged."""

    async def forget_recorder(self, name: str) -> None:
        """Remove a recorder; events are no longer retained for it."""

    async def recorders(self) -> Sequence[str]:
        """Return the names of the registered recorders, sorted."""

    async def log_events(self, entries: Sequence[tuple[str, bytes]], *, counts: Sequence[int] = ()) -> int:
        """Append (routing key, body) while a recorder is registered; return how many entries were stored.

        `counts`: how many events each body holds, a JSON list if there are several; without it, one each.
        Limits and offsets count events.
        """

    async def read_events(self, name: str, limit: int, *, after: int = 0) -> Sequence[LoggedEvent]:
        """Return the next entries after that offset that this recorder has not acknowledged.

        They hold at most `limit` events, except that there is one entry if there is any. An entry without a
        routing key cannot be read, but moves the recorder's offset.
        """

    async def acknowledge_events(self, name: str, offset: int) -> None:
        """Record that this recorder has stored all events up to the offset."""

    async def lost_events(self) -> int:
        """Return how many events the log has dropped at its limit since it was made."""

    async def event_log(self) -> EventLogState:
        """Return the state of the whole log, for status pages and commands."""


# ---- cluster record --------------------------------------------------------------------------------


class Evidence(Enum):
    """What the broker knows of a node that has become silent."""

    ALIVE = "alive"  # its mark or its connection exists
    GONE = "gone"  # that run of the node has certainly ended
    UNKNOWN = "unknown"  # it has no mark: it is silent, or never sets one, like Celery's nodes


def judge_mark(found: int, incarnation: int) -> Evidence:
    """Return what a node's mark says about one run of it. Incarnations grow, so a newer one ends the
    older.
    """
    if not found or found < incarnation:
        return Evidence.UNKNOWN
    return Evidence.ALIVE if incarnation in (0, found) else Evidence.GONE


class ClusterRecord(BrokerInfo, Protocol):
    """Elections, leases (`coordination`), revoked tasks, the cluster's id and clock, marks of live nodes."""

    @property
    def coordination(self) -> "CoordinationStore":
        """The store of elections and leases."""

    async def revoke(self, revokes: Sequence[Revoke]) -> None:
        """Record that these tasks must not start; RevokesFull when the record is at its limit."""

    async def cluster_id(self) -> ClusterId | None:
        """Return the id that signatures are bound to; None: none was made, or it is lost."""

    async def keep_cluster_id(self, made: ClusterId) -> ClusterId:
        """Store this id unless there is one; return the stored one."""

    async def store_time(self) -> float | None:
        """Return Unix time by the store's own clock; None where it has no clock that all nodes share."""

    async def mark_alive(self, node: str, incarnation: int, *, ttl_s: float) -> None:
        """Let `probe` find this run of the node for `ttl_s`; on RabbitMQ the node's mailbox does that."""

    async def probe(self, node: str, incarnation: int = 0) -> Evidence:
        """Return what is known of a silent node; with an incarnation, of that run of it.

        RabbitMQ knows whose connection has ended, but not which run of a node is connected, and reports a
        node as gone that never subscribed to its mailbox.
        """
