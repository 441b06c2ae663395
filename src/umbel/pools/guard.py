"""The one place where code that users wrote is called.

A task, a hook or a handler may raise anything. Nobody else in Umbel catches `Exception`: they
call through here and look at what came back.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Returned(Generic[R]):
    value: R


@dataclass(frozen=True, slots=True)
class Raised:
    error: BaseException


def call_guarded(function: Callable[..., R], *args: Any, **kwargs: Any) -> Returned[R] | Raised:
    """Call it and say what happened. `sys.exit()` in users' code is an error like any other."""
    try:
        return Returned(function(*args, **kwargs))
    except Exception as error:
        return Raised(error)
    except SystemExit as error:
        return Raised(error)
