"""Naming: what a task is called, and which directory an app is in."""

import sys
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from umbel.errors import ConfigurationError


def task_name(function: Callable[..., Any], app_name: str) -> str:
    """`module.function`; a module that runs as a script has the name it is imported by elsewhere."""
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
    """The block in which apps that name no directory are in this one: a command imports them from it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __enter__(self) -> None:
        self._token = _imported_from.set(self._directory)

    def __exit__(self, *_error: object) -> None:
        _imported_from.reset(self._token)


def directory_of(given: str | Path | None) -> Path | None:
    """Where an app looks for its settings and its umbel.db: as given, else where a command imports it from.

    None: the current directory. Which module makes the app is not asked: that cannot be known without
    looking at the caller's frame, and is wrong where a function of another module makes it.
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
    return function.__module__, getattr(function, "__qualname__", repr(function))
