"""SqliteCoordination: the coordination store of the interface, called in the broker's thread."""

from collections.abc import Sequence

from umbel.brokers.sqlite.cluster_store import ClusterStore
from umbel.brokers.sqlite.thread import StoreThread
from umbel.protocol.leadership.coordination import ElectionRecord, ElectionReply, ElectionRequest, LeaseReply
from umbel.wire.message import Outgoing


class SqliteCoordination:
    def __init__(self, thread: StoreThread, store: ClusterStore) -> None:
        self._call = thread.call
        self._store = store
        self.unproven = 0  # it has no replicas

    async def open_election(self, key: str, request: ElectionRequest) -> ElectionRecord:
        return await self._call(self._store.open_election, key, request)

    async def claim_election(
        self, key: str, holder: str, request: ElectionRequest, *, ttl_s: float
    ) -> ElectionReply:
        return await self._call(self._store.claim_election, key, holder, request, ttl_s)

    async def start_election(self, key: str, holder: str, term: int) -> bool:
        return await self._call(self._store.start_election, key, holder, term)

    async def renew_election(self, key: str, holder: str, term: int) -> bool:
        return await self._call(self._store.renew_election, key, holder, term)

    async def finish_election(self, key: str, holder: str, term: int, outcome: str) -> bool:
        return await self._call(self._store.finish_election, key, holder, term, outcome)

    async def read_election(self, key: str) -> ElectionRecord | None:
        return await self._call(self._store.read_election, key)

    async def unfinished_elections(self, limit: int) -> Sequence[tuple[str, ElectionRecord]]:
        return await self._call(self._store.unfinished_elections, limit)

    async def acquire_lease(self, name: str, holder: str, *, ttl_s: float) -> LeaseReply:
        return await self._call(self._store.acquire_lease, name, holder, ttl_s)

    async def renew_lease(self, name: str, holder: str, term: int, *, ttl_s: float) -> bool:
        return await self._call(self._store.renew_lease, name, holder, term, ttl_s)

    async def release_lease(self, name: str, holder: str, term: int) -> bool:
        return await self._call(self._store.release_lease, name, holder, term)

    async def update_lease(self, name: str, holder: str, term: int, data: bytes) -> bool:
        return await self._call(self._store.update_lease, name, holder, term, data)

    async def read_lease(self, name: str) -> LeaseReply:
        return await self._call(self._store.read_lease, name)

    async def fenced_publish(
        self, name: str, holder: str, term: int, batch: Sequence[Outgoing], *, data: bytes | None = None
    ) -> bool:
        return await self._call(self._store.fenced_publish, name, holder, term, batch, data)

    async def release_unique(self, held: Sequence[tuple[str, str]]) -> None:
        await self._call(self._store.release_unique, held)

    async def raise_clock(self, value: int) -> int:
        return await self._call(self._store.raise_clock, value)
