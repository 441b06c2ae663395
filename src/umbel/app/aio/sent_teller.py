"""SentTeller: tells of awaited sends (`task_send_sent_event`) in a thread, after them.

The task is sent already, so its sender does not wait for this, nor for the sends before it: what has
gathered meanwhile is told in one step. When more waits than MESSAGES_MAX or BYTES_MAX, because the broker
takes events more slowly than tasks, the events of further sends are dropped, and their number is logged.

The thread goes on when the loop ends: what waits then is told, if that is possible in time.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock

from umbel.errors import BrokerError
from umbel.wire.message import Outgoing

log = logging.getLogger("umbel.events")
MESSAGES_MAX = 10_000
BYTES_MAX = 16 * 2**20


class SentTeller:
    """`tell` blocks; it is given batches, each with the time from which on it was sent."""

    def __init__(self, tell: "Callable[[Sequence[tuple[Sequence[Outgoing], float]]], None]") -> None:
        self._tell = tell
        self._waiting: list[tuple[Sequence[Outgoing], float]] = []
        self._messages = self._bytes = self._dropped = 0
        self._is_closed = False
        self._changing = Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="umbel client events")
        self._telling: Future[None] | None = None

    def add(self, batch: Sequence[Outgoing], at: float) -> None:
        size = sum(len(one.message.body) + len(one.message.headers) for one in batch)
        with self._changing:
            fits = self._messages + len(batch) <= MESSAGES_MAX and self._bytes + size <= BYTES_MAX
            if self._is_closed or (self._waiting and not fits):
                self._dropped += len(batch)
                return
            self._waiting.append((batch, at))
            self._messages += len(batch)
            self._bytes += size
            if self._telling is None or self._telling.done():
                self._telling = self._thread.submit(self._tell_all)

    async def close(self, timeout_s: float) -> None:
        """What waits has this time to be told; the rest is dropped."""
        telling = self._telling
        if telling is not None:
            await asyncio.wait([asyncio.wrap_future(telling)], timeout=timeout_s)
        self.abandon()

    def abandon(self) -> None:
        with self._changing:
            self._is_closed = True
            self._dropped += self._messages
            self._take()
            dropped, self._dropped = self._dropped, 0
        _log_dropped(dropped)
        self._thread.shutdown(wait=False)

    def _tell_all(self) -> None:
        while True:
            with self._changing:
                batches, (dropped, self._dropped) = self._take(), (self._dropped, 0)
                if not batches:
                    self._telling = None
                    return
            _log_dropped(dropped)
            try:
                self._tell(batches)
            except BrokerError as error:  # the broker cannot even be opened
                log.warning(
                    "tasks sent, but their task-sent events could not be sent", extra={"why": str(error)}
                )

    def _take(self) -> list[tuple[Sequence[Outgoing], float]]:
        taken, self._waiting = self._waiting, []
        self._messages = self._bytes = 0
        return taken


def _log_dropped(count: int) -> None:
    if count:
        log.warning("too many task-sent events are waiting; some were dropped", extra={"count": count})
