"""Waiting: for the results of many tasks at once, for a broker that is unavailable, and the warning where
blocking code waits on an event loop. Also the exception of a failed task, rebuilt from its stored result.
"""

import logging
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, TypeVar

from umbel.app.request import Request
from umbel.app.types import ResultTypes
from umbel.backends.interface import Backend
from umbel.chance import random
from umbel.errors import (
    AccessRefused,
    BrokerUnavailable,
    JoinWouldBlock,
    RemoteError,
    ResultTimeout,
    WireError,
)
from umbel.pools.guard import Returned, call_guarded
from umbel.protocol.delivery.states import SUCCESS, reconnect_wait_s
from umbel.wire.message import StoredResult
from umbel.wire.result import CELERY_ERRORS, ResultMap

if TYPE_CHECKING:
    from umbel.app.results import AsyncResult

# ---- joining ---------------------------------------------------------------------------------------
#
# Waiting for many results at once, from blocking and from async code alike.

Callback = Callable[[str, Any], object]
"""Called with the id of a task and its value when the result arrives."""


def refuse_join(request: Request, task_id: str, allowed: bool) -> None:
    """Raise JoinWouldBlock in a running task: its child could not run the task that it waits for."""
    if request.is_eager or allowed:
        return
    raise JoinWouldBlock(
        f"task {request.task}[{request.id}] waits for the result of {task_id}. If every child waits, "
        "none is left to run the awaited tasks. Link the tasks instead (chain, link), "
        "or pass allow_join=True"
    )


def join(
    results: "Sequence[AsyncResult[Any]]", timeout: float | None, *, propagate: bool, allow_join: bool | None
) -> list[Any]:
    """Wait for all results and return their values; the first failed task raises its exception at once."""
    joining = _Joining(results, timeout, propagate=propagate, allow_join=allow_join)
    for backend in joining.backends():
        backend.wait(joining.waiting_at(backend), joining.left_s(), joining.take)
        joining.check(backend)
    return joining.values()


async def join_async(
    results: "Sequence[AsyncResult[Any]]", timeout: float | None, *, propagate: bool, allow_join: bool | None
) -> list[Any]:
    """The same as `join` for async code."""
    joining = _Joining(results, timeout, propagate=propagate, allow_join=allow_join)
    for backend in joining.backends():
        await backend.wait_async(joining.waiting_at(backend), joining.left_s(), joining.take)
        joining.check(backend)
    return joining.values()


class _Joining:
    """The decisions of `join`, for both ways of waiting. It reads each result once, however many wait."""

    def __init__(
        self,
        results: "Sequence[AsyncResult[Any]]",
        timeout: float | None,
        *,
        propagate: bool,
        allow_join: bool | None,
    ) -> None:
        self._results = results
        self._timeout = timeout
        self._deadline = None if timeout is None else monotonic() + timeout
        self._propagate = propagate
        self._failed: AsyncResult[Any] | None = None
        self._unread: WireError | None = None
        self._waiting: dict[str, list[AsyncResult[Any]]] = {}  # by the id of the task
        stored = [result for result in results if not result.ignored]
        if stored:
            stored[0]._refuse_join(allow_join)
        for result in stored:
            if result._final is None:
                self._waiting.setdefault(result.id, []).append(result)
            elif propagate:
                result._value(propagate=True)

    def backends(self) -> list[Backend]:
        """The backends of the missing results, each once."""
        by_identity = {
            id(result._backend): result._backend for same in self._waiting.values() for result in same
        }
        return list(by_identity.values())

    def waiting_at(self, backend: Backend) -> list[str]:
        return [task_id for task_id, same in self._waiting.items() if same[0]._backend is backend]

    def left_s(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - monotonic())

    def take(self, found: Mapping[str, StoredResult]) -> bool:
        """Store results that have arrived; True when no more waiting is needed, because a task has failed."""
        for task_id in found:
            for result in self._waiting.pop(task_id, ()):
                try:
                    result._keep(found, self._timeout)
                except WireError as error:  # another program wrote it
                    self._unread = error
                    return True
                if result._final is not None and result._final.status != SUCCESS:
                    self._failed = self._failed or result
        return self._propagate and self._failed is not None

    def check(self, backend: Backend) -> None:
        """Raise the exception of a failed task, or ResultTimeout."""
        if self._unread is not None:
            raise self._unread
        if self._propagate and self._failed is not None:
            self._failed._value(propagate=True)
        if self.waiting_at(backend):
            raise ResultTimeout(
                f"{len(self._waiting)} of {len(self._results)} tasks had no result within {self._timeout} s; "
                "is a worker consuming their queue?"
            )

    def values(self) -> list[Any]:
        return [
            None if result.ignored else result._value(propagate=self._propagate) for result in self._results
        ]


# ---- rebuilding ------------------------------------------------------------------------------------
#
# The exception that a task raised, from its stored result.

_OURS = {described: kind for kind, described in CELERY_ERRORS.items()}


_WITH_EXCEPTION = frozenset({"FAILURE", "RETRY", "REVOKED"})


def shown_result(found: ResultMap | None, types: ResultTypes | None) -> Any:
    """The value of a stored result: the return value, the exception, or what `update_state` stored."""
    if found is None:
        return None
    if found.status in _WITH_EXCEPTION:
        return rebuild_exception(found.result)
    return found.result if types is None or found.status != SUCCESS else types.parse_result(found.result)


def rebuild_exception(described: Any) -> Exception:
    """The exception that a worker described; a RemoteError when its class is not known in this process.

    Only classes of modules that are already imported are used: a result is data, and data must not make this
    process import code.
    """
    if not isinstance(described, dict) or "exc_type" not in described:
        return RemoteError(
            "the task failed, but its stored error cannot be read; see the log of the worker that ran it",
            described,
        )
    name = str(described["exc_type"])
    message = described.get("exc_message") or []
    args = tuple(message) if isinstance(message, list | tuple) else (message,)
    found = _find_class(str(described.get("exc_module")), name)
    if found is None:
        return RemoteError(name, *args)
    made = call_guarded(found, *args)  # its constructor may want other arguments
    if isinstance(made, Returned) and isinstance(made.value, Exception):
        return made.value
    return RemoteError(name, *args)


def _find_class(module: str, name: str) -> type[Exception] | None:
    ours = _OURS.get((module, name))
    if ours is not None:
        module, name = ours.__module__, ours.__qualname__
    found: object = sys.modules.get(module)
    for part in name.split("."):
        # Not getattr: a module may import on access, as our own does.
        found = getattr(found, "__dict__", {}).get(part)
    # SystemExit and its like would end the process that asks for a result.
    return found if isinstance(found, type) and issubclass(found, Exception) else None


# ---- patience --------------------------------------------------------------------------------------
#
# How long a sender retries after failures of the broker.
#
# It waits up to `publish_timeout_s`, retries with growing pauses, and then raises. An attempt whose outcome
# is unknown, because the connection broke before the answer, is repeated: a message may arrive twice, but
# is not lost.

T = TypeVar("T")
log = logging.getLogger("umbel.publishing")
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 1.0


class Patience:
    """How long to retry after failures of the broker, shared by blocking and async senders.

    The first failure is logged, unless `may_tell` says that this outage has just been logged.
    """

    def __init__(
        self, timeout_s: float, may_tell: Callable[[], bool] = lambda: True, *, began: float | None = None
    ) -> None:
        """`began`: when the first attempt began, on the monotonic clock; None: now."""
        self._ends = (monotonic() if began is None else began) + timeout_s
        self._failures = 0
        self._may_tell = may_tell

    def pause_s(self, error: BrokerUnavailable) -> float:
        """How long to wait before the next attempt; raises the error if a retry is useless or too late."""
        if isinstance(error, AccessRefused):
            raise error
        self._failures += 1
        pause_s = reconnect_wait_s(self._failures, random(), first_s=FIRST_PAUSE_S, most_s=LONGEST_PAUSE_S)
        left_s = self._ends - monotonic()
        if pause_s >= left_s:
            raise error
        if self._failures == 1 and self._may_tell():
            fields = {"up_to_s": round(left_s, 1), "why": str(error)}
            log.warning("broker unavailable; waiting to publish", extra=fields)
        return pause_s


def patiently(work: Callable[[], T], timeout_s: float) -> T:
    """Retry while the broker is unavailable and time is left; an attempt itself may take longer."""
    patience = Patience(timeout_s)
    try:
        return work()
    except BrokerUnavailable as error:
        failed = error
    return retried(work, failed, patience)


def retried(work: Callable[[], T], failed: BrokerUnavailable, patience: Patience) -> T:
    """The same as `patiently` for work that was attempted once, and failed with this error."""
    while True:
        sleep(patience.pause_s(failed))
        try:
            return work()
        except BrokerUnavailable as error:
            failed = error


# ---- loop warning ----------------------------------------------------------------------------------
#
# A warning when the blocking client is used on a running event loop, with what to use instead.

_warned: set[str] = set()
_changing_warned = Lock()


def warn_on_loop(what: str, remedy: str) -> None:
    """Warn once in a process for each kind of blocking call on an event loop; nearly free without a loop."""
    asyncio = sys.modules.get("asyncio")
    if asyncio is None or what in _warned or asyncio._get_running_loop() is None:
        return
    with _changing_warned:
        if what in _warned:
            return
        _warned.add(what)
    warnings.warn(
        f"{what} blocks the event loop that runs in this thread, and all that it serves; use {remedy}",
        RuntimeWarning,
        stacklevel=_users_frame(),
    )


def _users_frame() -> int:
    """How many frames above the caller users' code is."""
    frame, level = sys._getframe(2), 2
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).startswith("umbel."):
        frame, level = frame.f_back, level + 1
    return level
