"""Clients: what a program without a worker and without an event loop opens on the embedded broker."""

from collections.abc import Collection, Sequence

from umbel.brokers.interface import Broadcast, BrokerSettings, Capabilities
from umbel.brokers.sqlite import messages
from umbel.brokers.sqlite.cluster_store import ClusterStore
from umbel.brokers.sqlite.store import CAPABILITIES, Store

# ---- sqlite producer -------------------------------------------------------------------------------
#
# The store of a client, which publishes, revokes and broadcasts.


class SqliteProducer(Store):
    """The synchronous producer: a store, and what the cluster shares."""

    def __init__(self, settings: BrokerSettings) -> None:
        super().__init__(settings)
        self._cluster = ClusterStore(self)

    @property
    def capabilities(self) -> Capabilities:
        """What the embedded broker supports."""
        return CAPABILITIES

    def broadcast(self, batch: Sequence[Broadcast], *, ttl_s: float) -> None:
        """Write broadcasts that have a subscriber, and wake those."""
        self._cluster.broadcast(batch, ttl_s)

    def log_events(self, entries: Sequence[tuple[str, bytes]], *, counts: Sequence[int] = ()) -> int:
        """Append events while a recorder is registered; how many entries were stored."""
        return self._cluster.log_events(entries, counts)

    def hold_unique(self, key: str, task_id: str, *, ttl_s: float) -> str:
        """Take the key if it is free; returns the id of the task that holds it now."""
        return self._cluster.hold_unique(key, task_id, ttl_s)

    def release_unique(self, held: Sequence[tuple[str, str]]) -> None:
        """Free each key that its task holds."""
        self._cluster.release_unique(held)


# ---- look ------------------------------------------------------------------------------------------
#
# How much work is pending in the broker's file, without claiming any. For tests that run a worker.


class PendingWork:
    """A view of the file over a separate connection; to be used in one thread."""

    def __init__(self, settings: BrokerSettings) -> None:
        self._store = Store(settings)

    def left(self, queues: Collection[str]) -> int:
        """How many messages of these queues are due or claimed.

        A worker removes a message in the transaction that inserts what follows from it: 0 says that nothing
        more comes by itself before the next delayed message is due.
        """
        with self._store.database.read() as db:
            depths = messages.depths(db)
            due = messages.next_due(db)
        left = sum(ready + claimed for name, (ready, _, claimed, _) in depths.items() if name in queues)
        return left or int(due is not None and due <= self._store.clock.wall_s())

    def next_due(self) -> float | None:
        """When the first delayed message is due, in Unix time."""
        with self._store.database.read() as db:
            return messages.next_due(db)

    def close(self) -> None:
        """Close the connection."""
        self._store.close()
