"""Warns once when the blocking client is used on a running event loop, and says what to use instead."""

import sys
import warnings
from threading import Lock

_told: set[str] = set()
_telling = Lock()


def warn_on_loop(what: str, remedy: str) -> None:
    """Once in a process for each kind of call; costs next to nothing where no loop runs."""
    asyncio = sys.modules.get("asyncio")
    if asyncio is None or what in _told or asyncio._get_running_loop() is None:
        return
    with _telling:
        if what in _told:
            return
        _told.add(what)
    warnings.warn(
        f"{what} blocks the event loop that runs in this thread, and all that it serves; use {remedy}",
        RuntimeWarning,
        stacklevel=_users_frame(),
    )


def _users_frame() -> int:
    """How many frames above the caller the first one is that is not ours."""
    frame, level = sys._getframe(2), 2
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).startswith("umbel."):
        frame, level = frame.f_back, level + 1
    return level
