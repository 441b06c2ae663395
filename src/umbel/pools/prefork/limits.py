"""Limits: what the kernel lets this process use, and whether a task has left it with less.

A task may lower the limits of its process, and cannot raise all of them again. The next task there would
fail without being at fault. Only what harms it counts: a limit that was raised stays raised.

To read them all takes a tenth of the time of a quick task. So calls of the `resource` module are noted, and
a noted call leads to a check at once; a limit set by other means is found at the next check. The child
reads them, and asks here what it means when they are not as they were.
"""

import resource
from collections.abc import Callable
from functools import wraps
from typing import Any, ClassVar

_NAMES = ("NOFILE", "AS", "DATA", "FSIZE", "NPROC", "CPU", "STACK")
KINDS = {getattr(resource, f"RLIMIT_{name}"): name for name in _NAMES if hasattr(resource, f"RLIMIT_{name}")}


class Limits:
    """Of each of KINDS the soft and the hard one, as they were read last."""

    touched: ClassVar[bool] = False  # Python code may have set one since then

    def __init__(self, read: list[tuple[int, int]]) -> None:
        self.known = read

    def lowered(self, now: list[tuple[int, int]]) -> str:
        """The first that is lower than before, or nothing."""
        before, self.known = self.known, now
        for name, was, now_is in zip(KINDS.values(), before, now, strict=True):
            if any(_order(new) < _order(old) for old, new in zip(was, now_is, strict=True)):
                return f"RLIMIT_{name} from {_shown(was)} to {_shown(now_is)}"
        return ""


def note_calls() -> None:
    """To be called before the app is loaded, which may import the functions by name; once is enough."""
    if hasattr(resource.setrlimit, "__wrapped__"):
        return
    resource.setrlimit = _noted(resource.setrlimit)
    if hasattr(resource, "prlimit"):
        resource.prlimit = _noted(resource.prlimit)


def _noted(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any) -> Any:
        Limits.touched = True
        return function(*args)

    return call


def _order(limit: int) -> float:
    return float("inf") if limit == resource.RLIM_INFINITY else limit


def _shown(limits: tuple[int, int]) -> str:
    return "/".join("unlimited" if one == resource.RLIM_INFINITY else str(one) for one in limits)
