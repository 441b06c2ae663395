"""Clients: what a program without a worker and without an event loop opens on the embedded broker."""

from collections.abc import Collection, Sequence

from umbel.brokers.interface import Broadcast, BrokerSettings, Capabilities
from umbel.brokers.sqlite import messages
from umbel.brokers.sqlite.cluster_store import ClusterStore
from umbel.brokers.sqlite.store import CAPABILITIES, Store

# ---- producers -------------------------------------------------------------------------------------


class SqliteProducer(ClusterStore):
    """The synchronous producer: a store, called in the thread of the caller."""

    @property
    def capabilities(self) -> Capabilities:
        """What the embedded broker supports."""
        return CAPABILITIES

    def broadcast(self, batch: Sequence[Broadcast], *, ttl_s: float) -> None:
        """Write broadcasts that have a subscriber, and wake those."""
        super().broadcast(batch, ttl_s=ttl_s)


# ---- pending work ----------------------------------------------------------------------------------


class PendingWork:
    """How much work is pending in the file, for tests that run a worker.

    It claims nothing, uses a separate connection, and is to be used in one thread.
    """

    def __init__(self, settings: BrokerSettings) -> None:
        self._store = Store(settings)

    def left(self, queues: Collection[str]) -> int:
        """How many messages of these queues are due or claimed.

        A worker removes a message in the transaction that inserts its follow-ups: 0 means that no message
        comes by itself before the next delayed one is due.
        """
        with self._store.database.read() as db:
            depths = messages.depths(db)
            due = messages.next_due(db)
        left = sum(depth.ready + depth.claimed for name, depth in depths.items() if name in queues)
        return left or int(due is not None and due <= self._store.clock.wall_s())

    def next_due(self) -> float | None:
        """When the first delayed message is due, in Unix time."""
        with self._store.database.read() as db:
            return messages.next_due(db)

    def close(self) -> None:
        """Close the connection."""
        self._store.close()
