"""ReorderWindow: puts events that are heard in some order into the cluster's order, for showing them.

Brokers deliver what one node tells in order, but what two nodes tell in any. So each event is held
back for a moment, and given out with all that come before it by (clock, time, node). An event that
is later than the others by more than the window comes too late to be put in its place: it is given
out at once, and counted. Where too many are held the lowest goes at once.

A `task-sent` has no clock of the cluster's: its client tells it when the task is safe, and a worker
may be quicker. So one that is held goes out just before the first event that a worker tells of that
attempt (L3), whatever their clocks say.
"""

from collections import deque
from heapq import heappop, heappush

from umbel.events.receiver import CLIENT_CLOCK_SKEW, TASK_SENT, Heard

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
        self._held = 0
        self._heap: list[_Held] = []
        self._arrivals: deque[_Held] = deque()
        self._sent: dict[str, list[_Held]] = {}  # the held `task-sent` of each task
        self._highest = 0
        self._last: Place | None = None

    @property
    def deadline(self) -> float | None:
        """When the next event is due, if one is held."""
        self._forget_given()
        return self._arrivals[0].arrived + self._window_s if self._arrivals else None

    def put(self, heard: Heard, now: float) -> list[Heard]:
        """Hold an event; what must go to make room for it comes back."""
        self._number += 1
        heard = self._timed(heard)
        held = _Held(heard, _place(heard, self._number), now)
        if _is_sent(heard):
            if self._last is not None and held.place < self._last:
                held.place = (*self._last[:3], self._number)
            self._sent.setdefault(_task(heard), []).append(held)
        heappush(self._heap, held)
        self._arrivals.append(held)
        self._held += 1
        return self._give() if self._held > self._held_max else []

    def due(self, now: float) -> list[Heard]:
        """The events that were held long enough, with those that come before them, in order."""
        given: list[Heard] = []
        while (deadline := self.deadline) is not None and deadline <= now:
            given += self._give()
        return given

    def rest(self) -> list[Heard]:
        """All that is held, in order."""
        given: list[Heard] = []
        while self._held:
            given += self._give()
        return given

    def _give(self) -> list[Heard]:
        """The lowest that is held, behind the `task-sent` that belong before it."""
        held = heappop(self._heap)
        while held.is_out:  # a `task-sent` that went with an event of its task
            held = heappop(self._heap)
        sent = self._sent_before(held.heard)
        for one in (*sent, held):
            self._take_out(one)
        earlier = held.heard.clock - CLIENT_CLOCK_SKEW
        if self._last is not None and held.place < self._last:
            self.late += 1
        else:
            earlier = max(earlier, self._last[0] if self._last else earlier)
            self._last = held.place
        self._forget_given()
        return [*(Heard(one.heard.event, min(one.heard.clock, earlier)) for one in sent), held.heard]

    def _sent_before(self, heard: Heard) -> list[_Held]:
        if _is_sent(heard):
            return []
        attempt = _attempt(heard)
        return [one for one in self._sent.get(_task(heard), ()) if _attempt(one.heard) <= attempt]

    def _timed(self, heard: Heard) -> Heard:
        """A `task-sent` with a time between what was given out and the highest of the cluster's times.

        The receiver's clock ticks with every one it hears. Its own time would soon be past what the nodes
        tell next, and after a quiet while before what was given out last.
        """
        if not _is_sent(heard):
            self._highest = max(self._highest, heard.clock)
            return heard
        lowest = self._last[0] if self._last else 0
        return Heard(heard.event, max(lowest, min(heard.clock, self._highest)))

    def _take_out(self, held: _Held) -> None:
        held.is_out = True
        self._held -= 1
        if _is_sent(held.heard):
            left = [one for one in self._sent.pop(_task(held.heard)) if one is not held]
            if left:
                self._sent[_task(held.heard)] = left

    def _forget_given(self) -> None:
        while self._arrivals and self._arrivals[0].is_out:
            self._arrivals.popleft()


def _place(heard: Heard, number: int) -> Place:
    """Events that are equal in all else keep the order in which they were heard."""
    timestamp, hostname = heard.event.get("timestamp"), heard.event.get("hostname")
    at = float(timestamp) if isinstance(timestamp, int | float) else 0.0
    return (heard.clock, at, hostname if isinstance(hostname, str) else "", number)


def _is_sent(heard: Heard) -> bool:
    return bool(heard.event["type"] == TASK_SENT)


def _task(heard: Heard) -> str:
    return str(heard.event.get("uuid", ""))


def _attempt(heard: Heard) -> int:
    """Celery's workers say it on receipt only: what they tell after that belongs behind the receipt."""
    attempt = heard.event.get("retries")
    return attempt if isinstance(attempt, int) else 0
