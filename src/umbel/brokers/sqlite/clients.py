"""Clients: the producers of programs without a worker, and a view of the work that is pending.

`SqliteAsyncProducer` publishes from an event loop, in a separate thread. A call that has begun runs to its
end in the thread even if its caller has gone, so the caller does not know whether the message was sent. The
message is remembered in the same transaction, so that the same message is not sent twice.
"""

from collections.abc import Collection, Sequence

from umbel.brokers.interface import SENT_REMEMBERED_S, Attempt, Broadcast, BrokerSettings, Capabilities
from umbel.brokers.sqlite import messages
from umbel.brokers.sqlite.broker import CAPABILITIES
from umbel.brokers.sqlite.cluster_store import ClusterStore
from umbel.brokers.sqlite.store import Store
from umbel.brokers.sqlite.thread import CallsStore, in_thread, thread_of
from umbel.wire.message import Outgoing

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


class SqliteAsyncProducer(CallsStore):
    """The producer for the clients of one event loop, with a store in its own thread."""

    repeats = True

    def __init__(self, settings: BrokerSettings) -> None:
        self._store = ClusterStore(settings)
        self._thread = thread_of(self._store)

    @property
    def capabilities(self) -> Capabilities:
        """What the embedded broker supports."""
        return CAPABILITIES

    async def publish(self, batch: Sequence[Outgoing], attempt: Attempt) -> None:
        """Publish the batch in one transaction; messages sent within SENT_REMEMBERED_S are left out."""

        def work() -> None:
            attempt.is_out = True
            self._store.publish_once(batch, remembered_s=SENT_REMEMBERED_S)

        await self._thread.call(work)

    hold_unique = in_thread(ClusterStore.hold_unique)
    release_unique = in_thread(ClusterStore.release_unique)

    async def close(self) -> None:
        """Close the file when calls that have begun are done, without waiting for them."""
        self.abandon()

    def abandon(self) -> None:
        """Close the file in the thread when calls that have begun are done."""
        self._thread.post(self._store.close)
        self._thread.stop(cancel=False)


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
