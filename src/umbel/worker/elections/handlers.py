"""The threads that the handlers of elections run in.

Handlers are users' code: they run off the event loop, in threads that do not keep the worker from
ending, at most HANDLERS_MAX at a time; more wait, while the machine renews what they hold.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from umbel.coordination.election_context import ElectionContext
from umbel.errors import WireError
from umbel.pools.guard import Raised, Returned, call_guarded
from umbel.protocol.election.events import HandlerEnded, RunHandler
from umbel.wire.show import brief
from umbel.wire.values import decode_json

HANDLERS_MAX = 32
STOPPED = "stopped: this node no longer leads the election"


Handler = Callable[[Any, ElectionContext], Any]


class HandlerThreads:
    """`ended` is called on the loop, once for each order, with how it ended."""

    def __init__(self, handlers: Mapping[str, Handler], ended: Callable[[HandlerEnded], None]) -> None:
        self._handlers = handlers
        self._ended = ended
        self._running: dict[tuple[str, int], ElectionContext] = {}
        self._waiting: deque[tuple[RunHandler, ElectionContext]] = deque()
        self._threads = 0

    def run(self, order: RunHandler) -> None:
        context = ElectionContext(order)
        self._running[context.election_id, context.term] = context
        self._waiting.append((order, context))
        self._start_waiting()

    def prolong(self, election_id: str, term: int, deadline_s: float) -> None:
        context = self._running.get((election_id, term))
        if context is not None:
            context.prolong(deadline_s)

    def cancel(self, election_id: str, term: int, reason: str) -> None:
        context = self._running.get((election_id, term))
        if context is not None:
            context.cancel(reason)

    def _start_waiting(self) -> None:
        while self._waiting and self._threads < HANDLERS_MAX:
            order, context = self._waiting.popleft()
            self._threads += 1
            loop = asyncio.get_running_loop()
            arguments = (loop, order, context)
            name = f"umbel-election-{context.topic}"
            threading.Thread(target=self._work, args=arguments, name=name, daemon=True).start()

    def _work(self, loop: asyncio.AbstractEventLoop, order: RunHandler, context: ElectionContext) -> None:
        happened = call_guarded(_call, self._handlers[context.topic], order.request.action, context)
        # The loop may have ended while the handler ran: then nobody waits for the news.
        call_guarded(loop.call_soon_threadsafe, self._report, context, happened)

    def _report(self, context: ElectionContext, happened: Returned[Any] | Raised) -> None:
        self._threads -= 1
        del self._running[context.election_id, context.term]
        self._start_waiting()
        ok = isinstance(happened, Returned) and not context.stopped
        outcome = _shown(happened.value) if isinstance(happened, Returned) else brief(happened.error)
        if isinstance(happened, Returned) and context.stopped:
            outcome = STOPPED
        self._ended(HandlerEnded(context.election_id, context.term, ok, outcome, context.stopped))


def _call(handler: Handler, action: bytes, context: ElectionContext) -> Any:
    try:
        decoded = decode_json(action)
    except WireError as error:
        raise ValueError(f"cannot decode the action of election {context.election_id!r}: {error}") from error
    value = handler(decoded, context)
    return asyncio.run(value) if asyncio.iscoroutine(value) else value


def _shown(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else brief(value)
