"""ClusterTime: what time it is in the cluster, when this node's wall clock may be wrong.

A store that has a clock (Redis) decides. Otherwise the clocks of the nodes that were heard
vote, this node's among them, and the median holds, if more than half of them agree with it: as long as
fewer than half of them are wrong, it lies between two that are right. Two clocks that differ cannot tell
which is wrong, so a vote takes three. With fewer, or where everybody says something else, the node trusts
its own clock and says so.

Every voice is kept as its distance from this node's boot clock, which never jumps. So a wall clock that is
set, here, changes one vote and nothing else; that it was set is reported.

Where it stops being right: a heartbeat shows the time at which it was sent, so voices are late by its way
here. Clocks that agree within TOLERANCE_S are left alone; what is due is right to that, not better. The store
answered at any time of the question's way, so an answer that took longer than WAY_MAX_S counts for nothing: a
node that was cut off while it asked would take its own clock for wrong by half of the partition. Voices
of nodes that are not heard for SILENT_S are dropped: clocks drift, and nodes leave.
"""

from collections.abc import Container, Iterable, Sequence
from math import inf

from umbel.protocol.leadership.coordination import Instant
from umbel.protocol.value import Value

TOLERANCE_S = 2.0
AGREEING_S = 10.0  # from the median; heartbeats may be late
WAY_MAX_S = TOLERANCE_S  # of a question to the store, there and back
SILENT_S = 120.0
VOICES_MIN = 3
VOICES_MAX = 1000  # further ones are not heard: so many are enough

OWN, STORE, PEERS = "own", "store", "peers"


class Judged(Value):
    """`offset_s` is to be added to the wall clock; `stepped_s`: how far that was set since the last time."""

    offset_s: float
    source: str
    voices: int
    stepped_s: float = 0.0
    disagreeing: bool = False


class ClusterTime:
    def __init__(self) -> None:
        self._store: tuple[float, float] | None = None  # (its distance, when it was read)
        self._peers: dict[str, tuple[float, float]] = {}
        self._own: float | None = None

    def hear_store(self, at_s: float, way_s: float, now: Instant) -> None:
        """The store's answer has arrived, `way_s` after it was asked for."""
        if way_s <= WAY_MAX_S:
            self._store = (at_s + way_s / 2 - now.boot_s, now.boot_s)

    def hear_peer(self, node: str, at_s: float, now: Instant) -> None:
        if node in self._peers or len(self._peers) < VOICES_MAX:
            self._peers[node] = (at_s - now.boot_s, now.boot_s)

    def forget_all_but(self, nodes: Container[str]) -> None:
        """Only members have a voice: invented names must not outvote the nodes."""
        for node in [one for one in self._peers if one not in nodes]:
            del self._peers[node]

    def judge(self, now: Instant) -> Judged:
        own = now.wall_s - now.boot_s
        stepped_s = 0.0 if self._own is None else own - self._own
        self._own = own
        self._forget_silent(now)
        heard = [distance for distance, _ in self._peers.values()]
        voices = len(heard) + 1
        if self._store is not None and now.boot_s - self._store[1] < SILENT_S:
            distance, source = self._store[0], STORE
        elif (voted := _vote([own, *heard])) is not None:
            distance, source = voted, PEERS
        else:
            distance, source = own, OWN
        offset_s = distance - own
        return Judged(
            offset_s if abs(offset_s) > TOLERANCE_S else 0.0,
            source,
            voices,
            stepped_s if abs(stepped_s) > TOLERANCE_S else 0.0,
            disagreeing=source == OWN and _furthest(heard, own) > TOLERANCE_S,
        )

    def _forget_silent(self, now: Instant) -> None:
        for node in [one for one, (_, at) in self._peers.items() if now.boot_s - at >= SILENT_S]:
            del self._peers[node]


def _vote(distances: Sequence[float]) -> float | None:
    middle = _median(distances)
    agreeing = sum(abs(one - middle) <= AGREEING_S for one in distances)
    return middle if len(distances) >= VOICES_MIN and 2 * agreeing > len(distances) else None


def _median(values: Sequence[float]) -> float:
    """`statistics` would bring fractions and decimals along, a quarter of a megabyte."""
    in_order, half = sorted(values), len(values) // 2
    return in_order[half] if len(values) % 2 else (in_order[half - 1] + in_order[half]) / 2


def _furthest(distances: Iterable[float], own: float) -> float:
    return max((abs(one - own) for one in distances), default=-inf)
