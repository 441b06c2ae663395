"""Guard: the one place where code that users wrote is loaded and called.

A task, a hook or a handler may raise anything. No other module of Umbel catches `Exception`: it calls through
here and looks at what came back. Pools also call through here what they do for one job or one child: an error
there must end nothing else. The app is found by its HostSpec, and an error that keeps it from loading is
shown in one line.
"""

import sys
import traceback
from collections.abc import Awaitable, Callable, Iterable, Sequence
from importlib import import_module
from pathlib import Path
from threading import get_ident
from types import CodeType, FrameType
from typing import Any, Generic, TypeVar, cast

import msgspec

from umbel.errors import Ignore, Reject, Retry, SoftTimeLimitExceeded, TaskCancelled, WorkerStopping
from umbel.pools.interface import Host, HostSpec, LimitedHost, PreparedHost
from umbel.text import leaving

# ---- guard -----------------------------------------------------------------------------------------
#
# The one place where code that users wrote is called.
#
# A task, a hook or a handler may raise anything. Nobody else in Umbel catches `Exception`: they call
# through here and look at what came back. A pool calls through here what it does for one job or one child,
# too: what that raises must end nothing else.

ItemT = TypeVar("ItemT")
R = TypeVar("R")


class Returned(msgspec.Struct, Generic[R], frozen=True):
    """A guarded call has returned this value."""

    value: R


class Raised(msgspec.Struct, frozen=True):
    """A guarded call has raised this error."""

    error: BaseException


def call_guarded(function: Callable[..., R], *args: Any, **kwargs: Any) -> Returned[R] | Raised:
    """Call the function and return what happened. `sys.exit()` in users' code is an error like any other."""
    try:
        return Returned(function(*args, **kwargs))
    except Exception as error:
        return Raised(error)
    except SystemExit as error:
        return Raised(error)


def each_guarded(
    function: Callable[[ItemT], R],
    items: Iterable[ItemT],
    faulty: Callable[[ItemT, BaseException], None],
) -> list[R]:
    """Call the function with each item; an item for which it raises is given to `faulty`, with the error."""
    returned: list[R] = []
    for item in items:
        try:
            returned.append(function(item))
        except (Exception, SystemExit) as error:
            faulty(item, error)
    return returned


async def await_guarded(
    function: Callable[..., Awaitable[R]], *args: Any, **kwargs: Any
) -> Returned[R] | Raised:
    """As `call_guarded`, for what has to be awaited. Cancellation is not an error: it passes through."""
    try:
        return Returned(await function(*args, **kwargs))
    except Exception as error:
        return Raised(error)
    except SystemExit as error:
        return Raised(error)


def call_to_the_end(function: Callable[..., R], *args: Any, **kwargs: Any) -> Returned[R] | Raised:
    """As `call_guarded`, but catches everything: for a thread or greenlet that runs one job after another."""
    try:
        return Returned(function(*args, **kwargs))
    except BaseException as error:
        return Raised(error)


async def await_to_the_end(
    function: Callable[..., Awaitable[R]], *args: Any, **kwargs: Any
) -> Returned[R] | Raised:
    """As `call_to_the_end`, for a loop that runs many jobs at once; cancellation passes through."""
    from asyncio import CancelledError  # imported here: children without a loop never load asyncio

    try:
        return Returned(await function(*args, **kwargs))
    except (CancelledError, GeneratorExit):
        raise
    except BaseException as error:
        return Raised(error)


def interruption_or(error: BaseException) -> BaseException:
    """The interruption that led to this error, if one did; else the error.

    An interruption is raised anywhere, so also where it breaks something: between two steps of a lock, whose
    `with` then fails because the lock is not held; or in front of a `finally` that fails. The task was
    interrupted all the same. An explicit choice of the task is respected: `raise … from None`, and to retry,
    ignore or reject, unless it retries because of the interruption. A group of asyncio's tasks wraps what was
    raised in a group of exceptions.
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
    """Whether an exception raised in this frame ends in a guarded call, as one more way for users' code to
    fail.

    Calls that contain the frame of `within` do not count: they guard more than users' code.
    """
    below = None
    while frame is not None and frame.f_code is not within:
        if frame.f_code in _GUARDS:
            # Not while the guard's own code runs: it would let the exception through.
            return below is not None
        below, frame = frame.f_code, frame.f_back
    return False


def interrupt_here(error: Exception) -> None:
    """Raise the error in the users' code that runs in this thread; if it waits on a loop, by that loop."""
    if not interrupted_by_loop(get_ident(), error):
        raise error


def interrupted_by_loop(thread: int, error: Exception) -> bool:
    """Have the loop of this thread raise it; False when there is none, or users' code runs on it right
    now.
    """
    on_loop = on_loops.get(thread)
    return on_loop is not None and on_loop(error)


# By thread: interrupts Umbel's loop that runs there. Returns False while users' code runs on it.
on_loops: dict[int, Callable[[Exception], bool]] = {}

_GUARDS = frozenset({call_guarded.__code__, await_guarded.__code__})


# ---- hosting ---------------------------------------------------------------------------------------
#
# Find the app by its HostSpec, and say in one line why it cannot be loaded.

_LINE_MAX_CHARS = 2000
_OUR_OWN = str(Path(__file__).parent)


def load_host(spec: HostSpec, node: str, *, forks: bool) -> Host:
    """Load the app for child processes. Runs users' code, which may raise anything, so call it guarded."""
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
    """The exception class that a soft limit raises in this app's tasks."""
    return host.soft_limit_error if isinstance(host, LimitedHost) else SoftTimeLimitExceeded


def soft_limit_reached(kind: type[Exception]) -> Exception:
    """The exception of a soft limit; a foreign class is made without arguments."""
    return kind("soft time limit exceeded") if kind is SoftTimeLimitExceeded else kind()


def worker_stops() -> Exception:
    """The exception that interrupts a task when the worker shuts down."""
    return WorkerStopping("the worker is shutting down; the task returns to its queue")


def in_one_line(error: BaseException) -> str:
    """The last line of the traceback and the place in the user's code, shortened."""
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
