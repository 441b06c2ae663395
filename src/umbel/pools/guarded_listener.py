"""GuardedListener: what a pool tells the worker, one call after the other, whatever becomes of each.

A listener may submit or withdraw while it is called. What there is to tell because of that waits until
the call has returned, so calls never nest, however many there are. A call that raises is logged
and counted, and the next one is made.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from umbel.pools.guard import Raised, call_guarded
from umbel.pools.interface import LostJob, Outcome, PoolListener, Told

log = logging.getLogger(__name__)


class GuardedListener:
    def __init__(self, listener: PoolListener) -> None:
        self.faults = 0  # calls that raised
        self._listener = listener
        self._calls: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()  # what one step has to tell
        self._held = False
        self._calling = False

    def on_started(self, started: Sequence[tuple[int, float, int]]) -> None:
        self._tell(self._listener.on_started, started)

    def on_told(self, told: Told) -> None:
        self._tell(self._listener.on_told, told)

    def on_outcomes(self, outcomes: Sequence[Outcome], pid: int) -> None:
        self._tell(self._listener.on_outcomes, outcomes, pid)

    def on_lost(self, lost: Sequence[LostJob]) -> None:
        self._tell(self._listener.on_lost, lost)

    def on_child(self, what: str, fields: dict[str, Any]) -> None:
        self._tell(self._listener.on_child, what, fields)

    def hold(self) -> None:
        """Keep what there is to tell until `release`: the pool is in the middle of something."""
        self._held = True

    def release(self) -> None:
        self._held = False
        self._call()

    def _tell(self, call: Callable[..., None], *args: Any) -> None:
        self._calls.append((call, args))
        if not self._held:
            self._call()

    def _call(self) -> None:
        if self._calling:
            return
        self._calling = True
        try:
            while self._calls:
                call, args = self._calls.popleft()
                called = call_guarded(call, *args)
                if isinstance(called, Raised):
                    self.faults += 1
                    log.error(
                        "internal error while handling a notification of the pool; it is lost, and its task "
                        "may stay unacknowledged until this worker stops; please report it",
                        extra={"notification": getattr(call, "__name__", "")},
                        exc_info=called.error,
                    )
        finally:
            self._calling = False
