"""ClusterTime: the time in the cluster, although this node's wall clock may be wrong.

If the store has a clock (Redis), it decides. Otherwise the clocks of all nodes vote, including this node's.
The median is used if more than half of the clocks agree with it: while fewer than half of them are wrong, the
median lies between two correct clocks. Two clocks that differ cannot show which is wrong, so a vote needs
three. With fewer clocks, or without a majority, the node trusts its wall clock and reports the disagreement.

Each node's clock is stored as its distance from this node's boot clock, which never jumps. So when the wall
clock of this node is set, only its own vote changes; the step is reported.

Limits: a heartbeat shows the time at which it was sent, so the clocks of others are late by its transit time.
Clocks that agree within TOLERANCE_S are not corrected, so due times are not more precise than that. The store
may read its clock at any moment of the call, so a reply that took longer than WAY_MAX_S is ignored: otherwise
a node that was partitioned during the call would correct its clock by half the length of the partition.
Clocks of nodes that are silent for SILENT_S are dropped, because clocks drift and nodes leave.
"""

from collections.abc import Container, Iterable, Sequence
from math import inf

from umbel.protocol.leadership.coordination import Instant
from umbel.protocol.machine import Value

TOLERANCE_S = 2.0
AGREEING_S = 10.0  # largest distance from the median; heartbeats may be late
WAY_MAX_S = TOLERANCE_S  # round-trip time of a call to the store
SILENT_S = 120.0
VOICES_MIN = 3
VOICES_MAX = 1000  # more clocks are ignored: this many are enough

OWN, STORE, PEERS = "own", "store", "peers"


class ClockCorrection(Value):
    """The result: add `offset_s` to the wall clock.

    `stepped_s` is how far the wall clock was set since the last call.
    """

    offset_s: float
    source: str
    voices: int
    stepped_s: float = 0.0
    disagreeing: bool = False


class ClusterTime:
    """The clocks of the store and of other nodes, and the correction of this node's wall clock."""

    def __init__(self) -> None:
        self._store: tuple[float, float] | None = None  # (distance of its clock, when it was read)
        self._peers: dict[str, tuple[float, float]] = {}
        self._own: float | None = None

    def hear_store(self, at_s: float, way_s: float, now: Instant) -> None:
        """Record the time in the store's reply, which arrived `way_s` after the call was sent."""
        if way_s <= WAY_MAX_S:
            self._store = (at_s + way_s / 2 - now.boot_s, now.boot_s)

    def hear_peer(self, node: str, at_s: float, now: Instant) -> None:
        """Record the wall-clock time in another node's heartbeat."""
        if node in self._peers or len(self._peers) < VOICES_MAX:
            self._peers[node] = (at_s - now.boot_s, now.boot_s)

    def forget_all_but(self, nodes: Container[str]) -> None:
        """Drop the clocks of nodes that are not members: forged names must not outvote the real nodes."""
        for node in [peer for peer in self._peers if peer not in nodes]:
            del self._peers[node]

    def judge(self, now: Instant) -> ClockCorrection:
        """Return the correction of the wall clock, and the source that decided it."""
        own = now.wall_s - now.boot_s
        stepped_s = 0.0 if self._own is None else own - self._own
        self._own = own
        self._forget_silent(now)
        distances = [distance for distance, _ in self._peers.values()]
        voices = len(distances) + 1
        if self._store is not None and now.boot_s - self._store[1] < SILENT_S:
            distance, source = self._store[0], STORE
        elif (voted := _vote([own, *distances])) is not None:
            distance, source = voted, PEERS
        else:
            distance, source = own, OWN
        offset_s = distance - own
        return ClockCorrection(
            offset_s if abs(offset_s) > TOLERANCE_S else 0.0,
            source,
            voices,
            stepped_s if abs(stepped_s) > TOLERANCE_S else 0.0,
            disagreeing=source == OWN and _furthest(distances, own) > TOLERANCE_S,
        )

    def _forget_silent(self, now: Instant) -> None:
        for node in [peer for peer, (_, at) in self._peers.items() if now.boot_s - at >= SILENT_S]:
            del self._peers[node]


def _vote(distances: Sequence[float]) -> float | None:
    middle = _median(distances)
    agreeing = sum(abs(distance - middle) <= AGREEING_S for distance in distances)
    return middle if len(distances) >= VOICES_MIN and 2 * agreeing > len(distances) else None


def _median(values: Sequence[float]) -> float:
    """Return the median; importing `statistics` would take 250 kB for `fractions` and `decimal`."""
    in_order, half = sorted(values), len(values) // 2
    return in_order[half] if len(values) % 2 else (in_order[half - 1] + in_order[half]) / 2


def _furthest(distances: Iterable[float], own: float) -> float:
    return max((abs(distance - own) for distance in distances), default=-inf)
