"""ReorderWindow: puts events that are heard in some order into the cluster's order, for showing them.

Brokers deliver what one node tells in order, but what two nodes tell in any. So each event is held
back for a moment, and given out with all that come before it by (clock, time, node). An event that
is later than the others by more than the window comes too late to be put in its place: it is given
out at once, and counted. Where too many are held the lowest goes at once.
"""

from collections import deque
from heapq import heappop, heappush

from umbel.events.receiver import Heard

HELD_MAX = 10_000

Place = tuple[int, float, str, int]


class _Held:
    __slots__ = ("arrived", "heard", "is_out", "place")

    def __init__(self, heard: Heard, place: Place, arrived: float) -> None:
        self.heard, self.place, self.arrived, self.is_out = heard, place, arrived, False

    def __lt__(self, other: "_Held") -> bool:
        return self.place < other.place


class ReorderWindow:
    def __init__(self, window_s: float, *, held_max: int = HELD_MAX) -> None:
        assert window_s >= 0
        assert held_max > 0
        self.late = 0
        self._window_s = window_s
        self._held_max = held_max
        self._number = 0
        self._heap: list[_Held] = []
        self._arrivals: deque[_Held] = deque()
        self._last: Place | None = None

    @property
    def deadline(self) -> float | None:
        """When the next event is due, if one is held."""
        self._forget_given()
        return self._arrivals[0].arrived + self._window_s if self._arrivals else None

    def put(self, heard: Heard, now: float) -> list[Heard]:
        """Hold an event; what must go to make room for it comes back."""
        self._number += 1
        held = _Held(heard, _place(heard, self._number), now)
        heappush(self._heap, held)
        self._arrivals.append(held)
        return [self._give()] if len(self._heap) > self._held_max else []

    def due(self, now: float) -> list[Heard]:
        """The events that were held long enough, with those that come before them, in order."""
        given: list[Heard] = []
        while (deadline := self.deadline) is not None and deadline <= now:
            given.append(self._give())
        return given

    def rest(self) -> list[Heard]:
        """All that is held, in order."""
        return [self._give() for _ in range(len(self._heap))]

    def _give(self) -> Heard:
        held = heappop(self._heap)
        held.is_out = True
        if self._last is not None and held.place < self._last:
            self.late += 1
        else:
            self._last = held.place
        self._forget_given()
        return held.heard

    def _forget_given(self) -> None:
        while self._arrivals and self._arrivals[0].is_out:
            self._arrivals.popleft()


def _place(heard: Heard, number: int) -> Place:
    """Events that are equal in all else keep the order in which they were heard."""
    timestamp, hostname = heard.event.get("timestamp"), heard.event.get("hostname")
    at = float(timestamp) if isinstance(timestamp, int | float) else 0.0
    return (heard.clock, at, hostname if isinstance(hostname, str) else "", number)
