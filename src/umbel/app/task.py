"""Task: a function that can be called here, now, or sent to be run by a worker.

The decorated object keeps the function's signature for the type checker: `add.delay("x")` is an
error in the editor, and at run time before anything is sent.
"""

import inspect
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import update_wrapper
from types import MethodType
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    NoReturn,
    ParamSpec,
    Protocol,
    TypeVar,
    Unpack,
    overload,
)

from msgspec.structs import replace

from umbel.app.canvas.builtin_tasks import MAP_TASK, STARMAP_TASK, in_parts, map_signature
from umbel.app.canvas.group import Group, group
from umbel.app.canvas.signature import Signature
from umbel.app.limits import limit_of
from umbel.app.options import TaskOptions
from umbel.app.results import AsyncResult
from umbel.app.running.attempts import changed_attempt
from umbel.app.running.hooks import TaskHooks, hooks_of
from umbel.app.running.request import Request, current_request
from umbel.app.secrecy import sensitive_of
from umbel.app.sending.options import SendOptions, check_options
from umbel.app.sending.stated import instant
from umbel.app.task_attributes import TaskAttributes
from umbel.app.types.annotations import signature_of
from umbel.app.types.call_types import CallTypes, types_of
from umbel.backends.interface import Backend
from umbel.chance import random
from umbel.clock import cluster_now
from umbel.errors import ConfigurationError, Ignore, MaxRetriesExceeded, Retry
from umbel.wire.result import encode_state

if TYPE_CHECKING:
    from umbel.app.interfaces import SendingApp

P = ParamSpec("P")
R = TypeVar("R")


class Task(TaskAttributes, TaskHooks, Generic[P, R]):
    def __init__(
        self, app: "SendingApp", name: str, function: Callable[..., Any], options: TaskOptions
    ) -> None:
        update_wrapper(self, function)
        self.app = app
        self.name = name
        arguments = _Arguments(name, function, bound=options.bind)
        hides = sensitive_of(name, options.sensitive, arguments.parameters)
        types = arguments.types(function, options) if options.typing else None
        limit = limit_of(name, options, arguments.parameters)
        if hides is not None or types is not None or limit is not None:
            options = replace(options, hides=hides, types=types, cluster_limit=limit)
        self.options = options
        self.run: Callable[..., Any] = MethodType(function, self) if options.bind else function
        # A base class may wrap every run of its tasks in a `__call__` of its own.
        is_wrapped = type(self).__call__ not in (Task.__call__, AsyncTask.__call__)
        self.entry: Callable[..., Any] = self if is_wrapped else self.run
        self.is_async = inspect.iscoroutinefunction(function)
        self.check_arguments = arguments.check if options.typing else _unchecked
        self.hooks = hooks_of(self, options.hooks)
        self.__dict__.update(_shadowed(self))

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function here and now, as if it had not been decorated."""
        result: R = self.run(*args, **kwargs)
        return result

    def delay(self, *args: P.args, **kwargs: P.kwargs) -> AsyncResult[R]:
        """Send the call to a worker."""
        return self.apply_async(args, kwargs)

    def apply_async(
        self,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[SendOptions],
    ) -> AsyncResult[R]:
        """Send the call with options such as `countdown`, `queue`, `priority` and `link`."""
        self.check_arguments(args, kwargs or {})
        return self.app.send(self.name, args, kwargs or {}, options)

    async def adelay(self, *args: P.args, **kwargs: P.kwargs) -> AsyncResult[R]:
        """Send the call to a worker, without blocking the event loop."""
        return await self.aapply_async(args, kwargs)

    async def aapply_async(
        self,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[SendOptions],
    ) -> AsyncResult[R]:
        """The same as `apply_async`, without blocking the event loop."""
        self.check_arguments(args, kwargs or {})
        return await self.app.asend(self.name, args, kwargs or {}, options)

    def apply(
        self,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[SendOptions],
    ) -> AsyncResult[R]:
        """Run the call here, through the same path a worker would take; return its finished result."""
        with self.app.eager():
            return self.apply_async(args, kwargs, **options)

    def s(self, *args: Any, **kwargs: Any) -> Signature[R]:
        """A call to be sent later. Arguments may be missing: a chain puts its result first."""
        return Signature(self.name, args, kwargs, app=self.app)

    def si(self, *args: Any, **kwargs: Any) -> Signature[R]:
        """The same, but immutable: it takes no result from the step before."""
        return Signature(self.name, args, kwargs, immutable=True, app=self.app)

    def signature(
        self,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        immutable: bool = False,
        **options: Unpack[SendOptions],
    ) -> Signature[R]:
        """A call with options, as `apply_async` takes them, to be sent later."""
        check_options(options)
        return Signature(self.name, args, kwargs, options, immutable=immutable, app=self.app)

    subtask = signature

    def AsyncResult(self, task_id: str) -> AsyncResult[R]:  # noqa: N802 (the name users know)
        return AsyncResult(task_id, app=self.app, types=self.options.types)

    @property
    def backend(self) -> Backend:
        return self.app.backend

    def map(self, items: Iterable[Any]) -> Signature[list[R]]:
        """One task that calls this one for each item; its result is the list of results."""
        return map_signature(self.app, MAP_TASK, self.s(), items)

    def starmap(self, items: Iterable[Sequence[Any]]) -> Signature[list[R]]:
        """The same with several arguments for each item."""
        return map_signature(self.app, STARMAP_TASK, self.s(), items)

    def chunks(self, items: Iterable[Sequence[Any]], size: int) -> Group:
        """A group of tasks, each for `size` items; the result is a list of lists."""
        return group(self.starmap(part) for part in in_parts(items, size))

    @property
    def request(self) -> Request:
        """The call that runs here; an empty one when the task was called as a function."""
        return current_request() or Request()

    def retry(
        self,
        exc: BaseException | None = None,
        *,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        max_retries: int | None = None,
        **options: Unpack[SendOptions],
    ) -> NoReturn:
        """End this attempt and retry the task later, as it was sent.

        Arguments given here replace its own; options (`queue`, `priority`, ...) apply from then on.
        """
        check_options(options)
        countdown, eta = options.pop("countdown", None), options.pop("eta", None)
        request = self.request
        policy = self.options.retry
        most = policy.max_retries if max_retries is None else max_retries
        if request.called_directly:
            raise exc or Retry("the task was called as a function; there is no message to retry")
        if most is not None and request.retries >= most:
            if exc is not None:
                raise exc
            raise MaxRetriesExceeded(f"{self.name}[{request.id}] failed after {most} retries")
        if eta is not None:
            due = instant(eta)
        else:
            due = cluster_now() + (
                policy.wait_s(request.retries, random()) if countdown is None else countdown
            )
        again = None
        if options or args is not None or kwargs is not None:
            self.check_arguments(
                request.args if args is None else args, request.kwargs if kwargs is None else kwargs
            )
            again = changed_attempt(self.app, request, args, kwargs, options, due=due)
        raise Retry(f"{exc!r}" if exc else "", exc=exc, when=due, again=again) from exc

    def replace(self, signature: Signature[Any]) -> NoReturn:
        """End this run and have `signature` run in its place: under its id, with all that follows it.

        The replacement is sent in the step that settles this task. A group is replaced by the list of its
        results.
        """
        from umbel.app.running.replacing import replacement  # few tasks do this

        raise Ignore(
            "not a failure: self.replace() sent another task in place of this one",
            follow_ups=replacement(self.app, self.request, signature),
        )

    def add_to_chord(self, signature: Signature[Any], lazy: bool = False) -> Any:
        """Add a part to the chord that this task is a part of; with `lazy` it is returned and not sent."""
        from umbel.app.running.replacing import added_part

        added = added_part(self.app, self.request, signature)
        return added if lazy else added.apply_async()

    def update_state(self, state: str, meta: Any = None, *, task_id: str | None = None) -> None:
        """Store a custom state while the task runs, and send it as an event (PROGRESS: `task-progress`).

        If they come too often, some are left out, never the last (`app/running/progress.py`).
        """
        from umbel.app.running.progress import reports_of  # few tasks report progress

        request = self.request
        named = task_id or request.id
        if not named:
            raise RuntimeError(
                f"{self.name} was called directly and has no task id to store a state for; pass task_id"
            )
        reports = reports_of(self.app, request) if named == request.id else None
        if reports is not None:
            reports.state(state, meta)
        else:
            self.app.backend.store([encode_state(named, state, meta)])

    def progress(self, done: float, total: float | None = None, **meta: Any) -> None:
        """Report progress: the state PROGRESS. Does nothing when the task was called as a function."""
        if self.request.id:
            self.update_state("PROGRESS", {"done": done, "total": total, **meta})

    def send_event(self, event_type: str, *, blind: bool = False, **fields: Any) -> bool:
        """Send a custom event to monitors and recorders, such as `task-paid`, with the task's id.

        `blind`: without a value of the cluster's clock, which it does not move; for frequent events
        that cause nothing else.

        False when it was not sent: no worker runs this task, or it has sent too many already.
        """
        from umbel.app.running.progress import check_type, reports_of

        reports = reports_of(self.app, self.request)
        if reports is None:
            check_type(event_type)
            return False
        return reports.event(event_type, fields, blind=blind)

    def __repr__(self) -> str:
        return f"<task {self.name}>"


class AsyncTask(Task[P, R]):
    """A task whose function is `async def`: calling it gives a coroutine, a worker awaits it."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:  # type: ignore[override]
        coroutine: Coroutine[Any, Any, R] = super().__call__(*args, **kwargs)  # type: ignore[assignment]
        return coroutine


def _unchecked(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Any arguments do: the task was defined with `typing=False`."""


def _shadowed(task: Task[Any, Any]) -> dict[str, Any]:
    """The attributes that a base class has as well, as they are for this task."""
    ours = {name for name, one in vars(TaskAttributes).items() if isinstance(one, property)}
    return {
        name: getattr(TaskAttributes, name).__get__(task)
        for one in type(task).__mro__
        if one not in (Task, AsyncTask, TaskAttributes)
        for name in ours.intersection(vars(one))
    }


class _Arguments:
    """Whether a call fits the function. Plain positional calls are judged by their number alone."""

    def __init__(self, name: str, function: Callable[..., Any], *, bound: bool) -> None:
        self._name = name
        stated = signature_of(function)
        parameters = list(stated.parameters.values())
        self._returns = None if stated.return_annotation is stated.empty else stated.return_annotation
        if bound:
            parameters = _without_first(name, parameters)
        self.parameters = parameters  # as callers see them
        self._signature = inspect.Signature(parameters)
        positional = [one for one in parameters if one.kind in _POSITIONAL]
        self._least = sum(one.default is one.empty for one in positional)
        self._most = len(positional)
        self._only_positional = len(positional) == len(parameters)

    def types(self, function: Callable[..., Any], options: TaskOptions) -> CallTypes | None:
        return types_of(self._name, function, self.parameters, self._returns, sensitive=options.sensitive)

    def check(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise TypeError when the function could not be called like this."""
        if not kwargs and self._only_positional and self._least <= len(args) <= self._most:
            return
        try:
            self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"cannot send {self._name}{self._signature}: {error}") from None


def _without_first(name: str, parameters: list[inspect.Parameter]) -> list[inspect.Parameter]:
    """What callers of a bound task see: all but the parameter that takes the task itself."""
    if parameters and parameters[0].kind is inspect.Parameter.VAR_POSITIONAL:
        return parameters
    if not parameters or parameters[0].kind not in _POSITIONAL:
        raise ConfigurationError(
            f"task {name!r} has bind=True, but its function has no first parameter for the task"
        )
    return parameters[1:]


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class TaskDecorator(Protocol):
    """What `@app.task(...)` returns: it keeps the function's parameters and result type."""

    @overload
    def __call__(self, function: Callable[P, Coroutine[Any, Any, R]], /) -> AsyncTask[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> Task[P, R]: ...


class BoundTaskDecorator(Protocol):
    """The same for `bind=True`: callers do not see the function's first parameter."""

    @overload
    def __call__(
        self, function: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], /
    ) -> AsyncTask[P, R]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[Any, P], R], /) -> Task[P, R]: ...
