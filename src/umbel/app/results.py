"""AsyncResult: a handle on a task that was sent, by its id; GroupResult: on several.

Waiting goes through the result backend, which is notified when the result arrives; it does not poll.
In async code a result can be awaited, which does not block the loop (`aio/results.py`).
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from umbel.app.aio.loop_warning import warn_on_loop
from umbel.app.aio.results import STATE_S, UNANSWERED, AwaitedApp, AwaitedGroup, AwaitedResult
from umbel.app.joining import Callback, join, refuse_join
from umbel.app.rebuilding import rebuild_exception, shown_result
from umbel.app.retrying import RetryableResult
from umbel.app.running.request import current_request
from umbel.app.types.call_types import ResultTypes
from umbel.backends.interface import Backend, InPlaceBackend
from umbel.errors import BadValue, BrokerError, ResultTimeout
from umbel.protocol.delivery.states import FAILURE, PENDING, READY_STATES, SUCCESS
from umbel.wire.instant import parse_instant
from umbel.wire.message import StoredResult
from umbel.wire.result import ResultMap, decode_result
from umbel.wire.show import brief
from umbel.wire.values import decode_json, encode_json

if TYPE_CHECKING:
    from umbel.app.cluster.commands import Commands
    from umbel.app.configuration.settings import Settings

R = TypeVar("R")


class StoringApp(Protocol):
    @property
    def backend(self) -> Backend: ...


class ResultApp(StoringApp, AwaitedApp, Protocol):
    """What a result needs of its app."""

    @property
    def settings(self) -> "Settings": ...
    @property
    def eager_backend(self) -> InPlaceBackend | None: ...
    @property
    def control(self) -> "Commands[Any, Any]": ...


class AsyncResult(AwaitedResult[R], RetryableResult):
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
        self._types = types  # of its task, where that is known: they say what the value is
        self.ignored = ignored  # no result will be stored: there is nothing to wait for
        self.app: ResultApp = app
        self.parent = parent
        self._eager = app.eager_backend
        self._final: ResultMap | None = None

    @property
    def task_id(self) -> str:
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
        """The results of the tasks that this one sent; None while nothing is known of it."""
        found = self._read()
        if found is None:
            return None
        return [result_from_tuple(child, self.app) for child in found.children or ()]

    def collect(
        self, intermediate: bool = False, **options: Any
    ) -> "Iterator[tuple[AsyncResult[Any] | GroupResult, Any]]":
        """Each result with its value: of this task, of those it sent, and so on. Each is waited for."""
        waiting: deque[AsyncResult[Any] | GroupResult] = deque([self])
        while waiting:
            result = waiting.popleft()
            yield result, result.get(**options)
            waiting.extend(result.children or ())

    def as_tuple(self) -> list[Any]:
        """Its id, and that of its parent, as they are stored."""
        return [[self.id, self.parent and self.parent.as_tuple()], None]

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


class GroupResult(AwaitedGroup):
    """The results of tasks that were sent together, in their order.

    A member that ends in a group has the results of that group in its place.
    """

    def __init__(
        self,
        group_id: str,
        results: "Sequence[AsyncResult[Any] | GroupResult]",
        *,
        app: ResultApp,
        parent: Any = None,
    ) -> None:
        self.id = group_id
        self.results: list[AsyncResult[Any] | GroupResult] = list(results)
        self.app: ResultApp = app
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
        return self.results

    def save(self) -> "GroupResult":
        """Keep which results belong to the group, so that `restore` finds them by its id."""
        self.save_in(self.app.backend)
        return self

    def save_in(self, backend: Backend) -> None:
        backend.save_group(self.id, encode_json({"result": self.as_tuple()}))

    @classmethod
    def restore(cls, group_id: str, *, app: ResultApp) -> "GroupResult | None":
        """The group that was saved under this id; None if there is none, or no longer."""
        kept = app.backend.read_group(group_id)
        if kept is None:
            return None
        found = decode_json(kept)
        restored = result_from_tuple(found.get("result") if isinstance(found, dict) else found, app)
        if not isinstance(restored, GroupResult):
            raise BadValue(f"the id {group_id!r} is that of one task, not of a saved group")
        return restored

    def delete(self) -> None:
        """Forget what `save` kept; the results themselves stay."""
        self.app.backend.forget_group(self.id)

    def as_tuple(self) -> list[Any]:
        """Its id, that of its parent and those of its members, as they are stored."""
        return [
            [self.id, self.parent and self.parent.as_tuple()],
            [result.as_tuple() for result in self.results],
        ]

    def ready(self) -> bool:
        return all(result.ready() for result in self.results)

    def successful(self) -> bool:
        return all(result.successful() for result in self.results)

    def failed(self) -> bool:
        return any(result.failed() for result in self.results)

    def completed_count(self) -> int:
        return sum(result.successful() for result in self.results)

    def revoke(self, *, terminate: bool = False, signal: str | None = None) -> None:
        """Prevent its tasks from starting; `terminate` also ends those that run."""
        if self.results:
            app = self.results[0].app
            app.control.revoke([result.id for result in self._flat()], terminate=terminate, signal=signal)

    def forget(self) -> None:
        for result in self.results:
            result.forget()

    def __iter__(self) -> "Iterator[AsyncResult[Any] | GroupResult]":
        return iter(self.results)

    def __len__(self) -> int:
        return len(self.results)

    def __getitem__(self, place: int) -> "AsyncResult[Any] | GroupResult":
        return self.results[place]

    def __repr__(self) -> str:
        return f"<GroupResult {self.id} of {len(self.results)}>"

    def _flat(self) -> list[AsyncResult[Any]]:
        return [
            task for one in self.results for task in (one._flat() if isinstance(one, GroupResult) else (one,))
        ]

    def arranged(self, values: Mapping[str, Any]) -> list[Any]:
        """The values, by the ids of their tasks, as this group has them; all in a row if one is missing."""
        flat = [result.id for result in self._flat()]
        return (
            self._nested(map(values.__getitem__, flat)) if values.keys() >= set(flat) else [*values.values()]
        )

    def _nested(self, values: Iterable[Any]) -> list[Any]:
        """The values of all tasks, each in the place of its result."""
        left = iter(values)
        return [
            one._nested(islice(left, len(one._flat()))) if isinstance(one, GroupResult) else next(left)
            for one in self.results
        ]


def result_from_tuple(stored: Any, app: ResultApp) -> AsyncResult[Any] | GroupResult:
    """The result of a task or of a group, from the form in which results name others (wire 6.1)."""
    match stored:
        case str():
            return AsyncResult(stored, app=app)
        case [[str() as named, parent], members] if members is None or isinstance(members, list):
            of = None if parent is None else result_from_tuple(parent, app)
            if members is None:
                return AsyncResult(named, app=app, parent=of)
            return GroupResult(named, [result_from_tuple(one, app) for one in members], app=app, parent=of)
    raise BadValue(f"{brief(stored)} is not a saved result: it must be [[id, parent], members or null]")
