"""Composed producers: publishing on one broker, with a coordination store for what it cannot do."""

from collections.abc import Sequence

from msgspec.structs import replace

from umbel.brokers.interface import AsyncProducer, Attempt, Broadcast, Capabilities, Producer
from umbel.clock import cluster_now
from umbel.events.stamp import EVENT_EXCHANGE
from umbel.wire.message import Outgoing

# The abilities that the store adds; if the store lacks one too, the reason is the store's.
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
    """Return the capabilities of both: those in FROM_STORE, with their reasons, are the store's."""
    added = {ability: getattr(store, ability) for ability in FROM_STORE}
    reasons = {name: why for name, why in messages.reasons.items() if name not in FROM_STORE}
    reasons |= {name: store.reasons[name] for name in FROM_STORE if name in store.reasons}
    if "fenced_publish" in store.reasons:
        reasons["fenced_publish"] = store.reasons["fenced_publish"]
    return replace(messages, **added, events_of_others=store.events_of_others, reasons=reasons)


def split_by_due(batch: Sequence[Outgoing], now: float) -> tuple[Sequence[Outgoing], Sequence[Outgoing]]:
    """Return the messages to send now, and those that wait in the store until they are due.

    The broker of messages delays a message for an exchange itself: only it knows the exchange's queues.
    """
    if not any(outgoing.not_before > now for outgoing in batch):
        return batch, ()
    due: list[Outgoing] = []
    later: list[Outgoing] = []
    for outgoing in batch:
        (later if outgoing.not_before > now and not outgoing.exchange else due).append(outgoing)
    return due, later


def split_events(batch: Sequence[Broadcast]) -> tuple[list[Broadcast], list[Broadcast]]:
    """Return the events, which go through the store, and the other broadcasts."""
    events = [broadcast for broadcast in batch if broadcast.exchange == EVENT_EXCHANGE]
    return events, [broadcast for broadcast in batch if broadcast.exchange != EVENT_EXCHANGE]


class ComposedProducer:
    """Two blocking producers as one."""

    def __init__(self, messages: Producer, store: Producer) -> None:
        self._messages = messages
        self._store = store
        self.capabilities = composed(messages.capabilities, store.capabilities)
        self.revoke = store.revoke
        self.log_events = store.log_events
        self.hold_unique = store.hold_unique
        self.release_unique = store.release_unique
        self.cluster_id = store.cluster_id

    def publish(self, batch: Sequence[Outgoing]) -> None:
        """Publish task messages; delayed ones wait in the store."""
        due, later = split_by_due(batch, cluster_now())
        if due:
            self._messages.publish(due)
        if later:
            self._store.publish(later)

    def broadcast(self, batch: Sequence[Broadcast], *, ttl_s: float) -> None:
        """Send events through the store, and everything else through the broker of messages."""
        events, others = split_events(batch)
        if events:
            self._store.broadcast(events, ttl_s=ttl_s)
        if others:
            self._messages.broadcast(others, ttl_s=ttl_s)

    def close(self) -> None:
        """Close both producers."""
        self._messages.close()
        self._store.close()


class ComposedAsyncProducer:
    """Two asynchronous producers as one."""

    def __init__(self, messages: AsyncProducer, store: AsyncProducer) -> None:
        self._messages = messages
        self._store = store
        self.capabilities = composed(messages.capabilities, store.capabilities)
        self.repeats = messages.repeats and store.repeats
        self.hold_unique = store.hold_unique
        self.release_unique = store.release_unique

    async def publish(self, batch: Sequence[Outgoing], attempt: Attempt) -> None:
        """Publish task messages; delayed ones wait in the store."""
        due, later = split_by_due(batch, cluster_now())
        if due:
            await self._messages.publish(due, attempt)
        if later:
            await self._store.publish(later, attempt)

    async def close(self) -> None:
        """Close both producers."""
        await self._messages.close()
        await self._store.close()

    def abandon(self) -> None:
        """Forget the connections, whose event loop is closed."""
        self._messages.abandon()
        self._store.abandon()
