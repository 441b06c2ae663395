"""The app inside the main process, for pools that have no children: loaded and ended off the loop."""

import traceback
from collections.abc import Callable

from umbel.errors import PoolError
from umbel.pools.guard import Raised
from umbel.pools.hosting import in_one_line, load_host
from umbel.pools.interface import ChildContext, Host, PoolSettings, Runner, Told
from umbel.pools.off_loop import OffLoop


async def start_host(
    settings: PoolSettings, tell: Callable[[Told], None] | None = None, *, on_loop: bool = False
) -> tuple[Host, Runner]:
    """The app, ready to run tasks; PoolError with one line that says why not."""
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
    ended = await OffLoop("umbel-stop", host.stop_child).ended()
    if isinstance(ended, Raised):
        traceback.print_exception(ended.error)
