"""The one place where code that users wrote is called.

A task, a hook or a handler may raise anything. Nobody else in Umbel catches `Exception`: they
call through here and look at what came back. A pool calls through here what it does for one job or
one child, too: what that raises must end nothing else.
"""

from collections.abc import Awaitable, Callable, Iterable
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
    ignore or reject, unless it is to retry because of the interruption.
    """
    found, seen = error, set[int]()
    while not isinstance(found, TaskCancelled | WorkerStopping):
        seen.add(id(found))
        if isinstance(found, Retry | Ignore | Reject):
            led_to_it = getattr(found, "exc", None)
        else:
            led_to_it = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
        if not isinstance(led_to_it, BaseException) or id(led_to_it) in seen:
            return error
        found = led_to_it
    return found


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
    """Raise it in the users' code that runs in this thread; of a coroutine that waits, where it waits.

    Raised in the code of the loop it would be lost, or the coroutine would never be woken again.
    """
    on_loop = on_loops.get(get_ident())
    if on_loop is None or not on_loop(error):
        raise error


# By thread: how the coroutine that runs on a loop of ours there is interrupted. False while its code runs.
on_loops: dict[int, Callable[[Exception], bool]] = {}

_GUARDS = frozenset({call_guarded.__code__, await_guarded.__code__})
