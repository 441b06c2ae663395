"""The app inside the main process, for pools that have no children: loaded and ended off the loop."""

import asyncio
import contextlib
import threading
import traceback
from collections.abc import Callable
from typing import TypeVar

from umbel.errors import PoolError
from umbel.pools.guard import Raised, Returned, call_guarded
from umbel.pools.hosting import in_one_line, load_host
from umbel.pools.interface import ChildContext, Host, PoolSettings, Runner, Told

R = TypeVar("R")


async def start_host(
    settings: PoolSettings, tell: Callable[[Told], None] | None = None, *, on_loop: bool = False
) -> tuple[Host, Runner]:
    """The app, ready to run tasks; PoolError with one line that says why not."""
    target = settings.host.target

    def load() -> tuple[Host, Runner]:
        host = load_host(settings.host)
        logs = settings.loglevel, settings.logfile, settings.log_json
        context = ChildContext(settings.node, 0, *logs, tell=tell, on_loop=on_loop)
        return host, host.start_child(context)

    try:
        async with asyncio.timeout(settings.start_timeout_s):
            made = await _in_thread("umbel-start", load)
    except TimeoutError:
        limit = f"{settings.start_timeout_s:g} s (start_timeout_s)"
        raise PoolError(f"the app {target!r} did not load within {limit}") from None
    if isinstance(made, Raised):
        traceback.print_exception(made.error)
        raise PoolError(f"the app {target!r} cannot be loaded: {in_one_line(made.error)}")
    return made.value


async def stop_host(host: Host) -> None:
    ended = await _in_thread("umbel-stop", host.stop_child)
    if isinstance(ended, Raised):
        traceback.print_exception(ended.error)


async def _in_thread(name: str, function: Callable[[], R]) -> Returned[R] | Raised:
    """Run it in a thread that the end of the process does not wait for."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Returned[R] | Raised] = loop.create_future()

    def tell(happened: Returned[R] | Raised) -> None:
        if not done.done():
            done.set_result(happened)

    def work() -> None:
        happened = call_guarded(function)
        with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody is there to hear it
            loop.call_soon_threadsafe(tell, happened)

    threading.Thread(target=work, name=name, daemon=True).start()
    return await done
