"""What tasks and queues say for themselves, with the verdict on it."""

from collections.abc import Mapping

from umbel.celery.table.verdicts import Judged, Verdict, refusal

_CHILD = Judged(Verdict.WORKS, "Celery's own code, in the child process")
_SEND = Judged(Verdict.WORKS, "Celery's own code, where the task is sent")

# Attributes of a task class, and what becomes of them where they are not at Celery's default.
TASK_OPTIONS: Mapping[str, Judged] = {
    "acks_late": Judged(Verdict.WORKS, "acknowledged after the task"),
    "acks_on_failure_or_timeout": Judged(Verdict.WORKS),
    "acks_on_failure": Judged(Verdict.WORKS),
    "acks_on_timeout": Judged(Verdict.WORKS),
    "reject_on_worker_lost": Judged(Verdict.WORKS, "delivered again when its process dies"),
    "retry_on_worker_lost": Judged(Verdict.WORKS, "delivered again when its process dies"),
    "rate_limit": Judged(Verdict.WORKS, "per worker, as in Celery"),
    "time_limit": Judged(
        Verdict.WORKS,
        "kept by the main process; the pools threads and solo, which cannot end a task, refuse it",
    ),
    "soft_time_limit": Judged(Verdict.WORKS, "raises celery.exceptions.SoftTimeLimitExceeded"),
    "max_retries": _CHILD,
    "default_retry_delay": _CHILD,
    "autoretry_for": _CHILD,
    "throws": _CHILD,
    "ignore_result": _CHILD,
    "store_errors_even_if_ignored": _CHILD,
    "track_started": _CHILD,
    "trail": _CHILD,
    "serializer": _SEND,
    "priority": _SEND,
    "expires": _SEND,
    "typing": _SEND,
    "queue": _SEND,
    "routing_key": _SEND,
    "exchange": _SEND,
    "send_events": Judged(Verdict.DIFFERS, "events of all tasks are sent, or of none (-E)"),
    "resultrepr_maxsize": Judged(Verdict.DIFFERS, "results are shown up to `task_repr_max_chars`"),
}
BASE_CLASS = Judged(Verdict.WORKS, "its hooks run in the child process, as ever")
BIND = Judged(Verdict.WORKS, "self.request is Celery's own")
PYDANTIC = Judged(Verdict.WORKS, "arguments and results are checked in the child process")
STRATEGY = refusal("a Strategy of your own runs inside Celery's consumer, which is not here: remove it")
REQUEST = refusal("a Request class of your own runs inside Celery's worker, which is not here: remove it")

DIRECT = Judged(Verdict.WORKS)
EXCHANGE_KINDS: Mapping[str, Judged] = {
    "direct": DIRECT,
    "topic": Judged(Verdict.WORKS, "bound with its patterns"),
    "fanout": Judged(Verdict.WORKS, "every queue of the exchange gets each message"),
    "headers": Judged(Verdict.WORKS, "as RabbitMQ routes them"),
}
REDIS_KINDS: Mapping[str, Judged] = {
    "fanout": refusal(
        "on Redis such messages are sent to whoever listens, and the worker reads lists: use RabbitMQ for "
        "this queue, or a direct queue for each receiver"
    ),
    "headers": refusal("Redis has no headers exchange: use a direct or topic exchange"),
}
UNKNOWN_KIND = refusal("exchanges of this type are not supported: use direct, topic, fanout or headers")

BOOTSTEP = refusal(
    "bootsteps are part of Celery's worker, which is not here: write a control command, a signal handler, or "
    "run it as a program of its own"
)
CONTROL_COMMAND = Judged(
    Verdict.WORKS, "answers `celery inspect/control` and `umbel inspect/control`; state.consumer is not there"
)
LOADER = refusal("loaders of your own are not supported: configure the app with app.config_from_object()")
WORKER_OPTIONS = Judged(
    Verdict.NOT_SUPPORTED, "`umbel worker` does not know options that the app adds: use variables or settings"
)
