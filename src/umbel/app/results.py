"""Results: handles of tasks and groups, for blocking and for async code.

A handle is the id of a task and the app whose result backend is asked. A final result is read once and then
retained by the handle.
"""

import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import islice
from time import monotonic
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, cast

from umbel.app.request import current_request
from umbel.app.types import ResultTypes
from umbel.app.waiting import warn_on_loop
from umbel.backends.interface import Backend
from umbel.errors import (
    BadValue,
    BrokerError,
    ConfigurationError,
    JoinWouldBlock,
    NotKept,
    RemoteError,
    ResultTimeout,
    WireError,
)
from umbel.pools.guard import Returned, call_guarded
from umbel.protocol.delivery.states import FAILURE, PENDING, READY_STATES, SUCCESS
from umbel.wire.message import StoredResult, parse_instant
from umbel.wire.result import CELERY_ERRORS, ResultMap, decode_result
from umbel.wire.show import brief
from umbel.wire.values import decode_json, encode_json

if TYPE_CHECKING:
    from umbel.app.app import App

R = TypeVar("R")
STATE_S = 0.1
RETRY_WAIT_S = 10.0  # for the broker
UNANSWERED = "unknown: the result backend does not answer"
Callback = Callable[[str, Any], object]
"""Called with the id of a task and its value when the result arrives."""


class AsyncResult(Generic[R]):
    """A handle on a task that was sent: its state, its value, and how to wait for it."""

    __slots__ = ("__weakref__", "_eager", "_final", "_types", "app", "id", "ignored", "parent")

    def __init__(
        self,
        task_id: str,
        *,
        app: "App",
        parent: Any = None,
        ignored: bool = False,
        types: ResultTypes | None = None,
    ) -> None:
        self.id = task_id
        self._types = types  # of the task, where they are known: they convert the value
        self.ignored = ignored  # no result will be stored, so there is nothing to wait for
        self.app = app
        self.parent = parent
        self._eager = app.eager_backend
        self._final: ResultMap | None = None

    @property
    def task_id(self) -> str:
        """The id of the task."""
        return self.id

    def get(
        self,
        timeout: float | None = None,
        *,
        propagate: bool = True,
        interval: float | None = None,
        callback: Callback | None = None,
        allow_join: bool | None = None,
        disable_sync_subtasks: bool = True,
    ) -> R:
        """Wait for the result and return it; a failed task raises its exception here.

        `callback` is called with the task's id and its value. `disable_sync_subtasks=False` is
        `allow_join=True`. `interval` is for code that was written for Celery: nothing polls here.
        """
        if self.ignored:
            return None  # type: ignore[return-value]
        self._refuse_join(allow_join if disable_sync_subtasks else True)
        if self._final is None:
            self._warn("waiting for a result", "`await result`, or await result.aget(timeout=...)")
            found = self._backend.wait([self.id], timeout)
            if self.id not in found:
                raise self._missing(timeout, self._last_state())
            self._retain(found[self.id])
        value = self._value(propagate=propagate)
        if callback is not None:
            callback(self.id, value)
        return value

    @property
    def state(self) -> str:
        """PENDING (also: unknown), STARTED, RETRY, SUCCESS, FAILURE, REVOKED, or a custom state."""
        found = self._read()
        return found.status if found else PENDING

    status = state

    @property
    def result(self) -> Any:
        """The return value, or the exception, or what `update_state` stored; None while pending."""
        return self._shown(self._read())

    @property
    def info(self) -> Any:
        """The same as `result`, as Celery calls it: what `update_state` stored, while the task runs."""
        return self.result

    @property
    def traceback(self) -> str | None:
        """The traceback of the task's last failure or retry; None without one."""
        found = self._read()
        return found.traceback if found else None

    @property
    def date_done(self) -> datetime | None:
        """When the task ended; None until then."""
        found = self._read()
        if found is None or found.date_done is None:
            return None
        return datetime.fromtimestamp(parse_instant(found.date_done), UTC)

    @property
    def children(self) -> "list[AsyncResult[Any] | GroupResult] | None":
        """The results of the tasks that this task sent; None until a result is stored."""
        found = self._read()
        if found is None:
            return None
        return [result_from_tuple(child, self.app) for child in found.children or ()]

    def collect(
        self, intermediate: bool = False, **options: Any
    ) -> "Iterator[tuple[AsyncResult[Any] | GroupResult, Any]]":
        """Yield each result with its value: of this task, of the tasks it sent, and so on. Waits for each."""
        waiting: deque[AsyncResult[Any] | GroupResult] = deque([self])
        while waiting:
            result = waiting.popleft()
            yield result, result.get(**options)
            waiting.extend(result.children or ())

    def as_tuple(self) -> list[Any]:
        """Its id and that of its parent, in the stored form."""
        return [[self.id, self.parent and self.parent.as_tuple()], None]

    def ready(self) -> bool:
        """Whether the task has ended: succeeded, failed or was revoked."""
        return self.state in READY_STATES

    def successful(self) -> bool:
        """Whether the task has succeeded."""
        return self.state == SUCCESS

    def failed(self) -> bool:
        """Whether the task has failed."""
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

    def retry(self, *, timeout: float = RETRY_WAIT_S) -> Self:
        """Send the failed task again, with its arguments, as a new task; return the result of the new task.

        This result does not change. NotKept: the task did not fail, was retried already, or its message is
        not retained.
        """
        if self._eager is not None:  # in eager mode there is no message to retry
            raise NotKept.of(self.id)
        new_id = self.app.control.retry(self.id, reply_to=self.app.backend.reply_to or None, timeout=timeout)
        return type(self)(new_id, app=self.app, types=self._types)

    async def aretry(self, *, timeout: float = RETRY_WAIT_S) -> Self:
        """The same as `retry` for async code."""
        retried: Self = await self.app.clients.here().in_thread(lambda: self.retry(timeout=timeout))
        return retried

    # -- for async code ---------------------------------------------------------------------------

    def __await__(self) -> Generator[Any, None, R]:
        return self.aget().__await__()

    async def aget(
        self, timeout: float | None = None, *, propagate: bool = True, allow_join: bool | None = None
    ) -> R:
        """The same as `get` for async code: the event loop is not blocked."""
        if self.ignored:
            return None  # type: ignore[return-value]
        self._refuse_join(allow_join)
        if self._final is None:
            backend = await self._abackend()
            found = await backend.wait_async([self.id], timeout)
            if self.id not in found:
                raise self._missing(timeout, await self._alast_state(backend))
            self._retain(found[self.id])
        return self._value(propagate=propagate)

    async def astate(self) -> str:
        """PENDING (also: unknown), STARTED, RETRY, SUCCESS, FAILURE, REVOKED, or a custom state."""
        found = await self._aread()
        return found.status if found else PENDING

    async def ainfo(self) -> Any:
        """The same as `info`: the return value, or the exception, or what `update_state` stored."""
        return self._shown(await self._aread())

    async def aready(self) -> bool:
        """Whether the task has ended."""
        return await self.astate() in READY_STATES

    async def aforget(self) -> None:
        """Remove the stored result."""
        await self.app.clients.here().in_thread(self.forget)

    async def arevoke(self, *, terminate: bool = False, signal: str | None = None) -> None:
        """Prevent the task from starting; `terminate` also ends it if it runs."""
        await self.app.clients.here().in_thread(lambda: self.revoke(terminate=terminate, signal=signal))

    def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        return self.aevents()

    def aevents(self, timeout: float | None = None) -> AsyncIterator[dict[str, Any]]:
        """The events of the task from now until it ends, as workers send them (`task-started`, ...).

        Workers send them with `-E`. The last event shows how the task ended, even if workers send none.
        """
        from umbel.app.event_feed import events_of  # with a broker, which few clients listen to

        return events_of(self.app, self.id, self._awaited_end, timeout)

    # -- steps of reading and waiting --------------------------------------------------------------

    @property
    def _backend(self) -> Backend:
        """The backend with this result; a result of eager mode stays readable after that mode has ended."""
        return self._eager or self.app.backend

    def _read(self) -> ResultMap | None:
        if self._final is not None:
            return self._final
        self._warn("reading the state of a result", "await result.astate()")
        return self._decoded(self._backend.read([self.id]))

    async def _aread(self) -> ResultMap | None:
        if self._final is not None:
            return self._final
        return self._decoded(await (await self._abackend()).read_async([self.id]))

    def _decoded(self, found: Mapping[str, StoredResult]) -> ResultMap | None:
        if self.id not in found:
            return None
        result = decode_result(found[self.id].payload)
        if result.status in READY_STATES:
            self._final = result
        return result

    def _retain(self, stored: StoredResult) -> None:
        self._final = decode_result(stored.payload)

    def _missing(self, timeout: float | None, state: str) -> ResultTimeout:
        return ResultTimeout(
            f"no result of task {self.id} within {timeout} s (its state is {state}); "
            "is a worker consuming its queue?"
        )

    def _last_state(self) -> str:
        """The state for an error message; the result backend gets a moment to answer."""
        try:
            return self._state_in(self._backend.read([self.id], STATE_S))
        except BrokerError:
            return UNANSWERED

    async def _alast_state(self, backend: Backend) -> str:
        try:
            return self._state_in(await backend.read_async([self.id], STATE_S))
        except BrokerError:
            return UNANSWERED

    def _state_in(self, found: Mapping[str, StoredResult]) -> str:
        return found[self.id].status if self.id in found else PENDING

    async def _awaited_end(self) -> str:
        """Wait for the final state."""
        found = await (await self._abackend()).wait_async([self.id], None)
        self._retain(found[self.id])
        return found[self.id].status

    async def _abackend(self) -> Backend:
        return self._eager or await self.app.clients.backend()

    def _warn(self, what: str, remedy: str) -> None:
        if self._eager is None:
            warn_on_loop(what, remedy)

    def _shown(self, found: ResultMap | None) -> Any:
        """The value of a stored result: the return value, the exception, or what `update_state` stored."""
        if found is None:
            return None
        if found.status in _WITH_EXCEPTION:
            return rebuild_exception(found.result)
        if self._types is None or found.status != SUCCESS:
            return found.result
        return self._types.parse_result(found.result)

    def _value(self, *, propagate: bool) -> R:
        assert self._final is not None
        if self._final.status == SUCCESS:
            value: R = self._final.result
            if self._types is not None:
                value = self._types.parse_result(value)
            return value
        error = rebuild_exception(self._final.result)
        if not propagate:
            return error  # type: ignore[return-value]
        if self._final.traceback:
            error.add_note(f"\nin the worker:\n{self._final.traceback}")
        raise error

    def _refuse_join(self, allow_join: bool | None) -> None:
        """Raise JoinWouldBlock in a running task: its child could not run the task that it waits for."""
        request = current_request()
        if request is None or request.is_eager:
            return
        if self.app.settings.task_allow_join if allow_join is None else allow_join:
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


class GroupResult:
    """The results of tasks that were sent together, in their order.

    A member that ends in a group has the results of that group in its place.
    """

    def __init__(
        self,
        group_id: str,
        results: "Sequence[AsyncResult[Any] | GroupResult]",
        *,
        app: "App | None",
        parent: Any = None,
    ) -> None:
        self.id = group_id
        self.results: list[AsyncResult[Any] | GroupResult] = list(results)
        self.app = cast("App", _NoApp()) if app is None else app
        self.parent = parent

    def get(
        self,
        timeout: float | None = None,
        *,
        propagate: bool = True,
        interval: float | None = None,
        callback: Callback | None = None,
        allow_join: bool | None = None,
        disable_sync_subtasks: bool = True,
    ) -> list[Any]:
        """Wait for all members. The first member that fails raises its exception here, as soon as it fails.

        A `callback` is called with each task's id and value, in their order; the returned list is then empty.
        """
        allowed = allow_join if disable_sync_subtasks else True
        joining = _Joining(self._flat(), timeout, propagate=propagate, allow_join=allowed)
        for backend in joining.backends():
            backend.wait(joining.waiting_at(backend), joining.left_s(), joining.take)
            joining.check(backend)
        values = joining.values()
        if callback is None:
            return self._nested(values)
        for result, value in zip(self._flat(), values, strict=True):
            callback(result.id, value)
        return []

    join = join_native = get

    @property
    def children(self) -> "list[AsyncResult[Any] | GroupResult]":
        """The results of the members."""
        return self.results

    def save(self) -> "GroupResult":
        """Store which results belong to the group, so that `restore` finds them by its id."""
        self.save_in(self.app.backend)
        return self

    def save_in(self, backend: Backend) -> None:
        """Store the group's members in this backend."""
        backend.save_group(self.id, encode_json({"result": self.as_tuple()}))

    @classmethod
    def restore(cls, group_id: str, *, app: "App") -> "GroupResult | None":
        """The group that was saved under this id; None if there is none, or it has expired."""
        stored = app.backend.read_group(group_id)
        if stored is None:
            return None
        found = decode_json(stored)
        restored = result_from_tuple(found.get("result") if isinstance(found, dict) else found, app)
        if not isinstance(restored, GroupResult):
            raise BadValue(f"the id {group_id!r} is that of one task, not of a saved group")
        return restored

    def delete(self) -> None:
        """Remove what `save` stored; the results of the members stay."""
        self.app.backend.forget_group(self.id)

    def as_tuple(self) -> list[Any]:
        """Its id, that of its parent and those of its members, in the stored form."""
        return [
            [self.id, self.parent and self.parent.as_tuple()],
            [result.as_tuple() for result in self.results],
        ]

    def ready(self) -> bool:
        """Whether all members have ended."""
        return all(result.ready() for result in self.results)

    def successful(self) -> bool:
        """Whether all members have succeeded."""
        return all(result.successful() for result in self.results)

    def failed(self) -> bool:
        """Whether a member has failed."""
        return any(result.failed() for result in self.results)

    def completed_count(self) -> int:
        """How many members have succeeded."""
        return sum(result.successful() for result in self.results)

    def revoke(self, *, terminate: bool = False, signal: str | None = None) -> None:
        """Prevent its tasks from starting; `terminate` also ends those that run."""
        if self.results:
            app = self.results[0].app
            app.control.revoke([result.id for result in self._flat()], terminate=terminate, signal=signal)

    def forget(self) -> None:
        """Remove the stored results of all members."""
        for result in self.results:
            result.forget()

    # -- for async code ---------------------------------------------------------------------------

    def __await__(self) -> Generator[Any, None, list[Any]]:
        return self.aget().__await__()

    async def aget(
        self, timeout: float | None = None, *, propagate: bool = True, allow_join: bool | None = None
    ) -> list[Any]:
        """The same as `get` for async code: the event loop is not blocked."""
        if not self.results:
            return []
        await self.app.clients.backend()
        joining = _Joining(self._flat(), timeout, propagate=propagate, allow_join=allow_join)
        for backend in joining.backends():
            await backend.wait_async(joining.waiting_at(backend), joining.left_s(), joining.take)
            joining.check(backend)
        return self._nested(joining.values())

    async def aready(self) -> bool:
        """Whether all members have ended."""
        return all([await result.aready() for result in self.results])

    async def asave(self) -> None:
        """Store which results belong to the group, so that `restore` finds them by its id."""
        await self.app.clients.here().in_thread(self.save)

    async def aforget(self) -> None:
        """Remove the stored results of its members."""
        if self.results:
            await self.app.clients.here().in_thread(self.forget)

    async def arevoke(self, *, terminate: bool = False, signal: str | None = None) -> None:
        """Prevent its tasks from starting; `terminate` also ends those that run."""
        if self.results:
            await self.app.clients.here().in_thread(lambda: self.revoke(terminate=terminate, signal=signal))

    # -- as a list ---------------------------------------------------------------------------------

    def __iter__(self) -> "Iterator[AsyncResult[Any] | GroupResult]":
        return iter(self.results)

    def __len__(self) -> int:
        return len(self.results)

    def __bool__(self) -> bool:
        """True: it is a result, also that of a group without members."""
        return True

    def __getitem__(self, place: int) -> "AsyncResult[Any] | GroupResult":
        return self.results[place]

    def __repr__(self) -> str:
        return f"<GroupResult {self.id} of {len(self.results)}>"

    def _flat(self) -> list[AsyncResult[Any]]:
        return [
            task
            for result in self.results
            for task in (result._flat() if isinstance(result, GroupResult) else (result,))
        ]

    def arranged(self, values: Mapping[str, Any]) -> list[Any]:
        """The values, by task id, nested as this group is; one flat list if a value is missing."""
        flat = [result.id for result in self._flat()]
        return (
            self._nested(map(values.__getitem__, flat)) if values.keys() >= set(flat) else [*values.values()]
        )

    def _nested(self, values: Iterable[Any]) -> list[Any]:
        """The values of all tasks, each in the place of its result."""
        left = iter(values)
        return [
            result._nested(islice(left, len(result._flat())))
            if isinstance(result, GroupResult)
            else next(left)
            for result in self.results
        ]


class _NoApp:
    """In the place of the app, where a group without members names none."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ConfigurationError(
            "a group that has no members belongs to no app, so its result cannot be saved: it is [] anyway"
        )


def result_from_tuple(stored: Any, app: "App") -> AsyncResult[Any] | GroupResult:
    """The result of a task or of a group, from the form in which results name others (wire 6.1)."""
    match stored:
        case str():
            return AsyncResult(stored, app=app)
        case [[str() as named, parent], members] if members is None or isinstance(members, list):
            of = None if parent is None else result_from_tuple(parent, app)
            if members is None:
                return AsyncResult(named, app=app, parent=of)
            return GroupResult(
                named, [result_from_tuple(member, app) for member in members], app=app, parent=of
            )
    raise BadValue(f"{brief(stored)} is not a saved result: it must be [[id, parent], members or null]")


class SavedGroups:
    """The value of `app.GroupResult`, so that `app.GroupResult.restore(id)` needs no app."""

    def __init__(self, app: "App") -> None:
        self._app = app

    def __call__(self, group_id: str, results: Sequence[AsyncResult[Any] | GroupResult]) -> GroupResult:
        return GroupResult(group_id, results, app=self._app)

    def restore(self, group_id: str) -> GroupResult | None:
        """The group that was saved under this id; None if there is none."""
        return GroupResult.restore(group_id, app=self._app)


# ---- waiting for many results ----------------------------------------------------------------------


class _Joining:
    """The decisions of waiting for many results, blocking or awaited. Each result is read once."""

    def __init__(
        self,
        results: Sequence[AsyncResult[Any]],
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
        """Store results that have arrived. True: no more waiting is needed, because a task has failed."""
        for task_id in found:
            for result in self._waiting.pop(task_id, ()):
                try:
                    result._retain(found[task_id])
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


# ---- the exception of a failed task ----------------------------------------------------------------

_OURS = {described: kind for kind, described in CELERY_ERRORS.items()}
_WITH_EXCEPTION = frozenset({"FAILURE", "RETRY", "REVOKED"})


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
