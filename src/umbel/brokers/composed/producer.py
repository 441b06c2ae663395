"""ComposedProducer: publishing on one broker, with a coordination store for what it cannot do."""

from collections.abc import Sequence

from msgspec.structs import replace

from umbel.brokers.interface import AsyncProducer, Attempt, Broadcast, Capabilities, Producer
from umbel.clock import cluster_now
from umbel.events.stamp import EVENT_EXCHANGE
from umbel.protocol.delivery.trust import ClusterId
from umbel.wire.message import Outgoing
from umbel.wire.records import Revoke

# ---- capabilities ----------------------------------------------------------------------------------
#
# What a broker of messages can do together with a coordination store.

# The abilities that the store adds, each with its reason if the store lacks it too.
FROM_STORE = (
    "leases",
    "event_log",
    "unique",
    "limits",
    "events",
    "revokes",
    "pauses",
    "failures",
    "marks",
    "delayed",
)


def composed(messages: Capabilities, store: Capabilities) -> Capabilities:
    """The capabilities of both: from the store those in FROM_STORE, with their reasons, the others from the
    messages' broker.
    """
    brought = {ability: getattr(store, ability) for ability in FROM_STORE}
    reasons = {name: why for name, why in messages.reasons.items() if name not in FROM_STORE}
    reasons |= {name: store.reasons[name] for name in FROM_STORE if name in store.reasons}
    if "fenced_publish" in store.reasons:
        reasons["fenced_publish"] = store.reasons["fenced_publish"]
    return replace(messages, **brought, events_of_others=store.events_of_others, reasons=reasons)


# ---- composed producer -----------------------------------------------------------------------------
#
# Publishing on one broker, with a coordination store for what it cannot do.


def _split_by_due(batch: Sequence[Outgoing]) -> tuple[Sequence[Outgoing], Sequence[Outgoing]]:
    """What is sent now, and what waits in the store until it is due."""
    now = cluster_now()
    if not any(outgoing.not_before > now for outgoing in batch):
        return batch, ()
    waits = [outgoing.not_before > now and not outgoing.exchange for outgoing in batch]
    return (
        [outgoing for outgoing, later in zip(batch, waits, strict=True) if not later],
        [outgoing for outgoing, later in zip(batch, waits, strict=True) if later],
    )


class ComposedProducer:
    """Two blocking producers as one."""

    def __init__(self, messages: Producer, store: Producer) -> None:
        self._messages = messages
        self._store = store
        self._capabilities = composed(messages.capabilities, store.capabilities)

    @property
    def capabilities(self) -> Capabilities:
        """What both can do together."""
        return self._capabilities

    def publish(self, batch: Sequence[Outgoing]) -> None:
        """Send task messages; those that are not due wait in the store."""
        now, later = _split_by_due(batch)
        if now:
            self._messages.publish(now)
        if later:
            self._store.publish(later)

    def revoke(self, revokes: Sequence[Revoke]) -> None:
        """Record revokes in the store, for all workers."""
        self._store.revoke(revokes)

    def broadcast(self, batch: Sequence[Broadcast], *, ttl_s: float) -> None:
        """Send to all listeners; events through the store, everything else through the broker of messages."""
        for producer in (self._store, self._messages):
            share = [
                broadcast
                for broadcast in batch
                if (broadcast.exchange == EVENT_EXCHANGE) is (producer is self._store)
            ]
            if share:
                producer.broadcast(share, ttl_s=ttl_s)

    def log_events(self, entries: Sequence[tuple[str, bytes]], *, counts: Sequence[int] = ()) -> int:
        """Append events to the store's event log; how many entries were logged."""
        return self._store.log_events(entries, counts=counts)

    def hold_unique(self, key: str, task_id: str, *, ttl_s: float) -> str:
        """Take the key of a unique task in the store; the id of the task that has it."""
        return self._store.hold_unique(key, task_id, ttl_s=ttl_s)

    def release_unique(self, held: Sequence[tuple[str, str]]) -> None:
        """Give up keys of unique tasks in the store."""
        self._store.release_unique(held)

    def cluster_id(self) -> ClusterId | None:
        """The id that signatures are bound to, from the store."""
        return self._store.cluster_id()

    def close(self) -> None:
        """Close both producers."""
        self._messages.close()
        self._store.close()


class ComposedAsyncProducer:
    """Two asynchronous producers as one."""

    def __init__(self, messages: AsyncProducer, store: AsyncProducer) -> None:
        self._messages = messages
        self._store = store
        self._capabilities = composed(messages.capabilities, store.capabilities)

    @property
    def repeats(self) -> bool:
        """Whether both send again by themselves without the risk of a second run."""
        return self._messages.repeats and self._store.repeats

    @property
    def capabilities(self) -> Capabilities:
        """What both can do together."""
        return self._capabilities

    async def publish(self, batch: Sequence[Outgoing], attempt: Attempt) -> None:
        """Send task messages; those that are not due wait in the store."""
        now, later = _split_by_due(batch)
        if now:
            await self._messages.publish(now, attempt)
        if later:
            await self._store.publish(later, attempt)

    async def hold_unique(self, key: str, task_id: str, *, ttl_s: float) -> str:
        """Take the key of a unique task in the store; the id of the task that has it."""
        return await self._store.hold_unique(key, task_id, ttl_s=ttl_s)

    async def release_unique(self, held: Sequence[tuple[str, str]]) -> None:
        """Give up keys of unique tasks in the store."""
        await self._store.release_unique(held)

    async def close(self) -> None:
        """Close both producers."""
        await self._messages.close()
        await self._store.close()

    def abandon(self) -> None:
        """Forget the connections, whose event loop is closed."""
        self._messages.abandon()
        self._store.abandon()
