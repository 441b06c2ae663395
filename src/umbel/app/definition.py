"""Definition: from a function and what was said of it to a task of an app."""

from collections.abc import Callable, Mapping
from importlib import import_module
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any

from umbel.app.naming import home_of, task_name
from umbel.app.options import TASK_KEYWORDS, options_from
from umbel.app.task import AsyncTask, Task
from umbel.errors import ConfigurationError

if TYPE_CHECKING:
    from umbel.app.interfaces import SendingApp


def define(
    app: "SendingApp",
    app_name: str,
    known: Mapping[str, Task[Any, Any]],
    function: Callable[..., Any],
    given: Mapping[str, Any],
    *,
    bind: bool,
    above: type[Task[Any, Any]] = Task,
) -> Task[Any, Any]:
    """The task. The same function defined again (a notebook's cell run twice) is no second task.

    Its class is `above`, the one that all tasks of the app have in common, or was derived from it.
    """
    name = given.get("name") or task_name(function, app_name)
    base = _checked_base(name, given.get("base"), above)
    stated = {**_said_by(base), **{word: value for word, value in given.items() if word != "base"}}
    options = options_from(name, stated, bind=bind or stated.pop("bind", False))
    other = known.get(name)
    if other is not None and home_of(other.run) != home_of(function):
        raise ConfigurationError(f"two tasks are named {name!r}; give one of them another name=")
    return _kind(base, function)(app, name, function, options)


def _checked_base(name: str, base: object, above: type[Task[Any, Any]]) -> type[Task[Any, Any]]:
    if base is None:
        return above
    if isinstance(base, type) and issubclass(base, above):
        return base
    wanted = "umbel.Task" if above is Task else "app.Task"
    raise ConfigurationError(f"option 'base' of task {name!r} is {base!r}: it must be a subclass of {wanted}")


def _said_by(base: type[Task[Any, Any]]) -> dict[str, Any]:
    """The options that a base class, or one above it, has as class attributes."""
    said: dict[str, Any] = {}
    for one in reversed(base.__mro__[: base.__mro__.index(Task)]):
        said |= {word: value for word, value in vars(one).items() if word in TASK_KEYWORDS}
    return {word: value for word, value in said.items() if word not in _NOT_OF_A_CLASS}


_NOT_OF_A_CLASS = frozenset(
    {"name", "base", "before_start", "on_success", "on_failure", "on_retry", "after_return"}
)


def _kind(base: type[Task[Any, Any]], function: Callable[..., Any]) -> type[Task[Any, Any]]:
    if not iscoroutinefunction(function) or issubclass(base, AsyncTask):
        return base
    import_module("asyncio")  # now, so that a worker's children share one copy of it
    return AsyncTask if base is Task else type(base.__name__, (AsyncTask, base), {})
