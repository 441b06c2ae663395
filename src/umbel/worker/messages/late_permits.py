"""LatePermits: a message that may start and does not goes back, so that it keeps nobody waiting elsewhere.

Its worker's children may all be busy for long. It holds a slot meanwhile, or has used a start of its rate
that happens later than the cluster believes. This worker may stand still too: so a job under a rate says
until when it may start, and who runs it looks (`Job.start_by`).
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from umbel.worker.messages.claimed import Claimed

PATIENCE_S = 1.0


class LatePermits:
    """`give_back` gets those that were not seen to start in time; some may have started all the same."""

    def __init__(self, give_back: Callable[[Sequence[Claimed]], None]) -> None:
        self._give_back = give_back
        self._watched: deque[tuple[float, Claimed]] = deque()  # bounded: a worker holds only so many messages
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, granted: Sequence[Claimed]) -> None:
        if granted:
            until = asyncio.get_running_loop().time() + PATIENCE_S
            self._watched.extend((until, claimed) for claimed in granted)
            self._arm()

    def stop(self) -> None:
        self._watched.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self) -> None:
        if self._timer is None and self._watched:
            self._timer = asyncio.get_running_loop().call_at(self._watched[0][0], self._look)

    def _look(self) -> None:
        self._timer = None
        now, late = asyncio.get_running_loop().time(), list[Claimed]()
        while self._watched and self._watched[0][0] <= now:
            claimed = self._watched.popleft()[1]
            if claimed.started_at is None:
                late.append(claimed)
        if late:
            self._give_back(late)
        self._arm()
