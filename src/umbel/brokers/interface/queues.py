"""Queues: what waits in them, and the dead letters, for people and for what watches the load."""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import msgspec

from umbel.brokers.interface.connection import BrokerInfo
from umbel.brokers.interface.messages import Delivery
from umbel.wire.message import Message

DEAD_LETTER_PEEK_MAX = 1000


class Depth(msgspec.Struct, frozen=True):
    """How many messages of a queue wait, are parked until due, are claimed, and wait for a cluster limit.

    `paused`: nobody takes from it for now.
    """

    ready: int
    delayed: int
    claimed: int
    limited: int = 0
    paused: bool = False


def ready_for(queues: Collection[str], depths: Mapping[str, Depth]) -> int:
    """How many messages a worker of these queues could take now: a paused queue has none for it."""
    return sum(depth.ready for name, depth in depths.items() if name in queues and not depth.paused)


class DeadLetter(msgspec.Struct, frozen=True):
    letter_id: int | str
    queue: str
    message: Message
    reason: str
    starts: int
    buried_at: float
    failed: bool = False  # a kept failure (`failures.py`)


class Queues(BrokerInfo, Protocol):
    """Queues and dead letters as a whole; no claim is made or ended here."""

    async def queues(self, only: Collection[str] | None = None) -> Mapping[str, Depth]:
        """How full they are. `only`: it is enough to know what is ready in these."""
        ...

    async def peek(self, queue: str, limit: int) -> Sequence[Delivery]: ...
    async def purge(self, queue: str) -> int: ...
    async def dead_letters(self, limit: int = DEAD_LETTER_PEEK_MAX) -> Sequence[DeadLetter]: ...
    async def requeue_dead(self, letter_ids: Sequence[int | str]) -> int:
        """Return dead letters to their queues with no starts counted; genuine ones are signed again."""
        ...

    async def drop_dead(self, letter_ids: Sequence[int | str]) -> int:
        """Remove dead letters for good; how many there were."""
        ...
