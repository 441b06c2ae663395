"""Code that users wrote for a worker: life and node hooks, notices to Celery, handlers of elections.

All of it is called through a guard, and off the event loop unless it is short by contract.
"""

import asyncio
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from umbel.coordination.election_context import ElectionContext
from umbel.errors import WireError
from umbel.pools.guard import Raised, Returned, call_guarded
from umbel.protocol.election.events import HandlerEnded, RunHandler
from umbel.wire.message import Message
from umbel.wire.show import brief
from umbel.wire.values import decode_json

# ---- hooks -----------------------------------------------------------------------------------------
#
# Calls users' code at the stages of a worker's life: `worker_init`, `worker_ready`, `worker_shutdown`.
#
# Events between these stages go to `Notices`.
#
# Each call runs in a new daemon thread, which does not keep the process from ending. The worker waits for
# it up to a timeout, and at most until a (further) stop request: users' code cannot block signals. A call
# that still runs then goes on until the process ends.

log = logging.getLogger("umbel.worker.hooks")
SLOW_S = 1.0  # slower hooks are logged


Hook = Callable[[], None]


def _nothing() -> None:
    return None


class LifeHooks(msgspec.Struct, frozen=True):
    """The calls before a worker connects, when it takes tasks, and when it was asked to stop.

    `worker_init` of an app whose children are forked belongs to the process that forks them: see
    `pools.interface.PreparedHost`.
    """

    init: Hook = _nothing
    ready: Hook = _nothing
    shutdown: Hook = _nothing
    timeout_s: float = 10.0  # for each


class HookRun:
    """One call that has begun. Built on the loop; `ended` is awaited at most once."""

    def __init__(self, name: str, hook: Hook, *, timeout_s: float) -> None:
        self._name = name
        self._hook = hook
        self._loop = asyncio.get_running_loop()
        self._began_at = self._loop.time()
        self._deadline = self._began_at + timeout_s
        self._returned = False
        self._over = asyncio.Event()
        threading.Thread(target=self._work, name=f"umbel-{name}", daemon=True).start()

    def let_go(self) -> None:
        """Do not wait for it any longer."""
        self._over.set()

    async def ended(self) -> None:
        """Return when the hook has returned, timed out or was let go; log the latter two."""
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
        happened = call_guarded(self._hook)
        if isinstance(happened, Raised):
            log.error("hook raised an exception", extra={"hook": self._name}, exc_info=happened.error)
        call_guarded(self._loop.call_soon_threadsafe, self._note_return)  # the loop may have ended

    def _note_return(self) -> None:
        self._returned = True
        self._over.set()


# ---- hook queue ------------------------------------------------------------------------------------
#
# Calls users' code off the loop: hooks of nodes that join, leave or are lost (S5), errbacks.
#
# The calls are made one after the other, in the order of the events, from a separate thread. A hook that
# hangs delays the next ones and nothing else. When `waiting_max` calls wait, the newest is dropped, and the
# first such drop is logged. The worker stops without waiting for the thread.

WAITING_MAX = 1000
NodeHook = Callable[..., None]


class HookQueue:
    """Hooks by name, and the calls that wait. `dropped`: how many were not made."""

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
                log.error(
                    "hook not called: too many wait for an earlier hook that has not returned",
                    extra={"hook": name},
                )

    def wait_called(self, timeout_s: float) -> None:
        """Block until all calls so far have returned, or the timeout is over."""
        with self._waiting.all_tasks_done:
            self._waiting.all_tasks_done.wait_for(lambda: not self._waiting.unfinished_tasks, timeout_s)

    def _work(self) -> None:
        while True:
            name, context = self._waiting.get()
            happened = call_guarded(self._hooks[name], **context)
            if isinstance(happened, Raised):
                log.error("hook raised an exception", extra={"hook": name}, exc_info=happened.error)
            self._waiting.task_done()


# ---- notices ---------------------------------------------------------------------------------------
#
# Reports this worker's events to code that was written for another worker, such as Celery's signals.
#
# Every hook may be unset, and costs nothing then. Those that are set are called off the loop, in the order
# of the events (`HookQueue`): a slow one delays the next and nothing else. So a task may begin in its child
# before its `received` is called; only `log_received` is called at once. They get plain data: the message
# in protocol version 2, its queue, and what else is known.

NOTICES_WAITING_MAX = 10_000


class OnStopping(Protocol):
    """A signal asks the worker to stop: `how` is "warm", "soft" (running tasks are interrupted) or "cold"."""

    def __call__(self, *, signal: str, how: str) -> None: ...


class OnMessage(Protocol):
    """Something happened to a message."""

    def __call__(self, *, message: Message, queue: str) -> None: ...


class OnRevoked(Protocol):
    """A message was revoked. `signal`: what ended the running task, if it was `terminated`."""

    def __call__(
        self, *, message: Message, queue: str, terminated: bool, signal: str, expired: bool
    ) -> None: ...


class OnError(Protocol):
    """A message failed with an error."""

    def __call__(self, *, message: Message, queue: str, error: Exception) -> None: ...


class NoticeHooks(msgspec.Struct, frozen=True):
    """The hooks; None where one is not wanted."""

    stopping: OnStopping | None = None
    heartbeat: Callable[[], None] | None = None  # one was sent
    received: OnMessage | None = None  # it will run here
    log_received: OnMessage | None = None  # the same, on the loop and before the task can run: a log line
    revoked: OnRevoked | None = None
    unknown: OnMessage | None = None  # this worker has no such task
    rejected: OnError | None = None  # it cannot be decoded; the message is unchanged
    failed: OnError | None = None  # the task failed without an outcome: lost, timed out, refused by the pool


class Notices:
    """Calls the hooks that are set. `hears_received`: whether `received` has any effect."""

    def __init__(self, hooks: NoticeHooks | None = None) -> None:
        given = msgspec.structs.asdict(hooks) if hooks else {}
        self._log_received: OnMessage | None = given.pop("log_received", None)
        self._names = frozenset(name for name, hook in given.items() if hook is not None)
        self.hears_received = self._log_received is not None or "received" in self._names
        self._queue = HookQueue({name: given[name] for name in self._names}, waiting_max=NOTICES_WAITING_MAX)

    @property
    def wanted(self) -> bool:
        """Whether any hook is called off the loop."""
        return bool(self._names)

    def stopping(self, signal: str, how: str) -> None:
        """Report a stop signal."""
        if "stopping" in self._names:
            self._queue.call("stopping", signal=signal, how=how)

    def heartbeat(self) -> None:
        """Report that a heartbeat was sent."""
        if "heartbeat" in self._names:
            self._queue.call("heartbeat")

    def received(self, message: Message, queue: str) -> None:
        """Report a message that will run here."""
        if self._log_received is not None:
            self._log_received(message=message, queue=queue)
        if "received" in self._names:
            self._queue.call("received", message=message, queue=queue)

    def revoked(self, message: Message, queue: str, *, signal: str = "", expired: bool = False) -> None:
        """Report a message that was revoked or has expired."""
        if "revoked" in self._names:
            details = {"terminated": bool(signal), "signal": signal, "expired": expired}
            self._queue.call("revoked", message=message, queue=queue, **details)

    def unknown(self, message: Message, queue: str) -> None:
        """Report a message of a task that this worker does not know."""
        if "unknown" in self._names:
            self._queue.call("unknown", message=message, queue=queue)

    def rejected(self, message: Message, queue: str, error: WireError) -> None:
        """Report a message that cannot be read."""
        if "rejected" in self._names:
            self._queue.call("rejected", message=message, queue=queue, error=error)

    def failed(self, message: Message, queue: str, error: Exception) -> None:
        """Report a task that failed without an outcome."""
        if "failed" in self._names:
            self._queue.call("failed", message=message, queue=queue, error=error)

    def wait_told(self, timeout_s: float) -> None:
        """Block until the calls so far have returned, or the timeout is over. Not for the loop."""
        if self.wanted:
            self._queue.wait_called(timeout_s)


# ---- handler threads -------------------------------------------------------------------------------
#
# The threads that run the handlers of elections.
#
# Handlers are users' code. They run off the event loop, in daemon threads that do not keep the worker from
# ending, at most HANDLERS_MAX at a time. Further ones wait, while the machine renews what they hold.

HANDLERS_MAX = 32
STOPPED = "stopped: this node no longer leads the election"


Handler = Callable[[Any, ElectionContext], Any]


class HandlerThreads:
    """Runs handlers; `ended` is called on the loop, once for each order, with the outcome."""

    def __init__(self, handlers: Mapping[str, Handler], ended: Callable[[HandlerEnded], None]) -> None:
        self._handlers = handlers
        self._ended = ended
        self._running: dict[tuple[str, int], ElectionContext] = {}
        self._waiting: deque[tuple[RunHandler, ElectionContext]] = deque()
        self._threads = 0

    def run(self, order: RunHandler) -> None:
        """Run the handler of the order's topic in a thread, now or when one is free."""
        context = ElectionContext(order)
        self._running[context.election_id, context.term] = context
        self._waiting.append((order, context))
        self._start_waiting()

    def prolong(self, election_id: str, term: int, deadline_s: float) -> None:
        """Extend the deadline of a running handler."""
        context = self._running.get((election_id, term))
        if context is not None:
            context.prolong(deadline_s)

    def cancel(self, election_id: str, term: int, reason: str) -> None:
        """Tell a running handler that this node no longer leads the election."""
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
        # The loop may have ended while the handler ran: then the outcome is dropped.
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
