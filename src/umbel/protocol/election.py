"""Elections: one node's part in every election it knows of.

The store decides (`coordination.py`); this table decides when to ask it, when to act on its
answer, and when to stop believing it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from umbel.protocol.coordination import TTL_S, Instant
from umbel.protocol.election_events import Effect, Event, Snapshot
from umbel.protocol.machine import Tick

SPREAD_S = 0.25
RECORDS_MAX = 10_000
REQUEST_BYTES_MAX = 64 * 2**20


@dataclass(frozen=True, slots=True)
class ElectionSettings:
    namespace: str = "celery"
    ttl_s: float = TTL_S
    rpc_timeout_s: float = 1.0
    spread_s: float = SPREAD_S
    records_max: int = RECORDS_MAX
    request_bytes_max: int = REQUEST_BYTES_MAX


class Elections:
    """`nodes` is the estimated number of workers; set it whenever membership changes."""

    def __init__(
        self,
        node: str,
        holder: str,
        topics: frozenset[str],
        settings: ElectionSettings,
        uniform: Callable[[float, float], float],
    ) -> None:
        self.nodes = 1
        self._node = node
        self._holder = holder
        self._topics = topics
        self._settings = settings
        self._uniform = uniform

    @property
    def deadline(self) -> float | None:
        return None

    def step(self, event: Event | Tick, now: Instant) -> list[Effect]:
        raise NotImplementedError

    def snapshot(self) -> Snapshot:
        raise NotImplementedError
