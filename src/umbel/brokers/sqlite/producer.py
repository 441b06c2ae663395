"""SqliteProducer: the store of a client, which publishes, revokes and broadcasts."""

from collections.abc import Sequence

from umbel.brokers.interface import Broadcast, BrokerSettings, Capabilities
from umbel.brokers.sqlite.broker import CAPABILITIES
from umbel.brokers.sqlite.cluster_store import ClusterStore
from umbel.brokers.sqlite.store import Store


class SqliteProducer(Store):
    def __init__(self, settings: BrokerSettings) -> None:
        super().__init__(settings)
        self._cluster = ClusterStore(self)

    @property
    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    def broadcast(self, batch: Sequence[Broadcast], *, ttl_s: float) -> None:
        self._cluster.broadcast(batch, ttl_s)

    def log_events(self, entries: Sequence[tuple[str, bytes]], *, counts: Sequence[int] = ()) -> int:
        return self._cluster.log_events(entries, counts)

    def hold_unique(self, key: str, task_id: str, *, ttl_s: float) -> str:
        return self._cluster.hold_unique(key, task_id, ttl_s)

    def release_unique(self, held: Sequence[tuple[str, str]]) -> None:
        self._cluster.release_unique(held)
