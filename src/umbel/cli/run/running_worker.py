"""The worker of `umbel worker`, once its app is loaded and its first fork server is started."""

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from umbel.app.configuration.settings import Settings
from umbel.brokers.interface import BrokerSettings
from umbel.brokers.registry import open_broker
from umbel.launch.loading import FoundApp
from umbel.launch.native import NativeProject
from umbel.launch.pool_choice import ChildLogs, choose_pool
from umbel.launch.workers import make_worker
from umbel.logs import log_path
from umbel.pools.loops import loop_factory
from umbel.pools.prefork.server_process import StartedServer
from umbel.worker.process.beside import Beside, command_beside, keep_beside

log = logging.getLogger("umbel.worker")

COLLECTOR_RESTS_S = 2.0
"""From here, where the worker has begun without it."""


class Running(NamedTuple):
    found: FoundApp
    settings: Settings
    node: str
    run_directory: Path
    loglevel: str  # of the main process
    logs: ChildLogs
    app_name: str | None = None  # as it was given


def run_worker(
    what: Running,
    first_server: StartedServer | None,
    *,
    notes: Iterable[str],
    purge: bool,
    dashboard: Sequence[str] | None = None,
) -> None:
    """Until it is told to stop. `notes` are for the log, `purge`: empty its queues first.

    `dashboard`: options of the one that runs beside it.
    """
    found, settings, logs = what.found, what.settings, what.logs
    project = found.project or NativeProject(found.app)

    async def run() -> None:
        asyncio.get_running_loop().call_later(COLLECTOR_RESTS_S, gc.enable)
        for note in notes:
            log.info(note)
        worker = make_worker(
            found,
            settings,
            node=what.node,
            run_directory=what.run_directory,
            logs=logs,
            choose=partial(choose_pool, first_server=first_server),
            recorder=_recorder(what) if settings.worker_record else None,
        )
        if purge:
            await _purge(project.for_broker(settings), settings)
        async with _dashboard_beside(what, dashboard):
            await worker.run()

    with (
        project.logging(what.loglevel.upper(), logs.logfile, what.node, as_json=logs.log_json),
        asyncio.Runner(loop_factory=loop_factory(settings.worker_loop)) as runner,
    ):
        runner.run(run())


@asynccontextmanager
async def _dashboard_beside(what: Running, options: Sequence[str] | None) -> AsyncIterator[None]:
    """While the block runs, so does the dashboard; without options there is none."""
    if options is None:
        yield
        return
    command = command_beside("web", what.app_name, *options)
    keeping = asyncio.create_task(keep_beside(Beside("dashboard", command, _log_file(what))))
    try:
        yield
    finally:
        keeping.cancel()
        await asyncio.wait([keeping])


def _recorder(what: Running) -> Beside:
    from umbel.history.arrow import require_arrow  # few workers do this

    require_arrow()
    chosen = what.settings
    options = {
        "--lake": chosen.history_lake,
        "--lease": f"{chosen.lease_s:g}",
        "--loglevel": what.loglevel,
        "--log-format": "json" if what.logs.log_json else "plain",
    }
    command = command_beside("record", what.app_name, *chain.from_iterable(options.items()))
    return Beside("recorder", command, _log_file(what))


def _log_file(what: Running) -> str | None:
    """Of the main process, for what processes beside it say."""
    return log_path(what.logs.logfile, what.node, 0) if what.logs.logfile else None


async def _purge(of_broker: BrokerSettings, settings: Settings) -> None:
    broker = open_broker(of_broker)
    await broker.open()
    try:
        for queue in settings.worker_queues or (settings.task_default_queue,):
            removed = await broker.purge(queue)
            log.warning("queue purged", extra={"queue": queue, "removed": removed})
    finally:
        await broker.close()
