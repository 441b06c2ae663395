"""The first fork server of a worker, started before the worker: see `pools/prefork/first_server.py`."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from umbel.app.configuration.settings import Settings
from umbel.launch.loading import FoundApp
from umbel.launch.pool_choice import ChildLogs, pool_settings
from umbel.logs import forget_logging
from umbel.pools.prefork.first_server import ForkPoint
from umbel.pools.prefork.messages import setup_of
from umbel.pools.prefork.server_process import StartedServer


@contextmanager
def started_early(
    point: ForkPoint, found: FoundApp, settings: Settings, node: str, logs: ChildLogs
) -> Iterator[StartedServer | None]:
    """None where the pool has none, or has to start it as a new program."""
    server = None
    if settings.worker_pool == "prefork" and found.children_may_be_copies():
        setup = setup_of(pool_settings(settings, found.spec, node, logs))
        with suppress(OSError):  # no memory or a limit on processes; the pool starts one, or says so
            server = point.fork(setup, forget_logging) if point.can_fork(setup) else None
    try:
        yield server
    finally:
        if server is not None:
            server.control.close()  # it ends then, with every descendant, if it has not yet
