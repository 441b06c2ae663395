"""SqliteAsyncProducer: publishing from an event loop, in one thread beside it.

A call that has begun runs to its end in the thread although its caller has gone: what was sent is then not
known. It is remembered, in the same transaction, so the same message again is not sent twice.
"""

from collections.abc import Sequence

from umbel.brokers.interface import SENT_REMEMBERED_S, Attempt, BrokerSettings, Capabilities
from umbel.brokers.sqlite.broker import CAPABILITIES, WORK_S
from umbel.brokers.sqlite.cluster_store import ClusterStore
from umbel.brokers.sqlite.store import Store
from umbel.brokers.sqlite.thread import StoreThread
from umbel.wire.message import Outgoing


class SqliteAsyncProducer:
    repeats = True

    def __init__(self, settings: BrokerSettings) -> None:
        self._store = Store(settings)
        self._cluster = ClusterStore(self._store)
        timeout_s = 3 * settings.connect_timeout_s + WORK_S
        self._thread = StoreThread(f"the database {self._store.database.path}", timeout_s=timeout_s)

    @property
    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    async def publish(self, batch: Sequence[Outgoing], attempt: Attempt) -> None:
        def work() -> None:
            attempt.is_out = True
            self._store.publish_once(batch, remembered_s=SENT_REMEMBERED_S)

        await self._thread.call(work)

    async def hold_unique(self, key: str, task_id: str, *, ttl_s: float) -> str:
        return await self._thread.call(self._cluster.hold_unique, key, task_id, ttl_s)

    async def release_unique(self, held: Sequence[tuple[str, str]]) -> None:
        await self._thread.call(self._cluster.release_unique, held)

    async def close(self) -> None:
        self.abandon()

    def abandon(self) -> None:
        """The thread closes the file when it has done what it had begun."""
        self._thread.post(self._store.close)
        self._thread.stop(cancel=False)
