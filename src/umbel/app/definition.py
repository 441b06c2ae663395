"""Definition: makes a task of a function, and imports the modules in which tasks are defined.

Modules are imported later than they are named: usually the module that makes the app names them, and they
import the app from it.
"""

import os
import sys
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextvars import ContextVar
from importlib import import_module
from inspect import iscoroutinefunction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, overload

from umbel.app.options import HOOK_NAMES, TASK_KEYWORDS, options_from
from umbel.app.task import AsyncTask, Task
from umbel.errors import ConfigurationError

if TYPE_CHECKING:
    from umbel.app.app import App

P = ParamSpec("P")
R = TypeVar("R")

# ---- from a function to a task ---------------------------------------------------------------------


class TaskDecorator:
    """The decorator of `@app.task(...)`: makes a task of a function, with its parameters and result type.

    The same function may be defined again, as when a notebook cell runs twice.
    """

    def __init__(self, app: "App", options: Mapping[str, Any], *, bind: bool) -> None:
        self._app = app
        self._options = options
        self._bind = bind

    @overload
    def __call__(self, function: Callable[P, Coroutine[Any, Any, R]], /) -> AsyncTask[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> Task[P, R]: ...
    def __call__(self, function: Callable[..., Any], /) -> Any:
        """Register the function as a task; ConfigurationError if another function has its name."""
        app = self._app
        name = self._options.get("name") or task_name(function, app.name)
        base = _checked_base(name, self._options.get("base"), app.Task)
        given = {option: value for option, value in self._options.items() if option != "base"}
        given = {**_options_of_class(base), **given}
        options = options_from(name, given, bind=self._bind or given.pop("bind", False))
        other = app.tasks.get(name)
        if other is not None and home_of(other.run) != home_of(function):
            raise ConfigurationError(f"two tasks are named {name!r}; give one of them another name=")
        task = app.tasks[name] = _class_for(function, base)(app, name, function, options)
        return task


if TYPE_CHECKING:

    class BoundTaskDecorator:
        """A TaskDecorator with `bind=True`: callers do not see the first parameter of the function."""

        @overload
        def __call__(
            self, function: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], /
        ) -> AsyncTask[P, R]: ...
        @overload
        def __call__(self, function: Callable[Concatenate[Any, P], R], /) -> Task[P, R]: ...
        def __call__(self, function: Any, /) -> Any:
            """Register the function as a task."""


def task_name(function: Callable[..., Any], app_name: str) -> str:
    """The name `module.function` of a task. A function of a script gets the name by which others import it.

    ConfigurationError: the function has no name.
    """
    name = getattr(function, "__name__", None)
    if name is None:  # a functools.partial, an object with __call__
        raise ConfigurationError(f"{function!r} has no name; give the task one with name=")
    module = function.__module__
    return f"{_main_module(app_name) if module == '__main__' else module}.{name}"


def _main_module(app_name: str) -> str:
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:  # python -m package.module
        return str(spec.name)
    file = getattr(main, "__file__", None) or "<stdin>"
    return app_name if file.startswith("<") else Path(file).stem


def home_of(function: Callable[..., Any]) -> tuple[str, str]:
    """The module and qualified name of a function, the same for each definition of it."""
    return function.__module__, getattr(function, "__qualname__", repr(function))


def _checked_base(name: str, base: object, app_base: type[Task[Any, Any]]) -> type[Task[Any, Any]]:
    if base is None:
        return app_base
    if isinstance(base, type) and issubclass(base, app_base):
        return base
    wanted = "umbel.Task" if app_base is Task else "app.Task"
    raise ConfigurationError(f"option 'base' of task {name!r} is {base!r}: it must be a subclass of {wanted}")


def _options_of_class(base: type[Task[Any, Any]]) -> dict[str, Any]:
    """The options that a base class and its own bases have as class attributes."""
    options: dict[str, Any] = {}
    for kind in reversed(base.__mro__[: base.__mro__.index(Task)]):
        options |= {name: value for name, value in vars(kind).items() if name in _OPTIONS_OF_A_CLASS}
    return options


_OPTIONS_OF_A_CLASS = TASK_KEYWORDS - {"name", "base"} - HOOK_NAMES


def _class_for(function: Callable[..., Any], base: type[Task[Any, Any]]) -> type[Task[Any, Any]]:
    if not iscoroutinefunction(function) or issubclass(base, AsyncTask):
        return base
    import_module("asyncio")  # now, so that a worker's children share one copy of it
    return AsyncTask if base is Task else type(base.__name__, (AsyncTask, base), {})


# ---- the directory of an app -----------------------------------------------------------------------


class AppsIn:
    """A block in which new apps without a directory get this one. A command imports apps in such a block."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __enter__(self) -> None:
        self._token = _imported_from.set(self._directory)

    def __exit__(self, *_error: object) -> None:
        _imported_from.reset(self._token)


def directory_of(given: str | Path | None) -> Path | None:
    """The directory in which an app looks for its settings and its umbel.db. None: the current directory.

    It is the given directory, else that from which a command imports the app. The folder of the module that
    makes the app is not used: to find it requires the caller's frame, and is wrong if a function of another
    module makes the app.
    """
    if given is None:
        return _imported_from.get()
    directory = Path(given)
    if not directory.is_dir():
        problem = f"App(directory={str(given)!r}) is not a directory"
        raise ConfigurationError(
            f"{problem}; to use the module's directory, write directory=Path(__file__).parent"
        )
    return directory.resolve()


_imported_from: ContextVar[Path | None] = ContextVar("umbel_imported_from", default=None)


# ---- modules with tasks ----------------------------------------------------------------------------

Packages = Iterable[str] | Callable[[], Iterable[str]] | None


class Discovery:
    """The packages whose task modules are imported when all tasks of an app are needed."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Packages, str | None]] = []

    def add(self, packages: Packages, related_name: str | None) -> None:
        """Have these packages imported at the next `run`."""
        self._waiting.append((packages, related_name))

    def run(self) -> None:
        """Import the packages that were added since the last call."""
        while self._waiting:
            packages, related_name = self._waiting.pop(0)
            for package in _listed(packages):
                _import(package, related_name)


def _listed(packages: Packages) -> list[str]:
    if packages is None:
        packages = _apps_of_django()
    found = packages() if callable(packages) else packages
    return [found] if isinstance(found, str) else list(found)


def _apps_of_django() -> list[str]:
    """The installed apps of Django; none if Django is not configured in this process."""
    django, conf = sys.modules.get("django.apps"), sys.modules.get("django.conf")
    is_named = "DJANGO_SETTINGS_MODULE" in os.environ or (conf is not None and conf.settings.configured)
    return (
        [config.name for config in django.apps.get_app_configs()] if django is not None and is_named else []
    )


def _import(package: str, related_name: str | None) -> None:
    """Import the package, and its module of tasks if it has one."""
    if not related_name:
        import_module(package)
        return
    name = f"{package}.{related_name}"
    try:
        import_module(name)
    except ModuleNotFoundError as error:
        # The package has no module of tasks. A missing module that the tasks import is an error.
        if error.name != name:
            raise
