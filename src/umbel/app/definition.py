"""Definition: how a function becomes a task of an app. The task's name, the class it is made of, the modules
of tasks that are imported when all tasks are needed, and the directory an app belongs to.
"""

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from importlib import import_module
from inspect import iscoroutinefunction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from umbel.app.options import TASK_KEYWORDS, options_from
from umbel.app.task import AsyncTask, Task
from umbel.errors import ConfigurationError

if TYPE_CHECKING:
    from umbel.app.interfaces import SendingApp


# ---- naming ----------------------------------------------------------------------------------------
#
# The name of a task, and the directory of an app.


def task_name(function: Callable[..., Any], app_name: str) -> str:
    """The name `module.function` of a task; a function of a script gets the name under which others import
    it.

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


class AppsIn:
    """A block in which new apps that name no directory get this one; a command imports apps inside it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __enter__(self) -> None:
        self._token = _imported_from.set(self._directory)

    def __exit__(self, *_error: object) -> None:
        _imported_from.reset(self._token)


def directory_of(given: str | Path | None) -> Path | None:
    """The directory in which an app looks for its settings and its umbel.db: the given one, else the one from
    which a command imports it. None: the current directory.

    The module that makes the app is not considered: finding it takes a look at the caller's frame, and is
    wrong where a function of another module makes the app.
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


def home_of(function: Callable[..., Any]) -> tuple[str, str]:
    """Where a function is defined, by which a second definition of the same function is recognized."""
    return function.__module__, getattr(function, "__qualname__", repr(function))


# ---- definition ------------------------------------------------------------------------------------
#
# Makes a task of an app from a function and its options.


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
    """Make the task of a function. The same function defined again (a notebook cell run twice) is no second
    task.

    The task's class is `above`, the common base of the app's tasks, or a class derived from it.
    """
    name = given.get("name") or task_name(function, app_name)
    base = _checked_base(name, given.get("base"), above)
    stated = {**_options_of_class(base), **{word: value for word, value in given.items() if word != "base"}}
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


def _options_of_class(base: type[Task[Any, Any]]) -> dict[str, Any]:
    """The options that a base class, or one above it, has as class attributes."""
    stated: dict[str, Any] = {}
    for kind in reversed(base.__mro__[: base.__mro__.index(Task)]):
        stated |= {word: value for word, value in vars(kind).items() if word in TASK_KEYWORDS}
    return {word: value for word, value in stated.items() if word not in _NOT_OF_A_CLASS}


_NOT_OF_A_CLASS = frozenset(
    {"name", "base", "before_start", "on_success", "on_failure", "on_retry", "after_return"}
)


def _kind(base: type[Task[Any, Any]], function: Callable[..., Any]) -> type[Task[Any, Any]]:
    if not iscoroutinefunction(function) or issubclass(base, AsyncTask):
        return base
    import_module("asyncio")  # now, so that a worker's children share one copy of it
    return AsyncTask if base is Task else type(base.__name__, (AsyncTask, base), {})


# ---- discovery -------------------------------------------------------------------------------------
#
# The modules of tasks that are imported when all tasks of an app are needed.
#
# They are not imported when they are named: usually the module that makes the app names them, and they
# import it.

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
    """The installed apps, if Django is set up in this process, and not only partly imported."""
    django, conf = sys.modules.get("django.apps"), sys.modules.get("django.conf")
    is_named = "DJANGO_SETTINGS_MODULE" in os.environ or (conf is not None and conf.settings.configured)
    return (
        [config.name for config in django.apps.get_app_configs()] if django is not None and is_named else []
    )


def _import(package: str, related_name: str | None) -> None:
    """The package, and its module of tasks if it has one."""
    if not related_name:
        import_module(package)
        return
    name = f"{package}.{related_name}"
    try:
        import_module(name)
    except ModuleNotFoundError as error:
        # The package has no module of tasks. A module that the tasks import and that is missing is an error.
        if error.name != name:
            raise
