"""The part of `umbel worker` that runs after the app is loaded and the first fork server is started.

It is a separate module, because the fork server and its children do not need its imports.
"""

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from umbel.app.settings import Settings
from umbel.brokers.interface import BrokerSettings
from umbel.brokers.registry import open_broker
from umbel.launch.loading import FoundApp
from umbel.launch.preparation import ChildLogs, choose_pool
from umbel.launch.project import NativeProject
from umbel.launch.workers import make_worker
from umbel.logs import log_path
from umbel.pools.event_loop import loop_factory
from umbel.pools.prefork.server_process import StartedServer
from umbel.worker.sidecar import Sidecar, run_sidecar, sidecar_command

log = logging.getLogger("umbel.worker")

COLLECTOR_RESTS_S = 2.0
"""Seconds for which garbage collection stays off while the worker starts."""


class LoadedWorker(NamedTuple):
    """Everything that `umbel worker` has loaded and decided before the worker runs."""

    found: FoundApp
    settings: Settings
    node: str
    run_directory: Path
    loglevel: str  # of the main process
    logs: ChildLogs
    app_name: str | None = None  # the value of -A, unchanged


def run_worker(
    what: LoadedWorker,
    first_server: StartedServer | None,
    *,
    notes: Iterable[str],
    purge: bool,
    dashboard: Sequence[str] | None = None,
) -> None:
    """Run the worker until it is stopped. `notes` are logged first; `purge` empties its queues first.

    `dashboard` contains the options of the dashboard that runs next to it; None for no dashboard.
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
async def _dashboard_beside(what: LoadedWorker, options: Sequence[str] | None) -> AsyncIterator[None]:
    """Run the dashboard while the block runs; without options, run the block alone."""
    if options is None:
        yield
        return
    command = sidecar_command("web", what.app_name, *options)
    keeping = asyncio.create_task(run_sidecar(Sidecar("dashboard", command, _log_file(what))))
    try:
        yield
    finally:
        keeping.cancel()
        await asyncio.wait([keeping])


def _recorder(what: LoadedWorker) -> Sidecar:
    """Return the recorder process that runs next to the worker."""
    from umbel.history.lake import require_arrow  # few workers do this

    require_arrow()
    chosen = what.settings
    options = {
        "--lake": chosen.history_lake,
        "--lease": f"{chosen.lease_s:g}",
        "--loglevel": what.loglevel,
        "--log-format": "json" if what.logs.log_json else "plain",
    }
    command = sidecar_command("record", what.app_name, *chain.from_iterable(options.items()))
    return Sidecar("recorder", command, _log_file(what))


def _log_file(what: LoadedWorker) -> str | None:
    """Return the log file of the main process, to which the recorder and the dashboard also write."""
    return log_path(what.logs.logfile, what.node, 0) if what.logs.logfile else None


async def _purge(of_broker: BrokerSettings, settings: Settings) -> None:
    """Remove all messages from the worker's queues."""
    broker = open_broker(of_broker)
    await broker.open()
    try:
        for queue in settings.worker_queues or (settings.task_default_queue,):
            removed = await broker.purge(queue)
            log.warning("queue purged", extra={"queue": queue, "removed": removed})
    finally:
        await broker.close()
