"""HookQueue: calls what users wrote off the loop: hooks of nodes that join, leave or are lost (S5), errbacks.

The calls come one after the other, in the order of what happened, from a thread of their own. A hook
that hangs delays the next ones and nothing else: when `waiting_max` wait, the newest are dropped and
that is said; the worker stops without waiting for it.
"""

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any

from umbel.pools.guard import Raised, call_guarded

log = logging.getLogger("umbel.worker.hooks")

WAITING_MAX = 1000
Hook = Callable[..., None]


class HookQueue:
    def __init__(self, hooks: Mapping[str, Hook], *, waiting_max: int = WAITING_MAX) -> None:
        self.dropped = 0
        self._hooks = hooks
        self._waiting: queue.Queue[tuple[str, dict[str, Any]]] = queue.Queue(waiting_max)
        self._thread: threading.Thread | None = None

    def call(self, name: str, **context: Any) -> None:
        """Have the hook called soon, if there is one; never blocks."""
        if name not in self._hooks:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="umbel-hooks", daemon=True)
            self._thread.start()
        try:
            self._waiting.put_nowait((name, context))
        except queue.Full:
            self.dropped += 1
            if self.dropped == 1:
                log.error(
                    "hook not called: too many wait for an earlier hook that has not returned",
                    extra={"hook": name},
                )

    def wait_called(self, timeout_s: float) -> None:
        """Block until all calls so far have returned, or for so long."""
        with self._waiting.all_tasks_done:
            self._waiting.all_tasks_done.wait_for(lambda: not self._waiting.unfinished_tasks, timeout_s)

    def _work(self) -> None:
        while True:
            name, context = self._waiting.get()
            happened = call_guarded(self._hooks[name], **context)
            if isinstance(happened, Raised):
                log.error("hook raised an exception", extra={"hook": name}, exc_info=happened.error)
            self._waiting.task_done()
