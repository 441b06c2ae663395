"""Suspicion: how long silence may last, before and after a node is suspect.

A node is suspect after two of its own intervals without a sign, times the observer's local
health: a node that is slow itself hears others late, and must not blame them. A suspect has up to
SUSPICION_MAX intervals to refute; each observer that agrees shortens that, to one interval when
all do (the ideas of Lifeguard: Dadgar, Phillips, Currey 2018).
"""

from math import log

OBSERVERS = 3
SILENCE = 2.0  # intervals, as Celery and Flower have it
SUSPICION_MIN = 1.0
SUSPICION_MAX = 6.0
UNKNOWN_FREQ_S = 60.0  # what Celery takes for a node that does not say
FREQ_MIN_S = 0.01
FREQ_MAX_S = 600.0
HEALTH_WORST = 8
CLEAN_S = 60.0


def silence_s(freq_s: float, health: int) -> float:
    return SILENCE * freq_s * health


def suspicion_s(freq_s: float, agreeing: int) -> float:
    """How long a suspect may stay silent when so many others agree that it is."""
    share = log(min(agreeing, OBSERVERS - 1) + 1) / log(OBSERVERS)
    return freq_s * (SUSPICION_MAX - (SUSPICION_MAX - SUSPICION_MIN) * share)


def believable_freq_s(freq_s: float | None, known_s: float = UNKNOWN_FREQ_S) -> float:
    """A peer's interval, within reason; what was known before when it says none."""
    if freq_s is None or not freq_s > 0:  # also for NaN, which is above nothing
        return known_s
    return min(max(freq_s, FREQ_MIN_S), FREQ_MAX_S)


class LocalHealth:
    """1 is well; each strain adds one, each clean minute takes one away."""

    def __init__(self) -> None:
        self.level = 1
        self._clean_since = 0.0

    @property
    def deadline(self) -> float | None:
        return self._clean_since + CLEAN_S if self.level > 1 else None

    def strain(self, now_s: float) -> None:
        self.level = min(self.level + 1, HEALTH_WORST)
        self._clean_since = now_s

    def recover(self, now_s: float) -> bool:
        """Whether a minute was clean."""
        if self.level == 1 or now_s < self._clean_since + CLEAN_S:
            return False
        self.level -= 1
        self._clean_since = now_s
        return True


class QuorumGuard:
    """Tells when more than half of the cluster fell silent at about the same time."""

    def __init__(self) -> None:
        self._fell: dict[str, float] = {}  # in the order of time

    @property
    def silent(self) -> int:
        return len(self._fell)

    def fell_silent(self, node: str, now_s: float) -> None:
        self._fell.pop(node, None)
        self._fell[node] = now_s

    def spoke(self, node: str) -> None:
        self._fell.pop(node, None)

    def is_most_of(self, nodes: int, *, within_s: float, now_s: float) -> bool:
        while self._fell:
            first = next(iter(self._fell))
            if now_s - self._fell[first] <= within_s:
                break
            del self._fell[first]
        return len(self._fell) * 2 > nodes
