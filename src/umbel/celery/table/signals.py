"""Signals: which of Celery's are sent by a worker of Umbel's, and where."""

from collections.abc import Mapping

from umbel.celery.table.verdicts import Judged, Verdict

_CHILD = Judged(Verdict.WORKS, "sent in the child process, by Celery's own code")
_SENDER = Judged(
    Verdict.WORKS,
    "sent where a task is sent; for the next step of a chain, a callback or a retry in the child process, "
    "just before the worker sends it",
)
_MAIN = Judged(
    Verdict.WORKS,
    "sent in the main process, off its loop; of Celery's worker object there are app and hostname",
)
_NOT_SENT = Judged(
    Verdict.NOT_SUPPORTED,
    "not sent: move the work into another signal, such as worker_init or worker_process_init",
)
_EVENTLET = Judged(Verdict.NOT_SUPPORTED, "eventlet is not supported; use gevent")
_BEAT = Judged(Verdict.NOT_SUPPORTED, "there is no beat process to send it: use worker_ready")
_LOGGING = Judged(Verdict.WORKS, "sent in the main process and in each child process")

SIGNALS: Mapping[str, Judged] = {
    **dict.fromkeys(("before_task_publish", "after_task_publish", "task_sent"), _SENDER),
    **dict.fromkeys(
        (
            "task_prerun",
            "task_postrun",
            "task_success",
            "task_retry",
            "task_failure",
            "task_internal_error",
            "worker_process_init",
            "worker_process_shutdown",
        ),
        _CHILD,
    ),
    **dict.fromkeys(
        (
            "worker_ready",
            "worker_shutdown",
            "worker_shutting_down",
            "heartbeat_sent",
            "task_received",
            "task_revoked",
            "task_rejected",
            "task_unknown",
        ),
        _MAIN,
    ),
    "celeryd_init": Judged(
        Verdict.WORKS, "sent in the main process, and again in each later process that loads the app"
    ),
    "celeryd_after_setup": Judged(
        Verdict.WORKS, "sent in the main process: instance.app.amqp.queues.select_add() adds a queue"
    ),
    "worker_init": Judged(Verdict.WORKS, "sent in the process that forks the children, before it does"),
    "import_modules": Judged(Verdict.WORKS, "sent once in each process that loads the app"),
    **dict.fromkeys(("setup_logging", "after_setup_logger", "after_setup_task_logger"), _LOGGING),
    **dict.fromkeys(
        ("worker_before_create_process", "user_preload_options"),
        _NOT_SENT,
    ),
    **dict.fromkeys(("beat_init", "beat_embedded_init"), _BEAT),
    **dict.fromkeys(
        (
            "eventlet_pool_started",
            "eventlet_pool_preshutdown",
            "eventlet_pool_postshutdown",
            "eventlet_pool_apply",
        ),
        _EVENTLET,
    ),
}
UNKNOWN = Judged(Verdict.NOT_SUPPORTED, "a signal that this version of Umbel does not know")
