"""Guard: users' code that may be interrupted, and how the app is loaded in a process that runs tasks.

A time limit, a revoke or a shutdown raises an exception in the thread or greenlet that runs a task. It may
arrive between any two instructions, so it is raised only while a guarded call is on the stack
(`is_guarded`). There it ends the users' code; anywhere else it would break Umbel's own code. Code that is
never interrupted so, such as hooks in the main process, needs no guard but a plain `except Exception`.
"""

import sys
import traceback
from collections.abc import Awaitable, Callable, Sequence
from importlib import import_module
from pathlib import Path
from threading import get_ident
from types import CodeType, FrameType
from typing import Any, Generic, TypeVar, cast

import msgspec

from umbel.errors import Ignore, Reject, Retry, SoftTimeLimitExceeded, TaskCancelled, WorkerStopping
from umbel.pools.interface import Host, HostSpec, PreparedHost
from umbel.text import leaving

# ---- guarded calls ---------------------------------------------------------------------------------

R = TypeVar("R")


class Returned(msgspec.Struct, Generic[R], frozen=True):
    """The value that a guarded call returned."""

    value: R


class Raised(msgspec.Struct, frozen=True):
    """The error that a guarded call raised."""

    error: BaseException


def call_guarded(function: Callable[..., R], *args: Any, **kwargs: Any) -> Returned[R] | Raised:
    """Call the function and return what happened. `sys.exit()` in users' code is an error like any other."""
    try:
        return Returned(function(*args, **kwargs))
    except (Exception, SystemExit) as error:  # users' code may raise anything
        return Raised(error)


async def await_guarded(
    function: Callable[..., Awaitable[R]], *args: Any, **kwargs: Any
) -> Returned[R] | Raised:
    """As `call_guarded`, for a coroutine function. Cancellation is not an error: it passes through."""
    try:
        return Returned(await function(*args, **kwargs))
    except (Exception, SystemExit) as error:  # users' code may raise anything
        return Raised(error)


def interruption_or(error: BaseException) -> BaseException:
    """Return the interruption that led to this error; the error itself if there was none.

    An interruption may break what it interrupts: raised between two steps of a lock, it makes the `with` of
    that lock fail, because the lock is not held. The task was interrupted all the same. An explicit choice of
    the task is respected: `raise … from None`, and to retry, ignore or reject, unless it retries because of
    the interruption. asyncio's TaskGroup wraps what was raised in a group of exceptions.
    """
    seen, to_see = set[int](), [error]
    while to_see:
        found = to_see.pop()
        if isinstance(found, TaskCancelled | WorkerStopping):
            return found
        if id(found) not in seen:
            seen.add(id(found))
            to_see += [cause for cause in _what_led_to(found) if isinstance(cause, BaseException)]
    return error


def _what_led_to(error: BaseException) -> Sequence[object]:
    if isinstance(error, Retry | Ignore | Reject):
        return [getattr(error, "exc", None)]
    members = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return [*members, error.__cause__ or (None if error.__suppress_context__ else error.__context__)]


def is_guarded(frame: FrameType | None, *, within: CodeType | None = None) -> bool:
    """Return whether an exception raised in this frame would end in a guarded call.

    Guarded calls outside the frame of `within` do not count: they contain more than users' code.
    """
    below = None
    while frame is not None and frame.f_code is not within:
        if frame.f_code in _GUARDS:
            # An exception raised in the guard's own code would pass through it.
            return below is not None
        below, frame = frame.f_code, frame.f_back
    return False


def interrupt_here(error: Exception) -> None:
    """Raise the error in the users' code of this thread, or have the loop raise it where that code awaits."""
    if not interrupted_by_loop(get_ident(), error):
        raise error


def interrupted_by_loop(thread: int, error: Exception) -> bool:
    """Have the event loop of this thread raise the error in the coroutine that it runs.

    False if the thread has no loop, or users' code runs on it at this moment.
    """
    on_loop = on_loops.get(thread)
    return on_loop is not None and on_loop(error)


# By thread: what interrupts the loop that Umbel runs there; it returns False while users' code runs on it.
on_loops: dict[int, Callable[[Exception], bool]] = {}

_GUARDS = frozenset({call_guarded.__code__, await_guarded.__code__})


# ---- loading the app -------------------------------------------------------------------------------

_LINE_MAX_CHARS = 2000
_OUR_OWN = str(Path(__file__).parent)


def load_host(spec: HostSpec, node: str, *, forks: bool) -> Host:
    """Load the app in a process that runs tasks. Users' modules are imported, which may raise anything."""
    for entry in reversed(spec.search_path):
        if entry not in sys.path:
            sys.path.insert(0, entry)
    module, _, name = spec.loader.partition(":")
    loader = getattr(import_module(module), name)
    host = cast(Host, loader(spec.target))
    if isinstance(host, PreparedHost):
        host.before_children(node, forks=forks)
    return host


def soft_limit_of(host: Host) -> type[Exception]:
    """Return the exception class that a soft limit raises in this app's tasks.

    A host may name another class as `soft_limit_error`; it is raised without arguments.
    """
    kind: type[Exception] = getattr(host, "soft_limit_error", SoftTimeLimitExceeded)
    return kind


def soft_limit_reached(kind: type[Exception]) -> Exception:
    """Return the exception of a soft limit. The class of another library is called without arguments."""
    return kind("soft time limit exceeded") if kind is SoftTimeLimitExceeded else kind()


def worker_stops() -> Exception:
    """Return the exception that interrupts a task when the worker shuts down."""
    return WorkerStopping("the worker is shutting down; the task returns to its queue")


def in_one_line(error: BaseException) -> str:
    """Return the last line of the traceback and the place in the user's code, shortened."""
    line = _in_one_line(error)
    if len(line) > _LINE_MAX_CHARS:
        line = f"{line[:_LINE_MAX_CHARS]}... ({len(line) - _LINE_MAX_CHARS} characters left out)"
    return leaving(line)


def _in_one_line(error: BaseException) -> str:
    what = traceback.format_exception_only(error)[-1].strip()
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{what} ({error.filename}, line {error.lineno})"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(("<frozen", _OUR_OWN)) and "importlib" not in frame.filename
    ]
    return f"{what} ({frames[-1].filename}, line {frames[-1].lineno})" if frames else what
