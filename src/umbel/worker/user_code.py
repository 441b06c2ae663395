"""Code that users wrote for a worker: life and node hooks, notices to Celery, handlers of elections.

It may raise anything and may hang, so it runs off the event loop, and what it raises is logged or reported.
"""

import asyncio
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from umbel.coordination.election_context import ElectionContext
from umbel.errors import WireError
from umbel.protocol.election.events import HandlerEnded, RunHandler
from umbel.wire.message import Message
from umbel.wire.show import brief
from umbel.wire.values import decode_json

log = logging.getLogger("umbel.worker.hooks")

# ---- life hooks ------------------------------------------------------------------------------------

SLOW_S = 1.0  # slower hooks are logged

Hook = Callable[[], None]


def _nothing() -> None:
    return None


class LifeHooks(msgspec.Struct, frozen=True):
    """What is called before a worker connects, when it takes tasks, and when it was asked to stop.

    `worker_init` of an app whose children are forked belongs to the process that forks them: see
    `pools.interface.PreparedHost`.
    """

    init: Hook = _nothing
    ready: Hook = _nothing
    shutdown: Hook = _nothing
    timeout_s: float = 10.0  # for each


class HookRun:
    """One call of a hook, begun in a new daemon thread, which does not keep the process from ending.

    The worker waits for it up to a timeout, and at most until a (further) stop request: users' code cannot
    block signals. A call that has not returned then goes on until the process ends. Built on the loop;
    `ended` is awaited at most once.
    """

    def __init__(self, name: str, hook: Hook, *, timeout_s: float) -> None:
        self._name = name
        self._hook = hook
        self._loop = asyncio.get_running_loop()
        self._began_at = self._loop.time()
        self._deadline = self._began_at + timeout_s
        self._returned = False
        self._over = asyncio.Event()
        threading.Thread(target=self._work, name=f"umbel-{name}", daemon=True).start()

    def stop_waiting(self) -> None:
        """End the wait for the hook."""
        self._over.set()

    async def ended(self) -> None:
        """Wait for the hook, and log it if it is slow, timed out or is no longer waited for."""
        why = "interrupted by a signal"
        try:
            async with asyncio.timeout_at(self._deadline):
                await self._over.wait()
        except TimeoutError:
            why = "exceeded worker_hook_timeout_s"
        waited_s = round(self._loop.time() - self._began_at, 1)
        fields = {"hook": self._name, "waited_s": waited_s}
        if not self._returned:
            log.error("hook timed out; worker continues without it", extra={**fields, "why": why})
        elif waited_s > SLOW_S:
            log.warning("hook was slow", extra=fields)

    def _work(self) -> None:
        try:
            self._hook()
        except (Exception, SystemExit) as error:  # of a hook that users wrote
            _log_error(self._name, error)
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._note_return)

    def _note_return(self) -> None:
        self._returned = True
        self._over.set()


def _log_error(hook: str, error: BaseException) -> None:
    log.error("hook raised an exception", extra={"hook": hook}, exc_info=error)


# ---- hook queue ------------------------------------------------------------------------------------

WAITING_MAX = 1000
NodeHook = Callable[..., None]


class HookQueue:
    """Calls hooks by name: those of nodes that join, leave or are lost (S5), and errbacks.

    The calls are made one after the other, in the order of the events, by a separate thread. A hook that
    hangs delays the next calls and nothing else. When `waiting_max` calls wait, the newest is dropped, and
    the first such drop is logged; `dropped` counts them. The worker stops without waiting for the thread.
    """

    def __init__(self, hooks: Mapping[str, NodeHook], *, waiting_max: int = WAITING_MAX) -> None:
        self.dropped = 0
        self._hooks = hooks
        self._waiting: queue.Queue[tuple[str, dict[str, Any]]] = queue.Queue(waiting_max)
        self._thread: threading.Thread | None = None

    def call(self, name: str, **context: Any) -> None:
        """Queue a call of the hook, if there is one; never blocks."""
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
                text = "hook not called: too many wait for an earlier hook that has not returned"
                log.error(text, extra={"hook": name})

    def wait_called(self, timeout_s: float) -> None:
        """Block until all calls so far have returned, or the timeout is over. Not for the loop."""
        with self._waiting.all_tasks_done:
            self._waiting.all_tasks_done.wait_for(lambda: not self._waiting.unfinished_tasks, timeout_s)

    def _work(self) -> None:
        while True:
            name, context = self._waiting.get()
            try:
                self._hooks[name](**context)
            except (Exception, SystemExit) as error:  # of a hook that users wrote
                _log_error(name, error)
            self._waiting.task_done()


# ---- notices ---------------------------------------------------------------------------------------

NOTICES_WAITING_MAX = 10_000


class NoticeHooks(msgspec.Struct, frozen=True):
    """What is called with this worker's events: code that was written for another worker, as for Celery's
    signals.

    None where a notice is not wanted. Each gets plain data, by name: the `message` in protocol version 2, its
    `queue`, and what is listed here.
    """

    stopping: Callable[..., None] | None = None  # `signal`, `how`: warm, soft (tasks are interrupted) or cold
    heartbeat: Callable[[], None] | None = None  # a heartbeat was sent
    received: Callable[..., None] | None = None  # the message will run here
    log_received: Callable[..., None] | None = None  # the same, on the loop, before the task can run
    revoked: Callable[..., None] | None = None  # `terminated`: it was running, ended by `signal`; `expired`
    unknown: Callable[..., None] | None = None  # this worker has no such task
    rejected: Callable[..., None] | None = None  # it cannot be decoded; `error`; the message is unchanged
    failed: Callable[..., None] | None = None  # it has no outcome (lost, timed out, refused); `error`


class Notices(HookQueue):
    """Calls the notice hooks that are set, off the loop and in the order of the events.

    So a task may begin in its child before its `received` is called; only `log_received` is called at once.
    """

    def __init__(self, hooks: NoticeHooks | None = None) -> None:
        given = msgspec.structs.asdict(hooks or NoticeHooks())
        self._log_received: Callable[..., None] | None = given.pop("log_received")
        wanted = {name: hook for name, hook in given.items() if hook is not None}
        super().__init__(wanted, waiting_max=NOTICES_WAITING_MAX)

    @property
    def wanted(self) -> bool:
        """Whether any hook is called off the loop."""
        return bool(self._hooks)

    @property
    def wants_received(self) -> bool:
        """Whether `received` has any effect."""
        return self._log_received is not None or "received" in self._hooks

    def received(self, message: Message, queue: str) -> None:
        """Report a message that will run here."""
        if self._log_received is not None:
            self._log_received(message=message, queue=queue)
        self.call("received", message=message, queue=queue)


# ---- handlers of elections -------------------------------------------------------------------------

HANDLERS_MAX = 32
STOPPED = "stopped: this node no longer leads the election"

Handler = Callable[[Any, ElectionContext], Any]


class HandlerThreads:
    """Runs handlers of elections in daemon threads, which do not keep the worker from ending.

    At most HANDLERS_MAX run at a time. Further ones wait, while the machine renews their claims. `ended` is
    called on the loop, once for each order, with the outcome.
    """

    def __init__(self, handlers: Mapping[str, Handler], ended: Callable[[HandlerEnded], None]) -> None:
        self._handlers = handlers
        self._ended = ended
        self._running: dict[tuple[str, int], ElectionContext] = {}
        self._waiting: deque[tuple[RunHandler, ElectionContext]] = deque()
        self._threads = 0

    def run(self, order: RunHandler) -> None:
        """Run the handler of the order's topic in a thread, now or when a thread is free."""
        context = ElectionContext(order)
        self._running[context.election_id, context.term] = context
        self._waiting.append((order, context))
        self._start_waiting()

    def prolong(self, election_id: str, term: int, deadline_s: float) -> None:
        """Extend the deadline of a running handler."""
        if (context := self._running.get((election_id, term))) is not None:
            context.prolong(deadline_s)

    def cancel(self, election_id: str, term: int, reason: str) -> None:
        """Tell a running handler that this node no longer leads the election."""
        if (context := self._running.get((election_id, term))) is not None:
            context.cancel(reason)

    def _start_waiting(self) -> None:
        while self._waiting and self._threads < HANDLERS_MAX:
            order, context = self._waiting.popleft()
            self._threads += 1
            arguments = (asyncio.get_running_loop(), order, context)
            name = f"umbel-election-{context.topic}"
            threading.Thread(target=self._work, args=arguments, name=name, daemon=True).start()

    def _work(self, loop: asyncio.AbstractEventLoop, order: RunHandler, context: ElectionContext) -> None:
        failed = False
        try:
            value = _call(self._handlers[context.topic], order.request.action, context)
            outcome = _shown(value)
        except (Exception, SystemExit) as error:  # of a handler that users wrote
            failed, outcome = True, brief(error)
        with suppress(RuntimeError):  # the loop has ended while the handler ran: the outcome is dropped
            loop.call_soon_threadsafe(self._report, context, failed, outcome)

    def _report(self, context: ElectionContext, failed: bool, outcome: str) -> None:
        self._threads -= 1
        del self._running[context.election_id, context.term]
        self._start_waiting()
        ok = not (failed or context.stopped)
        outcome = outcome if ok or failed else STOPPED
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
