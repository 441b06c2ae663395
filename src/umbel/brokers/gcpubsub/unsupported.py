"""Unsupported: what Pub/Sub cannot do without a coordination store, refused by name with its reason."""

from collections.abc import Collection, Mapping, Sequence
from typing import NoReturn

from umbel.brokers.evidence import Evidence
from umbel.brokers.gcpubsub.capabilities import CAPABILITIES
from umbel.brokers.interface import (
    DeadLetter,
    Depth,
    EventLogState,
    LoggedEvent,
    Pause,
    Permit,
    Refused,
    Resend,
    Resent,
    Spend,
    Tag,
)
from umbel.errors import NotSupported
from umbel.protocol.leadership.coordination import ElectionRecord, ElectionReply, ElectionRequest, LeaseReply
from umbel.wire.message import Outgoing
from umbel.wire.revoke import Revoke


def refuse(ability: str) -> NoReturn:
    raise NotSupported(CAPABILITIES.reasons[ability])


class NoCoordination:
    """Nobody decides here who does what is to be done once."""

    unproven = 0

    async def open_election(self, key: str, request: ElectionRequest) -> ElectionRecord:
        refuse("leases")

    async def claim_election(
        self, key: str, holder: str, request: ElectionRequest, *, ttl_s: float
    ) -> ElectionReply:
        refuse("leases")

    async def start_election(self, key: str, holder: str, term: int) -> bool:
        refuse("leases")

    async def renew_election(self, key: str, holder: str, term: int) -> bool:
        refuse("leases")

    async def finish_election(self, key: str, holder: str, term: int, outcome: str) -> bool:
        refuse("leases")

    async def read_election(self, key: str) -> ElectionRecord | None:
        refuse("leases")

    async def unfinished_elections(self, limit: int) -> Sequence[tuple[str, ElectionRecord]]:
        refuse("leases")

    async def acquire_lease(self, name: str, holder: str, *, ttl_s: float) -> LeaseReply:
        refuse("leases")

    async def renew_lease(self, name: str, holder: str, term: int, *, ttl_s: float) -> bool:
        refuse("leases")

    async def release_lease(self, name: str, holder: str, term: int) -> bool:
        refuse("leases")

    async def update_lease(self, name: str, holder: str, term: int, data: bytes) -> bool:
        refuse("leases")

    async def read_lease(self, name: str) -> LeaseReply:
        refuse("leases")

    async def fenced_publish(
        self, name: str, holder: str, term: int, batch: Sequence[Outgoing], *, data: bytes | None = None
    ) -> bool:
        refuse("leases")

    async def release_unique(self, held: Sequence[tuple[str, str]]) -> None:
        refuse("unique")

    async def raise_clock(self, value: int) -> int:
        """There is no mark that all share: nodes adjust their clocks by one another's hello."""
        return value


class Unsupported:
    """The part of the broker that refuses."""

    async def permit(self, asked: Sequence[Permit]) -> Mapping[Tag, str | None]:
        refuse("limits")

    async def spend(self, signatures: Sequence[Spend]) -> frozenset[Tag]:
        refuse("signatures")

    async def revoke(self, revokes: Sequence[Revoke]) -> None:
        refuse("revokes")

    async def queues(self, only: Collection[str] | None = None) -> Mapping[str, Depth]:
        refuse("depths")

    async def pause(self, queue: str, mark: Pause) -> None:
        refuse("pauses")

    async def resume(self, queue: str) -> bool:
        refuse("pauses")

    async def paused(self) -> Mapping[str, Pause]:
        return {}  # nothing can be

    async def keep_failed(self, failed: Sequence[Refused]) -> None:
        refuse("failures")

    async def failed(self, limit: int, *, task_id: str = "") -> Sequence[DeadLetter]:
        refuse("failures")

    async def resend(self, letters: Sequence[Resend]) -> Resent:
        refuse("failures")

    async def mark_alive(self, node: str, incarnation: int, *, ttl_s: float) -> None:
        refuse("marks")

    async def probe(self, node: str, incarnation: int = 0) -> Evidence:
        return Evidence.UNKNOWN

    async def store_time(self) -> float | None:
        return None  # it has none that could be asked for

    async def register_recorder(self, name: str) -> int:
        refuse("event_log")

    async def forget_recorder(self, name: str) -> None:
        refuse("event_log")

    async def recorders(self) -> Sequence[str]:
        refuse("event_log")

    async def log_events(self, entries: Sequence[tuple[str, bytes]], *, counts: Sequence[int] = ()) -> int:
        refuse("event_log")

    async def read_events(self, name: str, limit: int, *, after: int = 0) -> Sequence[LoggedEvent]:
        refuse("event_log")

    async def acknowledge_events(self, name: str, offset: int) -> None:
        refuse("event_log")

    async def lost_events(self) -> int:
        refuse("event_log")

    async def event_log(self) -> EventLogState:
        refuse("event_log")
