"""How tasks are sent, kept and run: Celery's settings of tasks, of the schedule, and of no section."""

from typing import Any

from umbel.celery.table.verdicts import (
    Judged,
    Row,
    Verdict,
    client,
    differs,
    idle,
    works,
)

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


ROWS: tuple[Row, ...] = (
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
