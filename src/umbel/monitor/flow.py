"""QueueFlow: how many messages came into each queue and left it, in the last seconds.

Only clients that send `task-sent` say which queue a task went into, so without those there is no flow.
"""

from collections import deque

WINDOW_S = 30
QUEUES_MAX = 1000


class QueueFlow:
    def __init__(self) -> None:
        self._seconds: dict[str, deque[list[int]]] = {}  # [second, came, went]

    def came(self, queue: str | None, now: float) -> None:
        self._note(queue, now, 1)

    def went(self, queue: str | None, now: float) -> None:
        self._note(queue, now, 2)

    def rates(self, queue: str, now: float) -> tuple[float, float]:
        """In and out a second, over the last WINDOW_S seconds."""
        recent = [one for one in self._seconds.get(queue, ()) if one[0] >= int(now) - WINDOW_S]
        return sum(one[1] for one in recent) / WINDOW_S, sum(one[2] for one in recent) / WINDOW_S

    def _note(self, queue: str | None, now: float, column: int) -> None:
        if queue is None:
            return
        seconds = self._seconds.get(queue)
        if seconds is None:
            if len(self._seconds) >= QUEUES_MAX:
                return
            seconds = self._seconds[queue] = deque(maxlen=WINDOW_S + 1)
        if not seconds or seconds[-1][0] < int(now):
            seconds.append([int(now), 0, 0])
        seconds[-1][column] += 1
