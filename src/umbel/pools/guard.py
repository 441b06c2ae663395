"""The one place where code that users wrote is called.

A task, a hook or a handler may raise anything. Nobody else in Umbel catches `Exception`: they
call through here and look at what came back. A pool calls through here what it does for one job or
one child, too: what that raises must end nothing else.
"""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from threading import get_ident
from types import CodeType, FrameType
from typing import Any, Generic, TypeVar

import msgspec

from umbel.errors import Ignore, Reject, Retry, TaskCancelled, WorkerStopping

ItemT = TypeVar("ItemT")
R = TypeVar("R")


class Returned(msgspec.Struct, Generic[R], frozen=True):
    value: R


class Raised(msgspec.Struct, frozen=True):
    error: BaseException


def call_guarded(function: Callable[..., R], *args: Any, **kwargs: Any) -> Returned[R] | Raised:
    """Call it and say what happened. `sys.exit()` in users' code is an error like any other."""
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
    """Call it with one item after the other; one for which it raises is given to `faulty`, with the error."""
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
    """The same for what has to be awaited. Being cancelled is not an error: it passes through."""
    try:
        return Returned(await function(*args, **kwargs))
    except Exception as error:
        return Raised(error)
    except SystemExit as error:
        return Raised(error)


def call_to_the_end(function: Callable[..., R], *args: Any, **kwargs: Any) -> Returned[R] | Raised:
    """The same where nothing may pass: for a thread or a greenlet that runs one job after the other."""
    try:
        return Returned(function(*args, **kwargs))
    except BaseException as error:
        return Raised(error)


async def await_to_the_end(
    function: Callable[..., Awaitable[R]], *args: Any, **kwargs: Any
) -> Returned[R] | Raised:
    """The same for a loop on which one job runs beside the other; being cancelled passes through."""
    from asyncio import CancelledError  # children without a loop need none of it

    try:
        return Returned(await function(*args, **kwargs))
    except (CancelledError, GeneratorExit):
        raise
    except BaseException as error:
        return Raised(error)


def interruption_or(error: BaseException) -> BaseException:
    """The interruption that led to this error, if one did; else the error.

    An interruption is raised anywhere, so also where it breaks something: between two steps of a lock, whose
    `with` then complains that it is not held; or in front of a `finally` that fails. The task was
    interrupted all the same. What it says on purpose stays as it is: `raise … from None`, and to retry,
    ignore or reject, unless it is to retry because of the interruption. A group of asyncio's tasks puts what
    was raised into a group of exceptions.
    """
    seen, to_see = set[int](), [error]
    while to_see:
        found = to_see.pop()
        if isinstance(found, TaskCancelled | WorkerStopping):
            return found
        if id(found) not in seen:
            seen.add(id(found))
            to_see += [one for one in _what_led_to(found) if isinstance(one, BaseException)]
    return error


def _what_led_to(error: BaseException) -> Sequence[object]:
    if isinstance(error, Retry | Ignore | Reject):
        return [getattr(error, "exc", None)]
    members = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return [*members, error.__cause__ or (None if error.__suppress_context__ else error.__context__)]


def is_guarded(frame: FrameType | None, *, within: CodeType | None = None) -> bool:
    """Whether what is raised here ends in a guarded call, as one more way for users' code to fail.

    Calls that hold the frame of `within` do not count: they guard more than users' code.
    """
    below = None
    while frame is not None and frame.f_code is not within:
        if frame.f_code in _GUARDS:
            # Not while the guard itself is at work: it would let the exception through.
            return below is not None
        below, frame = frame.f_code, frame.f_back
    return False


def interrupt_here(error: Exception) -> None:
    """Raise it in the users' code that runs in this thread; where that waits on a loop, by the loop."""
    if not interrupted_by_loop(get_ident(), error):
        raise error


def interrupted_by_loop(thread: int, error: Exception) -> bool:
    """Have the loop that runs in this thread raise it; False when none does, or users' code runs on it."""
    on_loop = on_loops.get(thread)
    return on_loop is not None and on_loop(error)


# By thread: interrupts the loop of ours that runs there. False while users' code runs on it.
on_loops: dict[int, Callable[[Exception], bool]] = {}

_GUARDS = frozenset({call_guarded.__code__, await_guarded.__code__})
