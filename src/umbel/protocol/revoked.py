"""RevokedTasks: the ids of tasks that must not start, as one worker knows them.

Filled from the broker's durable record before the first dispatch and with every claim. An entry
leaves when it expires, never to make room: the durable record refuses new entries at its limit,
so this set is bounded by it.
"""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

OUTDATED_MAX = 1000


class RevokedTasks:
    def __init__(self) -> None:
        self._expiry: dict[str, float] = {}
        self._by_expiry: list[tuple[float, str]] = []

    def add(self, task_id: str, expires_at: float) -> None:
        """Known ids keep the later expiry: a join, whatever order entries come in."""
        if expires_at > self._expiry.get(task_id, 0.0):
            self._expiry[task_id] = expires_at
            heappush(self._by_expiry, (expires_at, task_id))
            if len(self._by_expiry) > 2 * len(self._expiry) + OUTDATED_MAX:
                self._drop_outdated()

    def expire(self, now: float) -> None:
        while self._by_expiry and self._by_expiry[0][0] <= now:
            expires_at, task_id = heappop(self._by_expiry)
            if self._expiry.get(task_id) == expires_at:
                del self._expiry[task_id]

    def _drop_outdated(self) -> None:
        """An id that was revoked again left its former expiry behind; most of these are such."""
        self._by_expiry = [(expires_at, task_id) for task_id, expires_at in self._expiry.items()]
        heapify(self._by_expiry)

    def __contains__(self, task_id: object) -> bool:
        return task_id in self._expiry

    def __iter__(self) -> Iterator[str]:
        """In the order in which they became known."""
        return iter(self._expiry)

    def __len__(self) -> int:
        return len(self._expiry)
