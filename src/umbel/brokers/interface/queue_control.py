"""QueueControl: queues are paused, resumed, and their waiting messages moved to another queue.

A pause is one durable mark in the broker, which every claim looks at. So it holds for workers that start
later or were cut off while it was set, and needs no message to reach anybody.
"""

from collections.abc import Mapping
from typing import Protocol

import msgspec

from umbel.brokers.interface.connection import BrokerInfo

MOVED_AT_ONCE_MAX = 500
PAUSED_MAX = 1000


class Pause(msgspec.Struct, frozen=True):
    """Since when a queue is paused. `told`: nodes that do not look at the mark, and were told to stop."""

    since: float
    told: tuple[str, ...] = ()


class QueueControl(BrokerInfo, Protocol):
    """Where something cannot be moved, `BrokerRefused` says what it is and what to do."""

    async def pause(self, queue: str, mark: Pause) -> None:
        """No claim takes from the queue until it is resumed; claims that stand are not touched."""
        ...

    async def resume(self, queue: str) -> bool:
        """Claims take from it again; whether it was paused."""
        ...

    async def paused(self) -> Mapping[str, Pause]: ...
    async def move(self, source: str, target: str, limit: int) -> int:
        """Move up to `limit` waiting messages, due or not, at most MOVED_AT_ONCE_MAX; how many were.

        Each is in one of the two queues at any moment; on RabbitMQ for a moment in both. Claims stay.
        0: nothing waits.
        """
        ...
