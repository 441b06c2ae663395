"""How a worker runs: Celery's settings of it."""

from collections.abc import Mapping
from typing import Any

from umbel.celery.table.verdicts import (
    Judged,
    Row,
    differs,
    each,
    idle,
    refusal,
    unsupported,
    works,
)

POOLS: Mapping[str, str] = {
    "prefork": "prefork",
    "processes": "prefork",
    "solo": "solo",
    "threads": "threads",
    "gevent": "gevent",
    "celery.concurrency.prefork:TaskPool": "prefork",
    "celery.concurrency.solo:TaskPool": "solo",
    "celery.concurrency.thread:TaskPool": "threads",
    "celery.concurrency.gevent:TaskPool": "gevent",
}
EVENTLET = (
    "eventlet is not supported: its own authors advise against it; use gevent, which runs the same kind of "
    "tasks: worker_pool = 'gevent' or -P gevent"
)
_CUSTOM_POOL = "pool classes of your own are not supported; use prefork, threads, solo or gevent"
_PREFETCH = "messages are claimed as child processes become free: long tasks do not hold up others"
_IN_BROKER = "messages that are not due wait in the broker, not in the worker"


def _pool(value: Any) -> Judged | None:
    if str(value) in POOLS:
        return None
    return refusal(EVENTLET if "eventlet" in str(value) else _CUSTOM_POOL)


def _our_pool(app: Any) -> str | None:
    return POOLS.get(str(app.conf.worker_pool))  # any other one is refused before a worker starts


def _concurrency(app: Any) -> int | None:
    stated = app.conf.worker_concurrency
    return None if stated in (None, 0, "auto", "0") else int(stated)


ROWS: tuple[Row, ...] = (
    unsupported("worker_agent", "agents are not supported: remove it"),
    unsupported(
        "worker_autoscaler",
        "autoscalers of your own are not supported: remove it, and use --autoscale MAX,MIN",
    ),
    differs(
        "worker_cancel_long_running_tasks_on_connection_loss",
        "running tasks go on while the connection is restored; what they end with is stored afterwards",
    ),
    differs(
        "worker_soft_shutdown_timeout",
        "after a second stop signal running tasks are interrupted and have this long to end",
        ours="worker_soft_grace_s",
        read=lambda app: app.conf.worker_soft_shutdown_timeout or None,
    ),
    idle("worker_enable_soft_shutdown_on_idle", "an idle worker stops at once; messages stay in the broker"),
    works(
        "worker_concurrency", "'auto' is the number of cores", ours="worker_concurrency", read=_concurrency
    ),
    unsupported("worker_consumer", "consumer classes of your own are not supported: remove it"),
    unsupported(
        "worker_direct",
        "queues of single workers are not supported: start the worker with -Q NAME of its own",
    ),
    works("worker_disable_rate_limits"),
    works("worker_deduplicate_successful_tasks"),
    differs(
        "worker_enable_remote_control",
        "False: inspection is answered, commands that change something are refused",
        ours="control_allow",
        read=lambda app: None if app.conf.worker_enable_remote_control else ("read-only",),
    ),
    works("worker_hijack_root_logger"),
    works("worker_log_color"),
    works("worker_log_datefmt"),
    works("worker_log_format", "lines of Umbel's own have their fields behind them"),
    idle("worker_lost_wait", "a lost child process is noticed at once"),
    works("worker_max_memory_per_child", ours="worker_max_memory_per_child"),
    works("worker_max_tasks_per_child", ours="worker_max_tasks_per_child"),
    works(
        "worker_pool",
        "prefork, threads, solo and gevent; eventlet and classes of your own are refused",
        ours="worker_pool",
        read=_our_pool,
        judge=_pool,
    ),
    idle("worker_pool_putlocks", "a job is handed to a child process that is free"),
    works("worker_pool_restarts", ours="worker_pool_restarts"),
    works(
        "worker_pool_start_method",
        "'fork' forks from a process that has loaded the app, and nothing else",
        ours="worker_child_start",
        read=lambda app: "spawn" if app.conf.worker_pool_start_method == "spawn" else None,
    ),
    idle("worker_proc_alive_timeout", "a child process has `worker_start_timeout_s` to start, 60 s"),
    differs(
        "worker_prefetch_multiplier",
        f"on RabbitMQ so many messages for each child process are held at least; else {_PREFETCH}",
    ),
    idle("worker_eta_task_limit", _IN_BROKER),
    idle("worker_enable_prefetch_count_reduction", _PREFETCH),
    idle("worker_disable_prefetch", f"it is so without it: {_PREFETCH}"),
    works("worker_redirect_stdouts"),
    works("worker_redirect_stdouts_level"),
    works("worker_send_task_events", ours="task_send_events"),
    idle("worker_state_db", "revoked tasks are recorded at the broker, and clocks in the run directory"),
    works("worker_task_log_datefmt"),
    works("worker_task_log_format"),
    *each(
        "worker",
        "timer timer_precision",
        lambda name: idle(name, "the worker runs on asyncio, which has timers"),
    ),
    idle("worker_detect_quorum_queues", "quorum queues are seen by their declaration"),
)
