"""AwaitedResult, AwaitedGroup: what results do for async code. Nothing here blocks the event loop.

`await result` is `result.aget()`; the other methods are the blocking ones with an `a` before their names.
"""

from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from umbel.app.joining import Joinable, join_async
from umbel.app.rebuilding import shown_result
from umbel.app.types.call_types import ResultTypes
from umbel.backends.interface import Backend
from umbel.errors import BrokerError, ResultTimeout
from umbel.protocol.delivery.states import PENDING, READY_STATES
from umbel.wire.message import StoredResult
from umbel.wire.result import ResultMap

if TYPE_CHECKING:
    from umbel.app.aio.event_feed import Heard

R = TypeVar("R")
T = TypeVar("T")
STATE_S = 0.1
UNANSWERED = "unknown: the result backend does not answer"


class AwaitedApp(Protocol):
    """What an awaited result needs of its app."""

    async def abackend(self) -> Backend: ...
    async def abeside(self, work: Callable[[], T]) -> T:
        """Do what blocks, beside the loop."""
        ...

    def alisten(self, task_id: str) -> "AbstractAsyncContextManager[Heard]":
        """The events of a task, from now on."""
        ...


class AwaitedResult(Generic[R]):
    __slots__ = ()

    if TYPE_CHECKING:  # of AsyncResult
        id: str
        ignored: bool
        _eager: Backend | None
        _final: ResultMap | None
        _types: ResultTypes | None
        app: Any  # an AwaitedApp, which to mypy would keep a result from being a group's

        def forget(self) -> None: ...
        def revoke(self, *, terminate: bool = False, signal: str | None = None) -> None: ...
        def _refuse_join(self, allow_join: bool | None) -> None: ...
        def _keep(self, found: Mapping[str, StoredResult], timeout: float | None) -> None: ...
        def _missing(self, timeout: float | None, state: str) -> ResultTimeout: ...
        def _noted(self, stored: StoredResult | None) -> ResultMap | None: ...
        def _value(self, *, propagate: bool) -> R: ...

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
        custom one."""
        found = await self._aread()
        return found.status if found else PENDING

    async def ainfo(self) -> Any:
        """The same as `info`: the return value, or the exception, or what `update_state` stored."""
        return shown_result(await self._aread(), self._types)

    async def aready(self) -> bool:
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

        Workers send them with `-E`. Whatever they send, the last one says how the task ended.
        """
        from umbel.app.aio.event_feed import events_of  # with a broker, which few clients listen to

        return events_of(self.id, self.app.alisten, self._awaited_end, timeout)

    async def _aread(self) -> ResultMap | None:
        if self._final is not None:
            return self._final
        backend = await self._abackend()
        return self._noted((await backend.read_async([self.id])).get(self.id))

    async def _awaited_end(self) -> str:
        """The final state, when it is there."""
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


class AwaitedGroup:
    if TYPE_CHECKING:  # of GroupResult
        app: AwaitedApp
        results: list[Any]

        def save(self) -> Any: ...
        def forget(self) -> None: ...
        def revoke(self, *, terminate: bool = False, signal: str | None = None) -> None: ...
        def _flat(self) -> Sequence[Joinable]: ...
        def _nested(self, values: Sequence[Any]) -> list[Any]: ...

    def __await__(self) -> Generator[Any, None, list[Any]]:
        return self.aget().__await__()

    async def aget(
        self, timeout: float | None = None, *, propagate: bool = True, allow_join: bool | None = None
    ) -> list[Any]:
        """The same as `get` for async code: the event loop is not blocked."""
        await self.app.abackend()
        values = await join_async(self._flat(), timeout, propagate=propagate, allow_join=allow_join)
        return self._nested(values)

    async def aready(self) -> bool:
        return all([await result.aready() for result in self.results])

    async def asave(self) -> None:
        """Keep which results belong to the group, so that `restore` finds them by its id."""
        await self.app.abeside(self.save)

    async def aforget(self) -> None:
        await self.app.abeside(self.forget)

    async def arevoke(self, *, terminate: bool = False, signal: str | None = None) -> None:
        """Prevent its tasks from starting; `terminate` also ends those that run."""
        await self.app.abeside(lambda: self.revoke(terminate=terminate, signal=signal))
