"""SqliteProducer: publishing from any thread, before or after a fork, durable on return."""

from collections.abc import Sequence

from umbel.brokers.interface import Broadcast, BrokerSettings, Capabilities
from umbel.brokers.sqlite.broker import CAPABILITIES
from umbel.brokers.sqlite.cluster_store import ClusterStore
from umbel.brokers.sqlite.store import Store
from umbel.wire.message import Outgoing
from umbel.wire.revoke import Revoke


class SqliteProducer:
    def __init__(self, settings: BrokerSettings) -> None:
        self._store = Store(settings)
        self._cluster = ClusterStore(self._store)

    @property
    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    def publish(self, batch: Sequence[Outgoing]) -> None:
        self._store.publish(batch)

    def revoke(self, revokes: Sequence[Revoke]) -> None:
        self._store.revoke(revokes)

    def broadcast(self, batch: Sequence[Broadcast], *, ttl_s: float) -> None:
        self._cluster.broadcast(batch, ttl_s)

    def log_events(self, events: Sequence[tuple[str, bytes]]) -> int:
        return self._cluster.log_events(events)

    def hold_unique(self, key: str, task_id: str, *, ttl_s: float) -> str:
        return self._cluster.hold_unique(key, task_id, ttl_s)

    def release_unique(self, held: Sequence[tuple[str, str]]) -> None:
        self._cluster.release_unique(held)

    def close(self) -> None:
        self._store.close()
