"""Heartbeat: when this node says that it is here, and when a sign of it comes too late.

The interval grows with the cluster, so that heartbeats stay a small part of the traffic:
N / 200 seconds, but at least what is set (2 s) and at most 15 s. It goes out with each beat as
`freq`; peers, Celery's and Flower among them, take a node for lost after twice that time, so they
adapt by themselves. A longer interval is announced with the beat before it begins.

A beat that is asked for right after another waits for a tenth of a second: a flood of requests must not
become one of beats.

A beat that this node could not send in time, or that came back to it late, says that this node is
slow, not the others: it is reported as Lagged.
"""

from collections.abc import Callable
from enum import StrEnum
from math import inf
from typing import assert_never

from umbel.protocol.leadership.coordination import Instant
from umbel.protocol.machine import Tick
from umbel.protocol.value import Value

NODES_PER_SECOND = 200
INTERVAL_MAX_S = 15.0
APART_S = 0.1  # between beats that are asked for
EARLY = 0.1  # of an interval: nodes that started together do not beat together
LAG_MAX = 0.25  # of an interval


def interval_s(nodes: int, least_s: float) -> float:
    return max(least_s, min(nodes / NODES_PER_SECOND, INTERVAL_MAX_S))


class BeatKind(StrEnum):
    ONLINE = "worker-online"
    BEAT = "worker-heartbeat"
    OFFLINE = "worker-offline"


class Begin(Value):
    """Say that this node is there, and beat from now on. Again: as after a lost connection."""


class BeatNow(Value):
    """Do not wait for the next beat: somebody asked, or takes this node for silent."""


class Resized(Value):
    """So many nodes are there now."""

    nodes: int


class Echoed(Value):
    """A beat of this node came back to it; `sent_at` is the Unix time it carries."""

    sent_at: float


class End(Value):
    """Say goodbye."""


class Beat(Value):
    kind: BeatKind
    freq_s: float


class Lagged(Value):
    reason: str


Event = Begin | BeatNow | Resized | Echoed | End
Effect = Beat | Lagged


class Heartbeat:
    def __init__(self, least_s: float, uniform: Callable[[float, float], float]) -> None:
        self.deadline: float | None = None
        self.freq_s = least_s
        self._least_s = least_s
        self._uniform = uniform
        self._beat_s = -inf  # when the last beat was sent
        self._next = BeatKind.BEAT

    def step(self, event: Event | Tick, now: Instant) -> list[Effect]:
        match event:
            case Begin():
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
            case End():
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
        """At once, unless one was sent just now."""
        free_s = self._beat_s + min(APART_S, self.freq_s * EARLY)
        if self.deadline is None or now.boot_s >= free_s:
            return [self._beat(now)]
        self.deadline = min(self.deadline, free_s)
        return []

    def _beat(self, now: Instant) -> Beat:
        kind, self._next, self._beat_s = self._next, BeatKind.BEAT, now.boot_s
        self.deadline = now.boot_s + self.freq_s * self._uniform(1.0 - EARLY, 1.0)
        return Beat(kind, self.freq_s)
