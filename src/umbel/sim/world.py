"""World: one seed, one virtual clock, one heap of what happens next.

Everything that happens in a simulation is an entry of the heap, and every choice comes from the
world's generator, so a seed decides the whole course: replaying it gives the same trace and the
same hash. Nothing here knows what is simulated.
"""

import hashlib
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from random import Random
from typing import Any

from umbel.protocol.leadership.coordination import Instant

EPOCH_S = 1_800_000_000.0  # the Unix time at which every world begins
TRACE_KEPT = 400  # lines that a failing run can show


class Trace:
    """What happened, line by line: a hash of all of it, and the last lines to read."""

    def __init__(self) -> None:
        self.lines = 0
        self._kept: deque[str] = deque(maxlen=TRACE_KEPT)
        self._waiting: list[str] = []
        self._hash = hashlib.blake2b(digest_size=16)

    def note(self, line: str) -> None:
        self._waiting.append(line)
        if len(self._waiting) >= TRACE_KEPT:
            self._settle()

    def last(self, count: int) -> list[str]:
        self._settle()
        return list(self._kept)[-count:]

    def digest(self) -> str:
        self._settle()
        return self._hash.hexdigest()

    def _settle(self) -> None:
        self.lines += len(self._waiting)
        self._hash.update("\n".join([*self._waiting, ""]).encode() if self._waiting else b"")
        self._kept.extend(self._waiting)
        self._waiting.clear()


class World:
    def __init__(self, seed: str) -> None:
        self.now = 0.0
        self.random = Random(seed)
        self.trace = Trace()
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self._stopped = False

    def at(self, when: float, call: Callable[..., None], *arguments: Any) -> None:
        self._count += 1
        heappush(self._heap, (when, self._count, call, arguments))

    def after(self, delay_s: float, call: Callable[..., None], *arguments: Any) -> None:
        self._count += 1
        heappush(self._heap, (self.now + delay_s, self._count, call, arguments))

    def stop(self) -> None:
        self._stopped = True

    def run(self, until: float) -> None:
        """Run events up to `until`, or until the world is stopped."""
        heap = self._heap
        while heap and heap[0][0] <= until and not self._stopped:
            self.now, _, call, arguments = heappop(heap)
            call(*arguments)
        if not self._stopped:
            self.now = max(self.now, until)


class NodeClock:
    """A node's own clocks: they run a little fast or slow, and the wall clock may be wrong by days."""

    __slots__ = ("_boot_at", "_rate", "_wall_at")

    def __init__(self, *, rate: float = 1.0, boot_s: float = 0.0, skew_s: float = 0.0) -> None:
        self._rate = rate
        self._boot_at = boot_s
        self._wall_at = EPOCH_S + skew_s

    def read(self, now: float) -> Instant:
        passed = now * self._rate
        return Instant(self._boot_at + passed, self._wall_at + passed)

    def when(self, boot_s: float) -> float:
        """The world's time at which this clock shows `boot_s`."""
        return (boot_s - self._boot_at) / self._rate

    def set_skew(self, skew_s: float) -> None:
        self._wall_at = EPOCH_S + skew_s
