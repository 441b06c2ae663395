"""Heartbeats: when this node sends one, and how long another node may be silent.

The interval grows with the cluster, so that heartbeats stay a small part of the traffic. A node becomes
suspect after two of its intervals without a sign of life, multiplied by the observer's local health level: a
slow observer receives everything late and must not suspect the others. `QuorumGuard` stops declaring nodes
lost while too many members are silent at once, because then the observer itself is probably partitioned.
"""

from collections.abc import Callable
from enum import StrEnum
from math import inf, log
from typing import assert_never

from umbel.protocol.leadership.coordination import Instant
from umbel.protocol.machine import Tick, Value

# ---- heartbeat -------------------------------------------------------------------------------------
#
# The interval is N / 200 seconds, but at least the configured value (2 s) and at most 15 s. It is sent with
# each heartbeat as `freq`. Peers, including Celery's nodes and Flower, declare a node lost after twice that
# time, so they adapt automatically. A longer interval is announced in the heartbeat before it begins.
#
# A heartbeat that is requested right after another waits for a tenth of a second: a flood of requests must
# not cause a flood of heartbeats.
#
# If this node sent a heartbeat late, or received it back late, this node is slow, not the others: it is
# reported as Lagged.

NODES_PER_SECOND = 200
INTERVAL_MAX_S = 15.0
APART_S = 0.1  # between requested heartbeats
EARLY = 0.1  # share of an interval: nodes that started together do not send together
LAG_MAX = 0.25  # share of an interval


def interval_s(nodes: int, least_s: float) -> float:
    """Return the heartbeat interval in a cluster of this many nodes, at least `least_s`."""
    return max(least_s, min(nodes / NODES_PER_SECOND, INTERVAL_MAX_S))


class BeatKind(StrEnum):
    """The event type of a heartbeat."""

    ONLINE = "worker-online"
    BEAT = "worker-heartbeat"
    OFFLINE = "worker-offline"


class BeginBeats(Value):
    """Announce this node and send heartbeats from now on. Sent again after a lost connection."""


class BeatNow(Value):
    """Send a heartbeat soon: a node asked for one, or suspects this node."""


class Resized(Value):
    """The cluster now has this many nodes."""

    nodes: int


class Echoed(Value):
    """A heartbeat of this node came back to it; `sent_at` is the Unix time it carries."""

    sent_at: float


class EndBeats(Value):
    """Announce that this node goes offline, and stop."""


class Beat(Value):
    """Send a heartbeat of this kind, stating this interval."""

    kind: BeatKind
    freq_s: float


class Lagged(Value):
    """This node is slow: a heartbeat was sent or received late."""

    reason: str


Event = BeginBeats | BeatNow | Resized | Echoed | EndBeats
Effect = Beat | Lagged


class Heartbeat:
    """Decides when a node sends heartbeats, and whether they are late."""

    def __init__(self, least_s: float, uniform: Callable[[float, float], float]) -> None:
        self.deadline: float | None = None
        self.freq_s = least_s
        self._least_s = least_s
        self._uniform = uniform
        self._beat_s = -inf  # when the last heartbeat was sent
        self._next = BeatKind.BEAT

    def step(self, event: Event | Tick, now: Instant) -> list[Effect]:
        """Process one event; return the heartbeat to send, or a lag to report."""
        match event:
            case BeginBeats():
                self._next = BeatKind.ONLINE
                return self._beat_soon(now)
            case BeatNow():
                return [] if self.deadline is None else self._beat_soon(now)
            case Resized(nodes):
                self.freq_s = interval_s(nodes, self._least_s)
                return []
            case Echoed(sent_at):
                late_s = now.wall_s - sent_at
                return (
                    [Lagged(f"own heartbeat received after {late_s:.1f} s")] if late_s > self.freq_s else []
                )
            case Tick():
                return self._tick(now)
            case EndBeats():
                if self.deadline is None:
                    return []
                self.deadline = None
                return [Beat(BeatKind.OFFLINE, self.freq_s)]
            case _:
                assert_never(event)

    def _tick(self, now: Instant) -> list[Effect]:
        if self.deadline is None or now.boot_s < self.deadline:
            return []
        lag_s = now.boot_s - self.deadline
        beat = self._beat(now)
        if lag_s > self.freq_s * LAG_MAX:
            return [Lagged(f"heartbeat sent {lag_s:.1f} s late"), beat]
        return [beat]

    def _beat_soon(self, now: Instant) -> list[Effect]:
        """Send a heartbeat at once, unless the last was sent a moment ago."""
        free_s = self._beat_s + min(APART_S, self.freq_s * EARLY)
        if self.deadline is None or now.boot_s >= free_s:
            return [self._beat(now)]
        self.deadline = min(self.deadline, free_s)
        return []

    def _beat(self, now: Instant) -> Beat:
        kind, self._next, self._beat_s = self._next, BeatKind.BEAT, now.boot_s
        self.deadline = now.boot_s + self.freq_s * self._uniform(1.0 - EARLY, 1.0)
        return Beat(kind, self.freq_s)


# ---- suspicion -------------------------------------------------------------------------------------
#
# A suspect has up to SUSPICION_MAX intervals to refute the suspicion. Each observer that agrees shortens
# that, to one interval if all agree (ideas of Lifeguard: Dadgar, Phillips, Currey 2018).

OBSERVERS = 3
SILENCE = 2.0  # in intervals, as in Celery and Flower
SUSPICION_MIN = 1.0
SUSPICION_MAX = 6.0
UNKNOWN_FREQ_S = 60.0  # Celery's assumption for a node that states no interval
FREQ_MIN_S = 0.01
FREQ_MAX_S = 600.0
HEALTH_WORST = 8
CLEAN_S = 60.0


def silence_s(freq_s: float, health: int) -> float:
    """Return how long a node may be silent before it is suspect, at this health level of the observer."""
    return SILENCE * freq_s * health


def suspicion_s(freq_s: float, agreeing: int) -> float:
    """Return how long a suspect may stay silent if this many other nodes agree."""
    share = log(min(agreeing, OBSERVERS - 1) + 1) / log(OBSERVERS)
    return freq_s * (SUSPICION_MAX - (SUSPICION_MAX - SUSPICION_MIN) * share)


def believable_freq_s(freq_s: float | None, known_s: float = UNKNOWN_FREQ_S) -> float:
    """Return a peer's interval, within limits; `known_s` if it states none."""
    if freq_s is None or not freq_s > 0:  # also true for NaN
        return known_s
    return min(max(freq_s, FREQ_MIN_S), FREQ_MAX_S)


class LocalHealth:
    """How slow this node is: 1 is healthy; each strain adds 1, each minute without strain subtracts 1."""

    def __init__(self) -> None:
        self.level = 1
        self._clean_since = 0.0

    @property
    def deadline(self) -> float | None:
        """Return when the level falls next; None if it is 1."""
        return self._clean_since + CLEAN_S if self.level > 1 else None

    def strain(self, now_s: float) -> None:
        """Record that this node was slow."""
        self.level = min(self.level + 1, HEALTH_WORST)
        self._clean_since = now_s

    def recover(self, now_s: float) -> bool:
        """Lower the level if a minute passed without strain; return whether it fell."""
        if self.level == 1 or now_s < self._clean_since + CLEAN_S:
            return False
        self.level -= 1
        self._clean_since = now_s
        return True


class QuorumGuard:
    """Detects that more than half of the cluster became silent at about the same time."""

    def __init__(self) -> None:
        self._fell: dict[str, float] = {}  # in chronological order

    @property
    def silent(self) -> int:
        """Return how many nodes became silent recently."""
        return len(self._fell)

    def fell_silent(self, node: str, now_s: float) -> None:
        """Record that a node became suspect."""
        self._fell.pop(node, None)
        self._fell[node] = now_s

    def spoke(self, node: str) -> None:
        """Record that a node is no longer suspect."""
        self._fell.pop(node, None)

    def is_most_of(self, nodes: int, *, within_s: float, now_s: float) -> bool:
        """Return whether more than half of the nodes became silent within the last `within_s`."""
        while self._fell:
            first = next(iter(self._fell))
            if now_s - self._fell[first] <= within_s:
                break
            del self._fell[first]
        return len(self._fell) * 2 > nodes
