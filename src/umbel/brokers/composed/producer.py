"""ComposedProducer: publishing by one broker, with a coordination store for what it cannot do."""

from collections.abc import Sequence

from umbel.brokers.composed.capabilities import composed
from umbel.brokers.interface import AsyncProducer, Attempt, Broadcast, Capabilities, Producer
from umbel.clock import cluster_now
from umbel.events.stamp import EVENT_EXCHANGE
from umbel.wire.message import Outgoing
from umbel.wire.revoke import Revoke


def _split(batch: Sequence[Outgoing]) -> tuple[Sequence[Outgoing], Sequence[Outgoing]]:
    """What is sent now, and what waits in the store."""
    now = cluster_now()
    if not any(one.not_before > now for one in batch):
        return batch, ()
    waits = [one.not_before > now and not one.exchange for one in batch]
    return (
        [one for one, later in zip(batch, waits, strict=True) if not later],
        [one for one, later in zip(batch, waits, strict=True) if later],
    )


class ComposedProducer:
    def __init__(self, messages: Producer, store: Producer) -> None:
        self._messages = messages
        self._store = store
        self._capabilities = composed(messages.capabilities, store.capabilities)

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def publish(self, batch: Sequence[Outgoing]) -> None:
        now, later = _split(batch)
        if now:
            self._messages.publish(now)
        if later:
            self._store.publish(later)

    def revoke(self, revokes: Sequence[Revoke]) -> None:
        self._store.revoke(revokes)

    def broadcast(self, batch: Sequence[Broadcast], *, ttl_s: float) -> None:
        for one in (self._store, self._messages):
            heard = [it for it in batch if (it.exchange == EVENT_EXCHANGE) is (one is self._store)]
            if heard:
                one.broadcast(heard, ttl_s=ttl_s)

    def log_events(self, entries: Sequence[tuple[str, bytes]], *, counts: Sequence[int] = ()) -> int:
        return self._store.log_events(entries, counts=counts)

    def hold_unique(self, key: str, task_id: str, *, ttl_s: float) -> str:
        return self._store.hold_unique(key, task_id, ttl_s=ttl_s)

    def release_unique(self, held: Sequence[tuple[str, str]]) -> None:
        self._store.release_unique(held)

    def close(self) -> None:
        self._messages.close()
        self._store.close()


class ComposedAsyncProducer:
    def __init__(self, messages: AsyncProducer, store: AsyncProducer) -> None:
        self._messages = messages
        self._store = store
        self._capabilities = composed(messages.capabilities, store.capabilities)

    @property
    def repeats(self) -> bool:
        return self._messages.repeats and self._store.repeats

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    async def publish(self, batch: Sequence[Outgoing], attempt: Attempt) -> None:
        now, later = _split(batch)
        if now:
            await self._messages.publish(now, attempt)
        if later:
            await self._store.publish(later, attempt)

    async def hold_unique(self, key: str, task_id: str, *, ttl_s: float) -> str:
        return await self._store.hold_unique(key, task_id, ttl_s=ttl_s)

    async def release_unique(self, held: Sequence[tuple[str, str]]) -> None:
        await self._store.release_unique(held)

    async def close(self) -> None:
        await self._messages.close()
        await self._store.close()

    def abandon(self) -> None:
        self._messages.abandon()
        self._store.abandon()
