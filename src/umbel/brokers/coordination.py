"""CoordinationStore: the part of a broker that decides which node does work that must be done once.

Each broker has one (`*/coordination*.py`), with the rules of `protocol/leadership/coordination.py`;
`docs/protocol/coordination.md` says what they promise.
"""

from collections.abc import Sequence
from typing import Protocol

from umbel.protocol.leadership.coordination import ElectionRecord, ElectionReply, ElectionRequest, LeaseReply
from umbel.wire.message import Outgoing


class CoordinationStore(Protocol):
    """The atomic register of `docs/protocol/coordination.md`, judged by the store's clock."""

    unproven: int
    """Grants that no replica of the store confirmed in time; a fail-over may have forgotten them."""

    async def open_election(self, key: str, request: ElectionRequest) -> ElectionRecord:
        """Create the election for this request, or return the record of the one that exists."""

    async def claim_election(
        self, key: str, holder: str, request: ElectionRequest, *, ttl_s: float
    ) -> ElectionReply:
        """Ask for the right to run the request: granted with a term, busy, or closed."""

    async def start_election(self, key: str, holder: str, term: int) -> bool:
        """Record that the holder has started the work; False if it does not hold this term."""

    async def renew_election(self, key: str, holder: str, term: int) -> bool:
        """Extend the holder's time; False if it does not hold this term."""

    async def finish_election(self, key: str, holder: str, term: int, outcome: str) -> bool:
        """Close the election with its outcome; False if the holder does not hold this term."""

    async def read_election(self, key: str) -> ElectionRecord | None:
        """Return the record of one election; None if there is none."""

    async def unfinished_elections(self, limit: int) -> Sequence[tuple[str, ElectionRecord]]:
        """Return up to `limit` elections that some node should claim, with their keys."""

    async def acquire_lease(self, name: str, holder: str, *, ttl_s: float) -> LeaseReply:
        """Take the lease if it is free; the reply names its holder, term and data either way."""

    async def renew_lease(self, name: str, holder: str, term: int, *, ttl_s: float) -> bool:
        """Extend the lease; False if the holder does not hold this term."""

    async def release_lease(self, name: str, holder: str, term: int) -> bool:
        """Free the lease; False if the holder does not hold this term."""

    async def update_lease(self, name: str, holder: str, term: int, data: bytes) -> bool:
        """Replace the data that the next holder reads; False if the holder does not hold this term."""

    async def read_lease(self, name: str) -> LeaseReply:
        """Return the state of the lease, without taking it."""

    async def fenced_publish(
        self, name: str, holder: str, term: int, batch: Sequence[Outgoing], *, data: bytes | None = None
    ) -> bool:
        """Publish if the lease is held, and with `data` store that for the next holder, in one step.

        Where there is no such step (`Capabilities.reasons`), the data is stored first: if the node dies in
        between, nothing was published and no other node publishes it.
        """

    async def release_unique(self, held: Sequence[tuple[str, str]]) -> None:
        """Free each (key, task id) that the task holds."""

    async def raise_clock(self, value: int) -> int:
        """Raise the cluster's clock mark to at least `value`; return the mark after that.

        A value that is no higher than the mark only reads it, which is cheap. Without a shared mark it
        returns `value`.
        """
