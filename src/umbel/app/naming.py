"""Naming: what a task is called, and where the code that makes an app lies."""

import sys
from collections.abc import Callable, Mapping
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


def directory_of(names: Mapping[str, Any]) -> Path | None:
    """Where the module with these names lies: client and worker find the same umbel.db from it,
    whatever directory each was started in. None for code that was typed in."""
    file = names.get("__file__")
    return Path(file).resolve().parent if isinstance(file, str) else None


def home_of(function: Callable[..., Any]) -> tuple[str, str]:
    return function.__module__, getattr(function, "__qualname__", repr(function))
