"""Clients: what a program without a worker opens: the producers, and a view of the work that is pending.

`SqliteAsyncProducer` publishes from an event loop, in a separate thread. A call that has begun runs to its
end in the thread although its caller has gone, so the caller does not know whether the message was sent. The
message is remembered in the same transaction, so the same message again is not sent twice.
"""

from collections.abc import Collection, Sequence

from umbel.brokers.interface import SENT_REMEMBERED_S, Attempt, Broadcast, BrokerSettings, Capabilities
from umbel.brokers.sqlite import messages
from umbel.brokers.sqlite.broker import CAPABILITIES, WORK_S
from umbel.brokers.sqlite.cluster_store import ClusterStore
from umbel.brokers.sqlite.store import Store
from umbel.brokers.sqlite.thread import StoreThread
from umbel.wire.message import Outgoing

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


# ---- sqlite async producer -------------------------------------------------------------------------
#
# Publishing from an event loop, in a separate thread.
#
# A call that has begun runs to its end in the thread although its caller has gone, so the caller does not
# know whether the message was sent. The message is remembered in the same transaction, so the same message
# again is not sent twice.


class SqliteAsyncProducer:
    """The producer for the clients of one event loop, with a store in its own thread."""

    repeats = True

    def __init__(self, settings: BrokerSettings) -> None:
        self._store = Store(settings)
        self._cluster = ClusterStore(self._store)
        timeout_s = 3 * settings.connect_timeout_s + WORK_S
        self._thread = StoreThread(f"the database {self._store.database.path}", timeout_s=timeout_s)

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

    async def hold_unique(self, key: str, task_id: str, *, ttl_s: float) -> str:
        """Take the key if it is free; returns the id of the task that holds it now."""
        return await self._thread.call(self._cluster.hold_unique, key, task_id, ttl_s)

    async def release_unique(self, held: Sequence[tuple[str, str]]) -> None:
        """Free each key that its task holds."""
        await self._thread.call(self._cluster.release_unique, held)

    async def close(self) -> None:
        """Close the file when calls that have begun are done, without waiting for them."""
        self.abandon()

    def abandon(self) -> None:
        """Close the file in the thread when calls that have begun are done."""
        self._thread.post(self._store.close)
        self._thread.stop(cancel=False)


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
