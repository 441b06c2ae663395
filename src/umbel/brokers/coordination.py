"""CoordinationStore: the part of a broker that decides who does what is to be done once.

One for each broker (`*/coordination*.py`), each with the rules of
`protocol/leadership/coordination.py`; what they promise is in `docs/protocol/coordination.md`.
"""

from collections.abc import Sequence
from typing import Protocol

from umbel.protocol.leadership.coordination import ElectionRecord, ElectionReply, ElectionRequest, LeaseReply
from umbel.wire.message import Outgoing


class CoordinationStore(Protocol):
    """The atomic register of `docs/protocol/coordination.md`, judged by the store's clock."""

    unproven: int
    """Grants that no replica of the store confirmed in time; a fail-over may have forgotten them."""

    async def open_election(self, key: str, request: ElectionRequest) -> ElectionRecord: ...
    async def claim_election(
        self, key: str, holder: str, request: ElectionRequest, *, ttl_s: float
    ) -> ElectionReply: ...
    async def start_election(self, key: str, holder: str, term: int) -> bool: ...
    async def renew_election(self, key: str, holder: str, term: int) -> bool: ...
    async def finish_election(self, key: str, holder: str, term: int, outcome: str) -> bool: ...
    async def read_election(self, key: str) -> ElectionRecord | None: ...
    async def unfinished_elections(self, limit: int) -> Sequence[tuple[str, ElectionRecord]]: ...

    async def acquire_lease(self, name: str, holder: str, *, ttl_s: float) -> LeaseReply: ...
    async def renew_lease(self, name: str, holder: str, term: int, *, ttl_s: float) -> bool: ...
    async def release_lease(self, name: str, holder: str, term: int) -> bool: ...
    async def update_lease(self, name: str, holder: str, term: int, data: bytes) -> bool: ...
    async def read_lease(self, name: str) -> LeaseReply: ...
    async def fenced_publish(
        self, name: str, holder: str, term: int, batch: Sequence[Outgoing], *, data: bytes | None = None
    ) -> bool:
        """Publish if the lease is held, and with `data` leave that for the next holder, in one step.

        Where there is no such step (`Capabilities.reasons`), the data is left first: who dies in
        between has published nothing, and nobody publishes it again.
        """
        ...

    async def release_unique(self, held: Sequence[tuple[str, str]]) -> None:
        """(key, task id): free each key that this task holds."""
        ...

    async def raise_clock(self, value: int) -> int:
        """Raise the cluster's clock mark to at least `value`; the mark after that."""
        ...
