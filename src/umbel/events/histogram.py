"""Histogram: how many were at most so long, for each of some bounds and beyond; and how long all were."""

from bisect import bisect_left
from collections.abc import Sequence

import msgspec


class Histogram(msgspec.Struct):
    bounds_s: Sequence[float]
    counts: list[int]
    total_s: float = 0.0

    @classmethod
    def empty(cls, bounds_s: Sequence[float]) -> "Histogram":
        return cls(bounds_s, [0] * (len(bounds_s) + 1))

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds_s, seconds)] += 1
        self.total_s += seconds

    def cumulative(self) -> list[tuple[str, float]]:
        found, total = [], 0
        for bound, one in zip([*map(str, self.bounds_s), "+Inf"], self.counts, strict=True):
            total += one
            found.append((bound, float(total)))
        return found
