"""AsyncResult: a handle on a task that was sent, by its id.

Waiting goes through the result backend, which is notified when the result arrives; it does not poll.
In async code a result can be awaited, which does not block the loop.
"""

import sys
from collections.abc import Generator, Mapping, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from umbel.app.running.request import current_request
from umbel.backends.interface import Backend
from umbel.errors import BrokerError, JoinWouldBlock, RemoteError, ResultTimeout
from umbel.pools.guard import Returned, call_guarded
from umbel.protocol.delivery.states import FAILURE, PENDING, READY_STATES, SUCCESS
from umbel.wire.message import StoredResult
from umbel.wire.result import CELERY_ERRORS, ResultMap, decode_result

if TYPE_CHECKING:
    from umbel.app.cluster.commands import Commands
    from umbel.app.configuration.settings import Settings

R = TypeVar("R")

_OURS = {described: kind for kind, described in CELERY_ERRORS.items()}
STATE_S = 0.1


class StoringApp(Protocol):
    @property
    def backend(self) -> Backend: ...


class ResultApp(StoringApp, Protocol):
    """What a result needs of its app."""

    @property
    def settings(self) -> "Settings": ...
    @property
    def eager_backend(self) -> Backend | None: ...
    @property
    def control(self) -> "Commands[Any, Any]": ...


class AsyncResult(Generic[R]):
    __slots__ = ("__weakref__", "_eager", "_final", "app", "id", "ignored", "parent")  # many are made at once

    def __init__(
        self, task_id: str, *, app: "ResultApp", parent: "Any | None" = None, ignored: bool = False
    ) -> None:
        self.id = task_id
        self.ignored = ignored  # no result will be stored: there is nothing to wait for
        self.app = app
        self.parent = parent
        self._eager = app.eager_backend
        self._final: ResultMap | None = None

    def get(
        self, timeout: float | None = None, *, propagate: bool = True, allow_join: bool | None = None
    ) -> R:
        """Wait for the result and return it; a failed task raises its exception here."""
        if self.ignored:
            return None  # type: ignore[return-value]
        self._refuse_join(allow_join)
        if self._final is None:
            self._keep(self._backend.wait([self.id], timeout), timeout)
        return self._value(propagate=propagate)

    def __await__(self) -> Generator[Any, None, R]:
        return self.get_async().__await__()

    async def get_async(
        self, timeout: float | None = None, *, propagate: bool = True, allow_join: bool | None = None
    ) -> R:
        """The same as `get` for async code: the event loop is not blocked."""
        if self.ignored:
            return None  # type: ignore[return-value]
        self._refuse_join(allow_join)
        if self._final is None:
            self._keep(await self._backend.wait_async([self.id], timeout), timeout)
        return self._value(propagate=propagate)

    @property
    def state(self) -> str:
        """PENDING (also: unknown), STARTED, RETRY, SUCCESS, FAILURE, REVOKED, or a custom state."""
        found = self._read()
        return found.status if found else PENDING

    status = state

    @property
    def result(self) -> Any:
        """The return value, or the exception, or what `update_state` stored; None while pending."""
        found = self._read()
        if found is None:
            return None
        return rebuild_exception(found.result) if found.status in _WITH_EXCEPTION else found.result

    @property
    def info(self) -> Any:
        """The same as `result`, as Celery calls it: what `update_state` stored, while the task runs."""
        return self.result

    @property
    def traceback(self) -> str | None:
        found = self._read()
        return found.traceback if found else None

    def ready(self) -> bool:
        return self.state in READY_STATES

    def successful(self) -> bool:
        return self.state == SUCCESS

    def failed(self) -> bool:
        return self.state == FAILURE

    def forget(self) -> None:
        """Remove the stored result."""
        self._final = None
        self._backend.forget([self.id])

    def revoke(self, *, terminate: bool = False, signal: str | None = None) -> None:
        """Prevent the task from starting; `terminate` also ends it if it runs.

        It also works while no worker is running; running workers are notified at once.
        """
        self.app.control.revoke(self.id, terminate=terminate, signal=signal)

    @property
    def _backend(self) -> Backend:
        """A result of eager mode stays readable when that mode has ended."""
        return self._eager or self.app.backend

    def _read(self) -> ResultMap | None:
        if self._final is not None:
            return self._final
        stored = self._backend.read([self.id]).get(self.id)
        if stored is None:
            return None
        found = decode_result(stored.payload)
        if found.status in READY_STATES:
            self._final = found
        return found

    def _keep(self, found: Mapping[str, StoredResult], timeout: float | None) -> None:
        if self.id not in found:
            raise ResultTimeout(
                f"no result of task {self.id} within {timeout} s (its state is {self._last_state()}); "
                "is a worker consuming its queue?"
            )
        self._final = decode_result(found[self.id].payload)

    def _last_state(self) -> str:
        """The state for an error message; the result backend gets a moment to answer."""
        try:
            found = self._backend.read([self.id], timeout_s=STATE_S).get(self.id)
        except BrokerError:
            return "unknown: the result backend does not answer"
        return found.status if found else PENDING

    def _value(self, *, propagate: bool) -> R:
        assert self._final is not None
        if self._final.status == SUCCESS:
            value: R = self._final.result
            return value
        error = rebuild_exception(self._final.result)
        if not propagate:
            return error  # type: ignore[return-value]
        if self._final.traceback:
            error.add_note(f"\nin the worker:\n{self._final.traceback}")
        raise error

    def _refuse_join(self, allow_join: bool | None) -> None:
        allowed = self.app.settings.task_allow_join if allow_join is None else allow_join
        request = current_request()
        if request is None or request.is_eager or allowed:
            return
        raise JoinWouldBlock(
            f"task {request.task}[{request.id}] waits for the result of {self.id}. If every child waits, "
            "none is left to run the awaited tasks. Link the tasks instead (chain, link), "
            "or pass allow_join=True"
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AsyncResult) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return f"<AsyncResult {self.id}>"


Question = tuple[Backend, set[str], float | None]
"""Which of these tasks have a final state, waiting at most so long for one of them?"""


def join(
    results: Sequence[AsyncResult[Any]], timeout: float | None, *, propagate: bool, allow_join: bool | None
) -> list[Any]:
    """The values of all; the first that failed raises its exception here, as soon as it is known."""
    steps = _joining(results, timeout, propagate, allow_join)
    try:
        backend, task_ids, left_s = next(steps)
        while True:
            backend, task_ids, left_s = steps.send(backend.wait(task_ids, left_s))
    except StopIteration as end:
        values: list[Any] = end.value
        return values


async def join_async(
    results: Sequence[AsyncResult[Any]], timeout: float | None, *, propagate: bool, allow_join: bool | None
) -> list[Any]:
    """The same for async code."""
    steps = _joining(results, timeout, propagate, allow_join)
    try:
        backend, task_ids, left_s = next(steps)
        while True:
            backend, task_ids, left_s = steps.send(await backend.wait_async(task_ids, left_s))
    except StopIteration as end:
        values: list[Any] = end.value
        return values


def _joining(
    results: Sequence[AsyncResult[Any]], timeout: float | None, propagate: bool, allow_join: bool | None
) -> Generator[Question, Mapping[str, StoredResult], list[Any]]:
    """What `join` does, apart from how it waits: it asks, and is sent what was found."""
    deadline = None if timeout is None else monotonic() + timeout
    stored = [result for result in results if not result.ignored]
    if stored:
        stored[0]._refuse_join(allow_join)
    while True:
        if propagate:
            for result in stored:
                if result._final is not None:
                    result._value(propagate=True)
        waiting = [result for result in stored if result._final is None]
        if not waiting:
            return [None if result.ignored else result._value(propagate=propagate) for result in results]
        backend = waiting[0]._backend
        task_ids = {result.id for result in waiting if result._backend is backend}
        found = yield backend, task_ids, None if deadline is None else max(0.0, deadline - monotonic())
        if not found:
            raise ResultTimeout(
                f"{len(waiting)} of {len(results)} tasks had no result within {timeout} s; "
                "is a worker consuming their queue?"
            )
        for result in waiting:
            if result.id in found:
                result._keep(found, timeout)


_WITH_EXCEPTION = frozenset({"FAILURE", "RETRY", "REVOKED"})


def rebuild_exception(described: Any) -> Exception:
    """The exception a worker described; a stand-in when its class is not known in this process.

    Only classes of modules that are already imported are used: a result is data, and data
    must not make this process import code.
    """
    if not isinstance(described, dict) or "exc_type" not in described:
        return RemoteError("unknown error", described)
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
