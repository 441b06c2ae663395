"""The event loop of the main process and the threads next to it.

`loop_factory` chooses the kind of loop. `OffLoop` makes one blocking call in a thread. `Reports` gathers what
threads report, so that the loop wakes once for many reports. `start_host` loads the app in a thread, for
pools without child processes. Child processes import none of this.
"""

import asyncio
import contextlib
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Generic, TypeVar

from umbel.errors import BadSetting, PoolError
from umbel.pools.guard import Raised, Returned, call_guarded, in_one_line, load_host
from umbel.pools.interface import ChildContext, Host, LoopChoice, PoolSettings, Runner, UserEvent

# ---- loops -----------------------------------------------------------------------------------------
#
# The setting `worker_loop` chooses the event loop of a process or thread. `auto` uses uvloop if it is
# installed, else asyncio's loop.


def loop_factory(choice: LoopChoice) -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return the event loop factory for `worker_loop`; None for asyncio's loop. Raise BadSetting if uvloop is
    missing.
    """
    is_installed = find_spec("uvloop") is not None
    if choice == "uvloop" and not is_installed:
        problem = "uvloop is not installed; run: pip install 'umbel[uvloop]'"
        raise BadSetting("worker_loop", choice, problem, source="the worker's settings")
    if choice == "asyncio" or not is_installed:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = import_module("uvloop").new_event_loop
    return factory


# ---- off loop --------------------------------------------------------------------------------------
#
# The call runs in a daemon thread, so the end of the process does not wait for it. The caller waits with a
# timeout, and may wait again: the call is made only once. If the caller stops waiting, the call continues,
# and its result is ignored.

R = TypeVar("R")


class OffLoop(Generic[R]):
    """One blocking call in a daemon thread, started on construction; `name` is the thread's name."""

    def __init__(self, name: str, function: Callable[[], R]) -> None:
        self._function = function
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[Returned[R] | Raised] = self._loop.create_future()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    async def ended(self, timeout_s: float | None = None) -> Returned[R] | Raised:
        """Return how the call ended; raise TimeoutError if it does not end in time. May be awaited again."""
        async with asyncio.timeout(timeout_s):
            return await asyncio.shield(self._done)

    def _work(self) -> None:
        happened = call_guarded(self._function)
        with contextlib.suppress(RuntimeError):  # the loop has ended: nothing waits for the result
            self._loop.call_soon_threadsafe(self._tell, happened)

    def _tell(self, happened: Returned[R] | Raised) -> None:
        if not self._done.done():
            self._done.set_result(happened)


# ---- reports ---------------------------------------------------------------------------------------
#
# Threads report to the worker's event loop; reports are collected so that the loop wakes once for many.

ReportT = TypeVar("ReportT")


class Reports(Generic[ReportT]):
    """`add` works in any thread; `deliver` is called on the loop with all reports since the last call, in
    order.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, deliver: Callable[[Sequence[ReportT]], None]) -> None:
        self._loop = loop
        self._deliver = deliver
        self._gathered: deque[ReportT] = deque()  # limited by the number of running and ended jobs
        self._called = False

    def add(self, report: ReportT) -> None:
        """Queue a report; wake the loop unless it is about to wake already."""
        self._gathered.append(report)
        if not self._called:
            self._called = True
            with contextlib.suppress(RuntimeError):  # the loop has ended: nothing reads reports
                self._loop.call_soon_threadsafe(self._hand_over)

    def _hand_over(self) -> None:
        self._called = False  # first, so that a report added from here on schedules another call
        reports = [self._gathered.popleft() for _ in range(len(self._gathered))]
        if reports:
            self._deliver(reports)


# ---- own host --------------------------------------------------------------------------------------
#
# Pools without children load the app in the main process. Loading and shutdown run in a thread, not on the
# loop.


async def start_host(
    settings: PoolSettings, tell: Callable[[UserEvent], None] | None = None, *, on_loop: bool = False
) -> tuple[Host, Runner]:
    """Load the app in a thread and return it with its runner; raise PoolError with a one-line reason if that
    fails.
    """
    target = settings.host.target

    def load() -> tuple[Host, Runner]:
        host = load_host(settings.host, settings.node, forks=False)
        logs = settings.loglevel, settings.logfile, settings.log_json
        context = ChildContext(settings.node, 0, *logs, tell=tell, on_loop=on_loop)
        return host, host.start_child(context)

    try:
        made = await OffLoop("umbel-start", load).ended(settings.start_timeout_s)
    except TimeoutError:
        limit = f"{settings.start_timeout_s:g} s (start_timeout_s)"
        raise PoolError(f"the app {target!r} did not load within {limit}") from None
    if isinstance(made, Raised):
        traceback.print_exception(made.error)
        raise PoolError(f"the app {target!r} cannot be loaded: {in_one_line(made.error)}")
    return made.value


async def stop_host(host: Host) -> None:
    """Run the app's shutdown hooks in a thread; an error in them is printed."""
    ended = await OffLoop("umbel-stop", host.stop_child).ended()
    if isinstance(ended, Raised):
        traceback.print_exception(ended.error)
