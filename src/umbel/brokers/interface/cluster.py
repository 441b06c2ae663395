"""ClusterRecord: what all nodes share through the broker, and know of one another by it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from umbel.brokers.evidence import Evidence
from umbel.brokers.interface.connection import BrokerInfo
from umbel.wire.revoke import Revoke

if TYPE_CHECKING:  # clients and running tasks have no use for it
    from umbel.brokers.coordination import CoordinationStore


class ClusterRecord(BrokerInfo, Protocol):
    """Elections and leases (`coordination`), revoked tasks, the store's clock, marks of nodes that live."""

    @property
    def coordination(self) -> "CoordinationStore": ...
    async def revoke(self, revokes: Sequence[Revoke]) -> None:
        """Record that these tasks must not start; RevokesFull when the record is at its limit."""
        ...

    async def store_time(self) -> float | None:
        """Unix time by the store's own clock; None where it has none that all nodes share."""
        ...

    async def mark_alive(self, node: str, incarnation: int, *, ttl_s: float) -> None:
        """Let `probe` find this run of the node for as long; on RabbitMQ its mailbox does that."""
        ...

    async def probe(self, node: str, incarnation: int = 0) -> Evidence:
        """What is known of a node that is silent; with an incarnation, of that run of it.

        RabbitMQ knows whose connection has ended, but not which run of a node is connected, and
        takes a node for gone that never subscribed to its mailbox.
        """
        ...
