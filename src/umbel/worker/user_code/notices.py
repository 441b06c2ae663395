"""Notices: tells code that was written for another worker what happens in this one.

Every hook may be unset, and costs nothing then. Those that are set are called off the loop, one after the
other in the order of what happened (`hook_queue.py`): a slow one delays the next and nothing else. So a
task may begin in its child before its `received` is told; `log_received` alone is called at once. They get
plain data: the message in protocol version 2 and its queue, and what else there is to know.
"""

from collections.abc import Callable
from typing import Protocol

import msgspec

from umbel.errors import WireError
from umbel.wire.message import Message
from umbel.worker.user_code.hook_queue import HookQueue

WAITING_MAX = 10_000


class OnStopping(Protocol):
    """A signal asks the worker to stop: `how` is "warm", "soft" (running tasks are told) or "cold"."""

    def __call__(self, *, signal: str, how: str) -> None: ...


class OnMessage(Protocol):
    def __call__(self, *, message: Message, queue: str) -> None: ...


class OnRevoked(Protocol):
    """`signal`: what ended the running task, if it was `terminated`."""

    def __call__(
        self, *, message: Message, queue: str, terminated: bool, signal: str, expired: bool
    ) -> None: ...


class OnError(Protocol):
    def __call__(self, *, message: Message, queue: str, error: Exception) -> None: ...


class NoticeHooks(msgspec.Struct, frozen=True):
    stopping: OnStopping | None = None
    heartbeat: Callable[[], None] | None = None  # one was sent
    received: OnMessage | None = None  # it is to run here
    log_received: OnMessage | None = None  # the same, on the loop and before the task can run: a log line
    revoked: OnRevoked | None = None
    unknown: OnMessage | None = None  # there is no such task here
    rejected: OnError | None = None  # it cannot be read; the message is as it came
    failed: OnError | None = None  # the task failed without an outcome: lost, timed out, refused by the pool


class Notices:
    def __init__(self, hooks: NoticeHooks | None = None) -> None:
        given = msgspec.structs.asdict(hooks) if hooks else {}
        self._log_received: OnMessage | None = given.pop("log_received", None)
        self._names = frozenset(name for name, hook in given.items() if hook is not None)
        self.hears_received = self._log_received is not None or "received" in self._names
        self._queue = HookQueue({name: given[name] for name in self._names}, waiting_max=WAITING_MAX)

    @property
    def wanted(self) -> bool:
        return bool(self._names)

    def stopping(self, signal: str, how: str) -> None:
        if "stopping" in self._names:
            self._queue.call("stopping", signal=signal, how=how)

    def heartbeat(self) -> None:
        if "heartbeat" in self._names:
            self._queue.call("heartbeat")

    def received(self, message: Message, queue: str) -> None:
        if self._log_received is not None:
            self._log_received(message=message, queue=queue)
        if "received" in self._names:
            self._queue.call("received", message=message, queue=queue)

    def revoked(self, message: Message, queue: str, *, signal: str = "", expired: bool = False) -> None:
        if "revoked" in self._names:
            told = {"terminated": bool(signal), "signal": signal, "expired": expired}
            self._queue.call("revoked", message=message, queue=queue, **told)

    def unknown(self, message: Message, queue: str) -> None:
        if "unknown" in self._names:
            self._queue.call("unknown", message=message, queue=queue)

    def rejected(self, message: Message, queue: str, error: WireError) -> None:
        if "rejected" in self._names:
            self._queue.call("rejected", message=message, queue=queue, error=error)

    def failed(self, message: Message, queue: str, error: Exception) -> None:
        if "failed" in self._names:
            self._queue.call("failed", message=message, queue=queue, error=error)

    def wait_told(self, timeout_s: float) -> None:
        """Block until what has happened so far is told, or for so long. Not for the loop."""
        if self.wanted:
            self._queue.wait_called(timeout_s)
