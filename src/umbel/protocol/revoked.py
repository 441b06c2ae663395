"""RevokedTasks: the ids of tasks that must not start, as one worker knows them.

Filled from the broker's durable record before the first dispatch and with every claim. An entry
leaves when it expires, never to make room: the durable record refuses new entries at its limit,
so this set is bounded by it.
"""

from heapq import heappop, heappush


class RevokedTasks:
    def __init__(self) -> None:
        self._expiry: dict[str, float] = {}
        self._by_expiry: list[tuple[float, str]] = []

    def add(self, task_id: str, expires_at: float) -> None:
        """Known ids keep the later expiry: a join, whatever order entries come in."""
        if expires_at > self._expiry.get(task_id, 0.0):
            self._expiry[task_id] = expires_at
            heappush(self._by_expiry, (expires_at, task_id))

    def expire(self, now: float) -> None:
        while self._by_expiry and self._by_expiry[0][0] <= now:
            expires_at, task_id = heappop(self._by_expiry)
            if self._expiry.get(task_id) == expires_at:
                del self._expiry[task_id]

    def __contains__(self, task_id: object) -> bool:
        return task_id in self._expiry

    def __len__(self) -> int:
        return len(self._expiry)
