"""Results: handles of tasks and groups, for blocking and for async code. A handle is the task's id and the
app whose result backend is asked; a final result is read once and retained by the handle.
"""

from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar, cast

from umbel.app.request import current_request
from umbel.app.types import ResultTypes
from umbel.app.waiting import (
    Callback,
    join,
    join_async,
    rebuild_exception,
    refuse_join,
    shown_result,
    warn_on_loop,
)
from umbel.backends.interface import Backend
from umbel.errors import BadValue, BrokerError, ConfigurationError, NotKept, ResultTimeout
from umbel.protocol.delivery.states import FAILURE, PENDING, READY_STATES, SUCCESS
from umbel.wire.message import StoredResult, parse_instant
from umbel.wire.result import ResultMap, decode_result
from umbel.wire.show import brief
from umbel.wire.values import decode_json, encode_json

if TYPE_CHECKING:
    from umbel.app.cluster.commands import Commands
    from umbel.app.event_feed import EventSubscription
    from umbel.app.running.eager import EagerBackend
    from umbel.app.settings import Settings

R = TypeVar("R")
T = TypeVar("T")
STATE_S = 0.1
RETRY_WAIT_S = 10.0  # for the broker
UNANSWERED = "unknown: the result backend does not answer"


class StoringApp(Protocol):
    """An app that stores results."""

    @property
    def backend(self) -> Backend:
        """The result backend, opened when it is first needed."""


class AwaitedApp(Protocol):
    """What an awaited result needs of its app."""

    async def abackend(self) -> Backend:
        """The result backend, ready to be awaited on this loop."""

    async def abeside(self, work: Callable[[], T]) -> T:
        """Run blocking work in a thread."""
        ...

    def alisten(self, task_id: str) -> "AbstractAsyncContextManager[EventSubscription]":
        """The events of a task, from now on."""
        ...


class ResultApp(StoringApp, AwaitedApp, Protocol):
    """What a result needs of its app."""

    @property
    def settings(self) -> "Settings":
        """The app's settings, read for `task_allow_join`."""

    @property
    def eager_backend(self) -> "EagerBackend | None":
        """The in-memory result backend of eager mode; None outside it."""

    @property
    def control(self) -> "Commands[Any, Any]":
        """Remote control, by which tasks are revoked and retried."""


class AsyncResult(Generic[R]):
    """A handle on a task that was sent: its state, its value, and how to wait for it."""

    __slots__ = ("__weakref__", "_eager", "_final", "_types", "app", "id", "ignored", "parent")

    def __init__(
        self,
        task_id: str,
        *,
        app: "ResultApp",
        parent: Any = None,
        ignored: bool = False,
        types: ResultTypes | None = None,
    ) -> None:
        self.id = task_id
        self._types = types  # of its task, where that is known: they convert the value
        self.ignored = ignored  # no result will be stored: there is nothing to wait for
        self.app: ResultApp = app
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
            self._keep(self._backend.wait([self.id], timeout), timeout)
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
        return shown_result(self._read(), self._types)

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
        """The results of the tasks that this one sent; None until a result is stored."""
        found = self._read()
        if found is None:
            return None
        return [result_from_tuple(child, self.app) for child in found.children or ()]

    def collect(
        self, intermediate: bool = False, **options: Any
    ) -> "Iterator[tuple[AsyncResult[Any] | GroupResult, Any]]":
        """Yield each result with its value: of this task, of those it sent, and so on. Waits for each."""
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
        retried: Self = await self.app.abeside(lambda: self.retry(timeout=timeout))
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
            self._keep(found, timeout)
        return self._value(propagate=propagate)

    async def astate(self) -> str:
        """The same as `state`: PENDING (also: unknown), STARTED, RETRY, SUCCESS, FAILURE, REVOKED, or a
        custom one.
        """
        found = await self._aread()
        return found.status if found else PENDING

    async def ainfo(self) -> Any:
        """The same as `info`: the return value, or the exception, or what `update_state` stored."""
        return shown_result(await self._aread(), self._types)

    async def aready(self) -> bool:
        """Whether the task has ended."""
        return await self.astate() in READY_STATES

    async def aforget(self) -> None:
        """Remove the stored result."""
        await self.app.abeside(self.forget)

    async def arevoke(self, *, terminate: bool = False, signal: str | None = None) -> None:
        """Prevent the task from starting; `terminate` also ends it if it runs."""
        await self.app.abeside(lambda: self.revoke(terminate=terminate, signal=signal))

    def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        return self.aevents()

    def aevents(self, timeout: float | None = None) -> AsyncIterator[dict[str, Any]]:
        """The events of the task from now until it ends, as workers send them (`task-started`, ...).

        Workers send them with `-E`. The last event shows how the task ended, even if workers send none.
        """
        from umbel.app.event_feed import events_of  # with a broker, which few clients listen to

        return events_of(self.id, self.app.alisten, self._awaited_end, timeout)

    # -- the parts of it ---------------------------------------------------------------------------

    @property
    def _backend(self) -> Backend:
        """The backend with this result; a result of eager mode stays readable after that mode has ended."""
        return self._eager or self.app.backend

    def _read(self) -> ResultMap | None:
        if self._final is not None:
            return self._final
        self._warn("reading the state of a result", "await result.astate()")
        return self._noted(self._backend.read([self.id]).get(self.id))

    def _noted(self, stored: StoredResult | None) -> ResultMap | None:
        if stored is None:
            return None
        found = decode_result(stored.payload)
        if found.status in READY_STATES:
            self._final = found
        return found

    def _keep(self, found: Mapping[str, StoredResult], timeout: float | None) -> None:
        if self.id not in found:
            raise self._missing(timeout, self._last_state())
        self._final = decode_result(found[self.id].payload)

    def _missing(self, timeout: float | None, state: str) -> ResultTimeout:
        return ResultTimeout(
            f"no result of task {self.id} within {timeout} s (its state is {state}); "
            "is a worker consuming its queue?"
        )

    def _warn(self, what: str, remedy: str) -> None:
        if self._eager is None:
            warn_on_loop(what, remedy)

    def _last_state(self) -> str:
        """The state for an error message; the result backend gets a moment to answer."""
        try:
            found = self._backend.read([self.id], timeout_s=STATE_S).get(self.id)
        except BrokerError:
            return UNANSWERED
        return found.status if found else PENDING

    async def _aread(self) -> ResultMap | None:
        if self._final is not None:
            return self._final
        backend = await self._abackend()
        return self._noted((await backend.read_async([self.id])).get(self.id))

    async def _awaited_end(self) -> str:
        """Wait for the final state."""
        found = await (await self._abackend()).wait_async([self.id], None)
        self._keep(found, None)
        return found[self.id].status

    async def _abackend(self) -> Backend:
        return self._eager or await self.app.abackend()

    async def _alast_state(self, backend: Backend) -> str:
        """The state for an error message; the result backend gets a moment to answer."""
        try:
            found = (await backend.read_async([self.id], STATE_S)).get(self.id)
        except BrokerError:
            return UNANSWERED
        return found.status if found else PENDING

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
        request = current_request()
        if request is not None:
            allowed = self.app.settings.task_allow_join if allow_join is None else allow_join
            refuse_join(request, self.id, allowed)

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
        app: ResultApp | None,
        parent: Any = None,
    ) -> None:
        self.id = group_id
        self.results: list[AsyncResult[Any] | GroupResult] = list(results)
        self.app: ResultApp = cast("ResultApp", _NoApp()) if app is None else app
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
        """Wait for all; the first member that failed raises its exception here, as soon as it fails.

        With a `callback` the values go there, one after another in their order, and the list is empty.
        """
        allowed = allow_join if disable_sync_subtasks else True
        values = join(self._flat(), timeout, propagate=propagate, allow_join=allowed)
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
    def restore(cls, group_id: str, *, app: ResultApp) -> "GroupResult | None":
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
        await self.app.abackend()
        values = await join_async(self._flat(), timeout, propagate=propagate, allow_join=allow_join)
        return self._nested(values)

    async def aready(self) -> bool:
        """Whether all members have ended."""
        return all([await result.aready() for result in self.results])

    async def asave(self) -> None:
        """Store which results belong to the group, so that `restore` finds them by its id."""
        await self.app.abeside(self.save)

    async def aforget(self) -> None:
        """Remove the stored results of its members."""
        if self.results:
            await self.app.abeside(self.forget)

    async def arevoke(self, *, terminate: bool = False, signal: str | None = None) -> None:
        """Prevent its tasks from starting; `terminate` also ends those that run."""
        if self.results:
            await self.app.abeside(lambda: self.revoke(terminate=terminate, signal=signal))

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


def result_from_tuple(stored: Any, app: ResultApp) -> AsyncResult[Any] | GroupResult:
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

    def __init__(self, app: ResultApp) -> None:
        self._app = app

    def __call__(self, group_id: str, results: Sequence[AsyncResult[Any] | GroupResult]) -> GroupResult:
        return GroupResult(group_id, results, app=self._app)

    def restore(self, group_id: str) -> GroupResult | None:
        """The group that was saved under this id; None if there is none."""
        return GroupResult.restore(group_id, app=self._app)
