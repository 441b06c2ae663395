"""Hooks: what a task does besides its function when it starts and when it ends.

They are methods of a task's base class, or functions that were given with the task, and are called in the
child that runs it. One that raises is logged: the task keeps its outcome. Only `before_start` is part of
the run: what it raises is raised by the task.
"""

import logging
from collections.abc import Callable, Mapping
from types import MethodType
from typing import TYPE_CHECKING, Any

from umbel.pools.guard import Raised, call_guarded
from umbel.protocol.delivery.states import FAILURE, SUCCESS

if TYPE_CHECKING:
    from umbel.app.running.request import Request

log = logging.getLogger("umbel.task")

_STATES = {"success": SUCCESS, "failure": FAILURE}


class ExceptionInfo:
    """An exception with its traceback as text; what hooks know as `einfo`."""

    def __init__(self, exception: BaseException | None, traceback: str) -> None:
        self.type = type(exception)
        self.exception = exception
        self.traceback = traceback

    def __str__(self) -> str:
        return self.traceback


class TaskHooks:
    """The hooks as methods that do nothing, for a task's base class to override."""

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


HOOK_NAMES = ("before_start", "on_success", "on_failure", "on_retry", "after_return")


class Hooks:
    """Those that one task has."""

    def __init__(self, found: Mapping[str, Callable[..., Any]]) -> None:
        self._found = found

    def before(self, request: "Request") -> None:
        before_start = self._found.get("before_start")
        if before_start is not None:
            before_start(request.id, request.args, request.kwargs)

    def succeeded(self, request: "Request", value: Any) -> None:
        self._call("on_success", request, value, request.id, request.args, request.kwargs)

    def failed(self, request: "Request", error: BaseException, traceback: str) -> None:
        self._with_error("on_failure", request, error, traceback)

    def retried(self, request: "Request", error: BaseException, traceback: str) -> None:
        self._with_error("on_retry", request, error, traceback)

    def returned(self, request: "Request", outcome: str, value: Any) -> None:
        """After all of them; `outcome` is its kind. What is retried or given back has not returned."""
        if outcome in _STATES:
            state = _STATES[outcome]
            self._call("after_return", request, state, value, request.id, request.args, request.kwargs, None)

    def _with_error(self, name: str, request: "Request", error: BaseException, traceback: str) -> None:
        if name in self._found:
            about = ExceptionInfo(error, traceback)
            self._call(name, request, error, request.id, request.args, request.kwargs, about)

    def _call(self, name: str, request: "Request", *facts: Any) -> None:
        hook = self._found.get(name)
        happened = None if hook is None else call_guarded(hook, *facts)
        if isinstance(happened, Raised):
            log.error(
                "task hook raised an exception",
                extra={"hook": name, "task": request.task, "task_id": request.id},
                exc_info=happened.error,
            )


def hooks_of(task: TaskHooks, given: Mapping[str, Callable[..., Any]]) -> Hooks | None:
    """Those that its class overrides, and those that were given with it; None if it has none, as most."""
    found: dict[str, Callable[..., Any]] = {
        name: getattr(task, name)
        for name in HOOK_NAMES
        if getattr(type(task), name) is not getattr(TaskHooks, name)
    }
    found |= {name: MethodType(function, task) for name, function in given.items()}
    return Hooks(found) if found else None
