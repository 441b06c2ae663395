"""DjangoTask: a task that can be sent when the surrounding transaction is committed."""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import wraps
from inspect import iscoroutine
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, Unpack, overload

from umbel.app.results import AsyncResult
from umbel.app.sending.options import SendOptions
from umbel.app.task import AsyncTask, Task
from umbel.contrib.django.commits import waiting_for
from umbel.contrib.django.configuration import DEFAULT_DATABASE
from umbel.contrib.django.connections import in_own_thread

P = ParamSpec("P")
R = TypeVar("R")


class DjangoTask(Task[P, R]):
    def __init__(self, *definition: Any) -> None:
        super().__init__(*definition)
        self.entry = self._with_own_thread(self.entry)

    def delay_on_commit(self, *args: P.args, **kwargs: P.kwargs) -> AsyncResult[R]:
        """Send the call once the transaction is committed that surrounds this; at once if there is none."""
        return self.apply_async_on_commit(args, kwargs)

    def apply_async_on_commit(
        self,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        using: str = DEFAULT_DATABASE,
        **options: Unpack[SendOptions],
    ) -> AsyncResult[R]:
        """The same with options; `using` names the database, as in `transaction.on_commit`."""
        with waiting_for(using):
            return self.apply_async(args, kwargs, **options)

    def _with_own_thread(self, run: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(run)
        def entry(*args: Any, **kwargs: Any) -> Any:
            value = run(*args, **kwargs)
            # In eager mode the connections are those of the caller, who has not ended.
            return in_own_thread(value) if iscoroutine(value) and not self.request.is_eager else value

        return entry


class AsyncDjangoTask(AsyncTask[P, R], DjangoTask[P, R]):
    """The same for `async def`."""


class DjangoTaskDecorator(Protocol):
    """What `@app.task(...)` returns."""

    @overload
    def __call__(self, function: Callable[P, Coroutine[Any, Any, R]], /) -> AsyncDjangoTask[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> DjangoTask[P, R]: ...


class BoundDjangoTaskDecorator(Protocol):
    """The same for `bind=True`: callers do not see the function's first parameter."""

    @overload
    def __call__(
        self, function: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], /
    ) -> AsyncDjangoTask[P, R]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[Any, P], R], /) -> DjangoTask[P, R]: ...
