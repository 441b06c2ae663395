"""Preparation of a worker, before there is an event loop: its name, its pool, and the first fork server.

An option or a task that the chosen pool cannot honour is refused here. The first fork server is a fork of the
main process, started before the worker (`pools/prefork/server_process.py`).
"""

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import NamedTuple

from umbel.app.canvas.group import BUILTIN_TASKS
from umbel.app.settings import Settings, size_bytes
from umbel.errors import BadSetting, ConfigurationError
from umbel.files import too_few_for
from umbel.launch.loading import FoundApp
from umbel.logs import forget_logging
from umbel.pools import make_pool
from umbel.pools.abilities import ABILITIES, GREEN, OPTIONS, PREFERRED, lacks
from umbel.pools.interface import HostSpec, Pool, PoolSettings
from umbel.pools.prefork.messages import setup_of
from umbel.pools.prefork.server_process import ForkPoint, StartedServer
from umbel.protocol.delivery.delivery import TaskRules
from umbel.wire.message import is_name


def node_name(given: str | None) -> str:
    """Return `name@host` for the option -n; raises BadSetting if it is invalid.

    A name without a host gets the name of this machine, and no name becomes `umbel@host`.
    """
    host = socket.gethostname()
    name = (given or "umbel").replace("%h", host).replace("%n", host.partition(".")[0])
    name = name.replace("%d", host.partition(".")[2])
    whole = name if "@" in name else f"{name}@{host}"
    before, _, after = whole.partition("@")
    if not before or not after or " " in whole or not whole.isprintable() or not is_name(whole):
        raise BadSetting("--hostname", given, "write it as name@host", source="the command line")
    return whole


# ---- pool choice -----------------------------------------------------------------------------------

GREEN_CONCURRENCY = 100  # waiting tasks are cheap, but the services they call may be overloaded


class ChildLogs(NamedTuple):
    """The log settings of a worker's children."""

    loglevel: str = "WARNING"
    logfile: str | None = None
    log_json: bool = False


def choose_pool(
    settings: Settings,
    tasks: Mapping[str, TaskRules],
    *,
    host: HostSpec,
    node: str,
    logs: ChildLogs,
    first_server: "StartedServer | None" = None,
) -> Pool:
    """Return the pool that the settings name; raises BadSetting if it cannot honour an option or a limit."""
    refuse_unsupported(settings)
    refuse_unenforceable(settings.worker_pool, tasks)
    return make_pool(settings.worker_pool, pool_settings(settings, host, node, logs), first_server)


def pool_settings(settings: Settings, host: HostSpec, node: str, logs: ChildLogs) -> PoolSettings:
    """Return the settings of the pool, from those of the worker."""
    return PoolSettings(
        host=host,
        node=node,
        concurrency=_concurrency(settings),
        green_children=settings.worker_gevent_children,
        loglevel=logs.loglevel,
        logfile=logs.logfile,
        log_json=logs.log_json,
        child_start=settings.worker_child_start,
        loop=settings.worker_loop,
        start_timeout_s=settings.worker_start_timeout_s,
        start_attempts=settings.worker_start_attempts,
        max_tasks_per_child=settings.worker_max_tasks_per_child,
        max_memory_bytes=size_bytes(settings.worker_max_memory_per_child),
        max_memory_hard_bytes=size_bytes(settings.worker_max_memory_hard),
    )


def _concurrency(settings: Settings) -> int:
    """Return the size at the start; a pool that scales automatically starts at its minimum."""
    if settings.worker_autoscale is not None:
        return settings.worker_autoscale[1]
    default = GREEN_CONCURRENCY if settings.worker_pool in GREEN else os.cpu_count() or 1
    return settings.worker_concurrency or default


def refuse_unenforceable(pool: str, tasks: Mapping[str, TaskRules]) -> None:
    """Raise BadSetting if the pool cannot end a task at its time limit, or cannot run it.

    `tasks` are those of the queues that the worker serves; a message that a call sent there explicitly is
    checked when it arrives. So are messages of map, starmap and chunks: they have a limit when all tasks have
    one, and few apps send them.
    """
    for task, rules in sorted(tasks.items()):
        if task in BUILTIN_TASKS:
            continue
        soft, hard = rules.soft_limit_s is not None, rules.hard_limit_s is not None
        reason = ABILITIES[pool].unenforceable(is_async=rules.is_async, soft=soft, hard=hard)
        if reason:
            raise _beyond(pool, f"cannot enforce the time limit of {task}", reason)
        if rules.is_async and ABILITIES[pool].async_tasks:
            raise _beyond(pool, f"cannot run {task}, which is async def", ABILITIES[pool].async_tasks)


def refuse_few_descriptors(settings: Settings) -> None:
    """Raise ConfigurationError if the worker may open too few files for its child processes."""
    match settings.worker_pool:
        case "prefork":
            children = settings.worker_autoscale[0] if settings.worker_autoscale else _concurrency(settings)
        case "gevent":
            children = min(settings.worker_gevent_children, _concurrency(settings))
        case _:
            children = 0
    if problem := too_few_for(children, is_green=settings.worker_pool in GREEN):
        raise ConfigurationError(problem)


def refuse_unsupported(settings: Settings) -> None:
    """Raise BadSetting for an option that the pool cannot honour, rather than ignoring it."""
    changed, pool = settings.changed(), settings.worker_pool
    for option, ability in OPTIONS.items():
        if option in changed and (reason := lacks(pool, ability)):
            raise _beyond(pool, f"does not support {option!r}", reason)


def _beyond(pool: str, what: str, reason: str) -> BadSetting:
    remedy = f"use -P {PREFERRED}, or leave -P out"
    return BadSetting("worker_pool", pool, f"it {what}: {reason}; {remedy}", source="the worker's settings")


# ---- first fork server -----------------------------------------------------------------------------


@contextmanager
def started_early(
    point: ForkPoint, found: FoundApp, settings: Settings, node: str, logs: ChildLogs
) -> Iterator[StartedServer | None]:
    """Run the first fork server inside this block; None if the pool has none, or starts it as a new program.

    Why it is started before the worker: `pools/prefork/server_process.py`.
    """
    server = None
    if settings.worker_pool == "prefork" and found.children_may_be_copies():
        setup = setup_of(pool_settings(settings, found.spec, node, logs))
        with suppress(OSError):  # no memory or a limit on processes; the pool retries, and reports failures
            server = point.fork(setup, forget_logging) if point.can_fork(setup) else None
    try:
        yield server
    finally:
        if server is not None:
            server.control.close()  # the server then ends with every descendant
