"""Pace: how long tasks take here, as measured, and so how many of them make a good batch.

The estimate follows a slower run at half the way and a quicker one at a tenth: a task that is
slow once in a while counts as slow for some time, because a wrong guess in that direction costs
a round trip, and in the other it makes innocent jobs wait.
"""

from collections.abc import Iterable
from math import inf

_SLOWER_WEIGHT = 0.5
_QUICKER_WEIGHT = 0.1
_NAMES_MAX = 10_000
BRIEF_S = 0.25  # below this, a job waiting in the pool is worth more than a job left to other nodes
_BATCHES_AHEAD = 3


class Paces:
    def __init__(self, *, batch_target_s: float, batch_max: int) -> None:
        self.estimates_s: dict[str, float] = {}
        self._target_s = batch_target_s
        self._batch_max = batch_max
        self._typical_s: float | None = None  # of whatever ran last, all tasks together

    def note(self, task: str, runtimes_s: Iterable[float]) -> None:
        """Runs of one task, in their order. Called once for many, because this is the hot path."""
        estimate_s = self.estimates_s.get(task)
        for runtime_s in runtimes_s:
            if estimate_s is None:
                estimate_s = runtime_s
            elif runtime_s > estimate_s:
                estimate_s += (runtime_s - estimate_s) * _SLOWER_WEIGHT
            else:
                estimate_s += (runtime_s - estimate_s) * _QUICKER_WEIGHT
        if estimate_s is None or not 0.0 <= estimate_s < inf:  # a child can write anything
            return
        if len(self.estimates_s) >= _NAMES_MAX:  # names come from outside; learn again from nothing
            self.estimates_s.clear()
        self.estimates_s[task] = self._typical_s = estimate_s

    def wanted_per_child(self) -> int:
        """How many jobs, running ones included, one child can make use of."""
        typical_s = self._typical_s
        if typical_s is None or typical_s >= BRIEF_S:
            return 1
        if typical_s >= self._target_s:
            return 2
        batch = self._batch_max if typical_s <= 0 else min(self._target_s / typical_s, self._batch_max)
        return _BATCHES_AHEAD * max(1, int(batch))
