"""FanOut: messages that every listener hears: events, control requests, replies."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import msgspec

from umbel.brokers.interface.connection import BrokerInfo


class Broadcast(msgspec.Struct, frozen=True, gc=False):
    """One message of the fan-out: an event, a control request, a reply."""

    exchange: str
    routing_key: str
    body: bytes
    headers: bytes = b"{}"


class Subscription(Protocol):
    """What was broadcast since the subscription was entered, in order. Lossy only by TTL."""

    def __aiter__(self) -> AsyncIterator[Broadcast]: ...


class FanOut(BrokerInfo, Protocol):
    """Sends to all who listen, and listens."""

    async def broadcast(self, batch: Sequence[Broadcast], *, ttl_s: float) -> int | None:
        """How many subscriptions heard it, where the broker counts them; else None.

        One that does not count may still know of a control request that nobody heard it.
        """
        ...

    def subscribe(
        self, exchange: str, patterns: Sequence[str], *, unread_ttl_s: float | None = None
    ) -> AbstractAsyncContextManager[Subscription]:
        """Listen on routing keys; `*` is one word, `#` any number, as AMQP has it.

        Two exchanges differ (`wire/control.py`): on that of control requests everybody hears
        everything, and the one pattern is the name of the node that listens; on that of replies
        each pattern is a routing key, taken as it is, and what was sent to it before the listener
        came for it waits for it.

        `unread_ttl_s`: events that this listener has not read for so long are dropped, where the broker
        keeps a queue for each listener; elsewhere who sends them says so (`broadcast`).
        """
        ...
