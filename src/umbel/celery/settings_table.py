"""TABLE: a verdict for every setting of Celery 5.7 (`celery.app.defaults`).

This module contains the settings of tasks, schedule and worker; `connection_settings.py` contains those of
broker and results. `configuration.py` converts settings by this table, `umbel celery check` and a starting
worker report by it, and docs/celery-settings.md is generated from it. It does not import Celery, so that the
page can be generated without Celery.
"""

from collections.abc import Mapping
from typing import Any

from umbel.celery import connection_settings
from umbel.celery.verdicts import (
    Judged,
    Row,
    Verdict,
    client,
    differs,
    each,
    idle,
    refusal,
    unsupported,
    works,
)

# ---- how tasks are sent, kept and run --------------------------------------------------------------
#
# Celery's settings of tasks, of the schedule, and of no section.

SCHEDULE = Judged(
    Verdict.WORKS,
    "one worker of the cluster sends it, under a lease; stop `celery beat`, or start workers with "
    "--without-schedule",
)
_NO_BEAT = "there is no beat process that could be asked"
_SENT = "follow-ups and retries are sent by the worker, together with the acknowledgement"
_UTC = "an eta or expires without a zone is read as UTC; send times with their zone"
_LOST = (
    "a late-acknowledged task whose process died is delivered again, up to `task_max_deliveries` starts; "
    "then it is a dead letter"
)


def _zone(value: Any) -> Judged | None:
    return None if str(value or "UTC") in ("UTC", "utc", "Etc/UTC") else Judged(Verdict.DIFFERS, _UTC)


def _unless(good: Any, verdict: Verdict, note: str) -> Any:
    return lambda value: None if value == good else Judged(verdict, note)


TASK_ROWS: tuple[Row, ...] = (
    works("accept_content", ours="accept_content", read=lambda app: tuple(app.conf.accept_content)),
    works("result_accept_content"),
    works("enable_utc", judge=_unless(True, Verdict.DIFFERS, _UTC)),
    works("timezone", judge=_zone),
    works("imports", "imported in the main process and before children are forked"),
    works("include", "imported in the main process and before children are forked"),
    Row("beat_schedule", SCHEDULE),
    Row("beat_scheduler", SCHEDULE),
    idle("beat_enable_remote_control", _NO_BEAT),
    idle("beat_remote_control_max_tick_age", _NO_BEAT),
    differs("beat_max_loop_interval", "the schedule is looked at every 5 s at least"),
    idle("beat_schedule_filename", "when tasks ran last is recorded at the broker"),
    idle("beat_sync_every", "when tasks ran last is recorded with each that is sent"),
    works("beat_cron_starting_deadline", "the project's scheduler class reads it, in the worker that sends"),
    works("task_acks_late", "a task's own option wins", ours="task_acks_late"),
    works("task_acks_on_failure_or_timeout", "a task's own option wins"),
    works("task_acks_on_failure", "False: the message of a late-acknowledged task that fails is rejected"),
    works("task_acks_on_timeout", "False: a late-acknowledged task past its hard limit is delivered again"),
    works("task_reject_on_worker_lost", _LOST),
    works("task_retry_on_worker_lost", _LOST),
    client("task_always_eager"),
    works("task_annotations"),
    works("task_compression"),
    works("task_create_missing_queues", "False: a worker refuses -Q with a queue that task_queues lacks"),
    works("task_create_missing_queue_type", "of queues that only -Q names"),
    works("task_create_missing_queue_exchange_type", "of queues that only -Q names"),
    works("task_inherit_parent_priority"),
    works(
        "task_default_delivery_mode",
        judge=lambda value: (
            None
            if value in (2, "2", "persistent")
            else Judged(Verdict.DIFFERS, f"clients follow it; {_SENT}, and are persistent")
        ),
    ),
    works("task_default_queue", ours="task_default_queue"),
    works("task_default_queue_type"),
    works("task_default_exchange"),
    works("task_default_exchange_type"),
    works("task_default_routing_key"),
    works("task_default_rate_limit", "per worker, as in Celery; a task's own option wins"),
    client("task_default_priority", "and by what tasks send"),
    client("task_eager_propagates"),
    works("task_ignore_result", ours="task_ignore_result"),
    client("task_store_eager_result"),
    works("task_protocol", "messages of both versions are understood"),
    works("task_publish_retry", f"clients, and what tasks send; {_SENT}"),
    works("task_publish_retry_policy", f"clients, and what tasks send; {_SENT}"),
    works(
        "task_queues",
        "without -Q all of them are consumed",
        ours="worker_queues",
        read=lambda app: tuple(app.amqp.queues.consume_from),
    ),
    works("task_queue_max_priority", "an argument of the declared queues on RabbitMQ"),
    works("task_remote_tracebacks"),
    client("task_repr_maxlevels"),
    works("task_routes", "clients, and what tasks send"),
    works("task_send_sent_event", "clients, and what tasks send", ours="task_send_sent_event"),
    works("task_serializer", "clients, and what tasks send"),
    works("task_soft_time_limit", "a task's own option wins", ours="task_soft_time_limit_s"),
    works(
        "task_time_limit",
        "a task's own option wins; the pools threads and solo, which cannot end a task, refuse to start",
        ours="task_time_limit_s",
    ),
    works("task_store_errors_even_if_ignored"),
    works("task_track_started"),
    client("task_allow_error_cb_on_chord_header"),
)


# ---- how a worker runs -----------------------------------------------------------------------------
#
# Celery's settings of it.

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


WORKER_ROWS: tuple[Row, ...] = (
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


# ---- table -----------------------------------------------------------------------------------------
#
# A verdict for every setting of Celery 5.7 (`celery.app.defaults`), from the rows of `table/`.
#
# `configuration.py` maps by it, `umbel celery check` and a starting worker report by it, and the page
# docs/celery-settings.md is made from it. It imports nothing of Celery, so that the page can be made
# without.

TABLE: Mapping[str, Row] = {
    row.name: row
    for row in (*TASK_ROWS, *WORKER_ROWS, *connection_settings.BROKER_ROWS, *connection_settings.RESULT_ROWS)
}
