"""Pace: a monitor that shares its machine with workers reads events slowly while they need the CPU.

Niceness is not enough: where Linux groups processes by their sessions, it does not reach from one session to
another. So the monitor looks how long it waited for a CPU, and rests between turns while that is much.
"""

from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import NamedTuple

LOOK_EVERY_S = 0.1
WAITED_MAX = 0.05  # of the time in which it wanted a CPU
SHARE = 0.1  # of a CPU, which is enough for some 6,000 events a second
REST_MAX_S = 0.5
SCHEDULED = Path("/proc/thread-self/schedstat")


class CpuUse(NamedTuple):
    ran_s: float
    waited_s: float


def cpu_use() -> CpuUse:
    """Of this thread; nothing where the system does not tell."""
    try:
        ran_ns, waited_ns, _ = SCHEDULED.read_bytes().split()
    except (OSError, ValueError):
        return CpuUse(0.0, 0.0)
    return CpuUse(int(ran_ns) / 1e9, int(waited_ns) / 1e9)


class Pace:
    def __init__(self, use: Callable[[], CpuUse] = cpu_use, clock: Callable[[], float] = monotonic) -> None:
        self._use = use
        self._clock = clock
        self._looked_at = clock()
        self._before = use()
        self._is_crowded = False

    def rest_s(self, used_s: float) -> float:
        """How long others should have the CPU now, after it was used for so long."""
        now = self._clock()
        if now >= self._looked_at + LOOK_EVERY_S:
            use, before = self._use(), self._before
            ran_s, waited_s = use.ran_s - before.ran_s, use.waited_s - before.waited_s
            self._is_crowded = waited_s > WAITED_MAX * (ran_s + waited_s)
            self._looked_at, self._before = now, use
        return min(REST_MAX_S, used_s / SHARE - used_s) if self._is_crowded else 0.0
