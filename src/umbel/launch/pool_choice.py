"""The pool of a worker, from its settings; what the chosen pool cannot do is refused here."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from umbel.app.canvas.builtin_tasks import BUILTIN_TASKS
from umbel.app.configuration.settings import Settings
from umbel.app.configuration.sizes import size_bytes
from umbel.errors import BadSetting
from umbel.pools.abilities import ABILITIES, GREEN, OPTIONS, PREFERRED, lacks
from umbel.pools.interface import HostSpec, Pool, PoolSettings
from umbel.pools.registry import make_pool
from umbel.protocol.delivery.delivery import TaskRules

if TYPE_CHECKING:
    from umbel.pools.prefork.server_process import StartedServer

GREEN_CONCURRENCY = 100  # what waits costs little, but what it waits for may not like it


class ChildLogs(NamedTuple):
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
    refuse_unsupported(settings)
    refuse_unenforceable(settings.worker_pool, tasks)
    return make_pool(settings.worker_pool, pool_settings(settings, host, node, logs), first_server)


def pool_settings(settings: Settings, host: HostSpec, node: str, logs: ChildLogs) -> PoolSettings:
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
        max_memory_bytes=size_bytes("worker_max_memory_per_child", settings.worker_max_memory_per_child),
        max_memory_hard_bytes=size_bytes("worker_max_memory_hard", settings.worker_max_memory_hard),
    )


def _concurrency(settings: Settings) -> int:
    """A pool that scales by itself starts small."""
    if settings.worker_autoscale is not None:
        return settings.worker_autoscale[1]
    default = GREEN_CONCURRENCY if settings.worker_pool in GREEN else os.cpu_count() or 1
    return settings.worker_concurrency or default


def refuse_unenforceable(pool: str, tasks: Mapping[str, TaskRules]) -> None:
    """A pool that cannot end a task at its limit must not take a task that has one.

    `tasks` are those of the queues that the worker serves; a message that a call sent there with a queue of
    its own is judged when it comes.

    Our own (map, starmap, chunks) are plain functions and have a limit when all tasks have one. Few
    apps send them, so they do not count here: the worker refuses such a message when it comes.
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


def refuse_unsupported(settings: Settings) -> None:
    """An option that the pool cannot honour is refused, not ignored."""
    changed, pool = settings.changed(), settings.worker_pool
    for option, ability in OPTIONS.items():
        if option in changed and (reason := lacks(pool, ability)):
            raise _beyond(pool, f"does not support {option!r}", reason)


def _beyond(pool: str, what: str, reason: str) -> BadSetting:
    remedy = f"use -P {PREFERRED}, or leave -P out"
    return BadSetting("worker_pool", pool, f"it {what}: {reason}; {remedy}", source="the worker's settings")
