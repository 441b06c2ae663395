"""Task: a function that can be called here, or sent to run on a worker.

The decorated object keeps the function's signature for type checkers: `add.delay("x")` is an error in the
editor, and at run time before anything is sent.
"""

import inspect
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import update_wrapper
from types import MethodType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, ParamSpec, TypeVar, Unpack

from msgspec.structs import replace

from umbel.app.canvas.group import MAP_TASK, STARMAP_TASK, Group, group, in_parts, map_signature
from umbel.app.canvas.signature import Signature
from umbel.app.options import (
    HOOK_NAMES,
    TASK_KEYWORDS,
    SendOptions,
    TaskOptions,
    check_options,
    limit_of,
    sensitive_of,
)
from umbel.app.request import Request, current_request
from umbel.app.results import AsyncResult
from umbel.app.running.retries import added_part, changed_attempt, replacement
from umbel.app.sending.preparation import instant
from umbel.app.types import signature_of, types_of
from umbel.backends.interface import Backend
from umbel.chance import random
from umbel.clock import cluster_now
from umbel.errors import ConfigurationError, Ignore, MaxRetriesExceeded, Retry
from umbel.pools.guard import Raised, call_guarded
from umbel.protocol.delivery.limits import Concurrency, Rate
from umbel.wire.result import encode_state

if TYPE_CHECKING:
    from umbel.app.app import App

log = logging.getLogger("umbel.task")
P = ParamSpec("P")
R = TypeVar("R")


class Task(Generic[P, R]):
    """A function that can be called here, or sent to run on a worker."""

    def __init__(self, app: "App", name: str, function: Callable[..., Any], options: TaskOptions) -> None:
        update_wrapper(self, function)
        self.app = app
        self.name = name
        parameters = Parameters(name, function, bound=options.bind)
        hides = sensitive_of(options.sensitive, parameters)
        types = types_of(parameters, sensitive=options.sensitive) if options.typing else None
        limit = limit_of(options, parameters)
        if hides is not None or types is not None or limit is not None:
            options = replace(options, hides=hides, types=types, cluster_limit=limit)
        self.options = options
        self.run: Callable[..., Any] = MethodType(function, self) if options.bind else function
        # A base class may override `__call__` to wrap every run of its tasks.
        is_wrapped = type(self).__call__ not in (Task.__call__, AsyncTask.__call__)
        self.entry: Callable[..., Any] = self if is_wrapped else self.run
        self.is_async = inspect.iscoroutinefunction(function)
        self.check_arguments = parameters.check if options.typing else _unchecked
        self.hooks = _hooks_of(self)
        self.__dict__.update(_shadowed(self))

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function directly, as if it had not been decorated."""
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
        """Run the call here, through the same path as in a worker; return its finished result."""
        with self.app.eager():
            return self.apply_async(args, kwargs, **options)

    def s(self, *args: Any, **kwargs: Any) -> Signature[R]:
        """A signature of a call. Arguments may be missing: a chain puts the step's input first."""
        return Signature(self.name, args, kwargs, app=self.app)

    def si(self, *args: Any, **kwargs: Any) -> Signature[R]:
        """The same as `s`, but immutable: it takes no result from the step before."""
        return Signature(self.name, args, kwargs, immutable=True, app=self.app)

    def signature(
        self,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        immutable: bool = False,
        **options: Unpack[SendOptions],
    ) -> Signature[R]:
        """A signature with options, as `apply_async` takes them, to be sent later."""
        check_options(options)
        return Signature(self.name, args, kwargs, options, immutable=immutable, app=self.app)

    subtask = signature

    def AsyncResult(self, task_id: str) -> AsyncResult[R]:  # noqa: N802 (the name users know)
        """The result handle of a task id, with this task's result type."""
        return AsyncResult(task_id, app=self.app, types=self.options.types)

    @property
    def backend(self) -> Backend:
        """The app's result backend."""
        return self.app.backend

    def map(self, items: Iterable[Any]) -> Signature[list[R]]:
        """One task that calls this one for each item; its result is the list of results."""
        return map_signature(self.app, MAP_TASK, self.s(), items)

    def starmap(self, items: Iterable[Sequence[Any]]) -> Signature[list[R]]:
        """The same as `map` with several arguments for each item."""
        return map_signature(self.app, STARMAP_TASK, self.s(), items)

    def chunks(self, items: Iterable[Sequence[Any]], size: int) -> Group:
        """A group of tasks, each for `size` items; the result is a list of lists."""
        return group(self.starmap(part) for part in in_parts(items, size))

    @property
    def request(self) -> Request:
        """The running call; an empty request when the task was called as a function."""
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
        raise Ignore(
            "not a failure: self.replace() sent another task in place of this one",
            follow_ups=replacement(self.app, self.request, signature),
        )

    def add_to_chord(self, signature: Signature[Any], lazy: bool = False) -> Any:
        """Add a part to the chord that this task is a part of; with `lazy` it is returned and not sent."""
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

    # -- the options of the definition -----------------------------------------------------------
    #
    # A base class may state the same options as class attributes; the decorator's options override those.

    @property
    def queue(self) -> str | None:
        """The queue for calls that name none; None: by route, else the app's default."""
        return self.options.queue

    @property
    def priority(self) -> int | None:
        """The priority for calls that state none; None: by route, else the app's default."""
        return self.options.priority

    @property
    def acks_late(self) -> bool | None:
        """Whether messages are acknowledged after the run; None: by the app's setting."""
        early = self.options.acks_early
        return None if early is None else not early

    @property
    def ignore_result(self) -> bool | None:
        """Whether results are not stored; None: by the app's setting."""
        return self.options.ignore_result

    @property
    def autoretry_for(self) -> tuple[type[BaseException], ...]:
        """The exceptions after which the task is retried automatically."""
        return self.options.autoretry_for

    @property
    def dont_autoretry_for(self) -> tuple[type[BaseException], ...]:
        """Exceptions among those of `autoretry_for` that are failures all the same."""
        return self.options.dont_autoretry_for

    @property
    def retry_kwargs(self) -> Mapping[str, Any]:
        """Options of automatic retries: `max_retries`, `countdown`, and options of a send."""
        return self.options.retry_kwargs

    @property
    def max_retries(self) -> int | None:
        """How often the task is retried; None: without limit."""
        return self.options.retry.max_retries

    @property
    def default_retry_delay(self) -> float:
        """Seconds before a retry, unless the retry states a time."""
        return self.options.retry.delay_s

    @property
    def retry_backoff(self) -> bool | float:
        """The first delay in seconds of retries whose delays double; False: delays do not grow."""
        return self.options.retry.backoff_s or False

    @property
    def retry_backoff_max(self) -> float:
        """The longest delay of a retry with backoff, in seconds."""
        return self.options.retry.backoff_max_s

    @property
    def retry_jitter(self) -> bool:
        """Whether delays with backoff are random up to their length."""
        return self.options.retry.jitter

    @property
    def throws(self) -> tuple[type[BaseException], ...]:
        """The exceptions that are expected: logged briefly, without a traceback."""
        return self.options.throws

    @property
    def rate_limit(self) -> str | float | None:
        """How often each worker starts the task, such as "100/m"; None: without limit."""
        return self.options.rate_limit

    @property
    def limit(self) -> Rate | Concurrency | None:
        """The limit that all workers of the cluster share; None: without limit."""
        return self.options.limit

    @property
    def time_limit(self) -> float | None:
        """Seconds after which the child process that runs the task is killed."""
        return self.options.time_limit_s

    @property
    def soft_time_limit(self) -> float | None:
        """Seconds after which SoftTimeLimitExceeded is raised in the task."""
        return self.options.soft_time_limit_s

    @property
    def expires(self) -> float | None:
        """Seconds after which an unstarted call is dropped."""
        return self.options.expires_s

    @property
    def serializer(self) -> str | None:
        """The serializer of its arguments; None: by the app's setting."""
        return self.options.serializer

    @property
    def track_started(self) -> bool:
        """Whether the state STARTED is stored when a run begins."""
        return self.options.track_started

    @property
    def typing(self) -> bool:
        """Whether arguments are checked against the function's signature when a call is sent."""
        return self.options.typing

    # -- hooks, for base classes to override -----------------------------------------------------

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        """Called before the function; what it raises is raised by the task."""

    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
        """Called when the task has succeeded."""

    def on_failure(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        """Called when the task has failed; `str(einfo)` is the traceback."""

    def on_retry(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        """Called when the task will be retried."""

    def after_return(
        self, status: str, retval: Any, task_id: str, args: Any, kwargs: Any, einfo: Any
    ) -> None:
        """Called last when the task has succeeded or failed; `retval` is its value or its exception."""

    def __repr__(self) -> str:
        return f"<task {self.name}>"


class AsyncTask(Task[P, R]):
    """A task whose function is `async def`: calling it gives a coroutine, a worker awaits it."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:  # type: ignore[override]
        coroutine: Coroutine[Any, Any, R] = super().__call__(*args, **kwargs)  # type: ignore[assignment]
        return coroutine


def _unchecked(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Accept any arguments: the task was defined with `typing=False`."""


def _shadowed(task: Task[Any, Any]) -> dict[str, Any]:
    """The task's values of options whose properties are hidden by class attributes of a base class."""
    properties = {name: value for name, value in vars(Task).items() if isinstance(value, property)}
    return {
        name: properties[name].__get__(task)
        for kind in type(task).__mro__
        if kind not in (Task, AsyncTask)
        for name in TASK_KEYWORDS.intersection(properties, vars(kind))
    }


# ---- the parameters of a task ----------------------------------------------------------------------

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Parameters:
    """The parameters of a task's function as callers of the task see them."""

    def __init__(self, task: str, function: Callable[..., Any], *, bound: bool = False) -> None:
        """`bound`: the first parameter takes the task itself, and callers do not see it."""
        signature = signature_of(function)
        every = list(signature.parameters.values())
        if bound:
            every = _without_first(task, every)
        self.task = task
        self.function = function
        self.every = every
        self.returns = None if signature.return_annotation is signature.empty else signature.return_annotation
        self.positional = [parameter for parameter in every if parameter.kind in _POSITIONAL]
        self.by_name = [parameter for parameter in every if parameter.kind in _BY_NAME]
        self.rest = self._name_of(inspect.Parameter.VAR_POSITIONAL)  # of `*args`
        self.others = self._name_of(inspect.Parameter.VAR_KEYWORD)  # of `**kwargs`
        self._signature = inspect.Signature(every)
        self._least = sum(parameter.default is parameter.empty for parameter in self.positional)
        self._most = len(self.positional)
        self._only_positional = self._most == len(every)

    def check(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise TypeError if the function does not take these arguments.

        The number of arguments is enough to judge a call without keyword arguments.
        """
        if not kwargs and self._only_positional and self._least <= len(args) <= self._most:
            return
        try:
            self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"cannot send {self.task}{self._signature}: {error}") from None

    def _name_of(self, kind: Any) -> str | None:
        return next((parameter.name for parameter in self.every if parameter.kind is kind), None)


def _without_first(task: str, parameters: list[inspect.Parameter]) -> list[inspect.Parameter]:
    if parameters and parameters[0].kind is inspect.Parameter.VAR_POSITIONAL:
        return parameters
    if not parameters or parameters[0].kind not in _POSITIONAL:
        raise ConfigurationError(
            f"task {task!r} has bind=True, but its function has no first parameter for the task"
        )
    return parameters[1:]


# ---- the hooks of a task ---------------------------------------------------------------------------


class ExceptionInfo:
    """An exception with its traceback as text; hooks get it as `einfo`."""

    def __init__(self, exception: BaseException | None, traceback: str) -> None:
        self.type = type(exception)
        self.exception = exception
        self.traceback = traceback

    def __str__(self) -> str:
        return self.traceback


class Hooks:
    """The hooks of one task: methods that its class overrides, and functions that were given with it.

    They are called in the child that runs the task. A hook that raises is logged, and the task's outcome
    stays. Only `before_start` is a part of the run: its exceptions are those of the task.
    """

    def __init__(self, hooks: Mapping[str, Callable[..., Any]]) -> None:
        self._hooks = hooks

    def before(self, request: Request) -> None:
        """Call `before_start`; its exception is the task's."""
        if (hook := self._hooks.get("before_start")) is not None:
            hook(request.id, request.args, request.kwargs)

    def call(self, name: str, request: Request, *facts: Any, error_info: tuple[Any, ...] = ()) -> None:
        """Call the named hook with these facts, the task's id and arguments, and the `error_info`."""
        hook = self._hooks.get(name)
        if hook is None:
            return
        happened = call_guarded(hook, *facts, request.id, request.args, request.kwargs, *error_info)
        if isinstance(happened, Raised):
            log.error(
                "task hook raised an exception",
                extra={"hook": name, "task": request.task, "task_id": request.id},
                exc_info=happened.error,
            )

    def call_with_error(self, name: str, request: Request, error: BaseException, traceback: str) -> None:
        """Call the named hook with an exception and its traceback."""
        self.call(name, request, error, error_info=(ExceptionInfo(error, traceback),))


def _hooks_of(task: Task[Any, Any]) -> Hooks | None:
    """The hooks of a task; None without any, as for most tasks."""
    hooks: dict[str, Callable[..., Any]] = {
        name: getattr(task, name)
        for name in HOOK_NAMES
        if getattr(type(task), name) is not getattr(Task, name)
    }
    hooks |= {name: MethodType(function, task) for name, function in task.options.hooks.items()}
    return Hooks(hooks) if hooks else None
