"""Verdicts: whether Umbel supports a feature of Celery.

This module lists the options of tasks and queues, and the signals; `settings_table.py` lists the settings.
It does not import Celery, so that the documentation can be generated without Celery.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

# ---- verdicts --------------------------------------------------------------------------------------
#
# What becomes of one thing that a Celery project uses when Umbel runs its worker.


class Verdict(StrEnum):
    """How Umbel supports a feature of Celery."""

    WORKS = "works"
    DIFFERS = "differs"
    NO_EFFECT = "no effect"
    NOT_SUPPORTED = "not supported"


@dataclass(frozen=True, slots=True)
class Judged:
    """A verdict with a note: how the feature works in Umbel, why it has no effect, or what to use instead.

    If `refused`, a worker does not start, because tasks would be lost or run incorrectly.
    """

    verdict: Verdict
    note: str = ""
    refused: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """A setting of Celery. `ours` is the corresponding setting of Umbel; `read` returns its value from the
    app.

    `judge` returns the verdict on values that differ from the setting's own verdict.
    """

    name: str
    judged: Judged
    ours: str = ""
    read: Callable[[Any], Any] | None = None
    judge: Callable[[Any], Judged | None] | None = None

    def value(self, app: Any) -> Any:
        """Return the value of `ours`; None for its default."""
        return app.conf[self.name] if self.read is None else self.read(app)

    def verdict_on(self, value: Any) -> Judged:
        """Return the verdict on this value of the setting."""
        return (self.judge(value) if self.judge else None) or self.judged


CLIENT = "read by clients, which go on using Celery"
LIBRARY = "Celery's own code reads it, in clients and child processes"


def works(
    name: str,
    note: str = "",
    *,
    ours: str = "",
    read: Callable[[Any], Any] | None = None,
    judge: Callable[[Any], Judged | None] | None = None,
) -> Row:
    """Return the row of a setting that works as in Celery, possibly as a setting of Umbel."""
    shown = "; ".join(part for part in (f"becomes `{ours}`" if ours else "", note) if part)
    return Row(name, Judged(Verdict.WORKS, shown or LIBRARY), ours, read, judge)


def client(name: str, more: str = "") -> Row:
    """Return the row of a setting that only clients read."""
    return Row(name, Judged(Verdict.WORKS, f"{CLIENT}; {more}" if more else CLIENT))


def differs(
    name: str, how: str, *, ours: str = "", read: Callable[[Any], Any] | None = None, judge: Any = None
) -> Row:
    """Return the row of a setting that works differently; `how` describes the difference."""
    shown = f"becomes `{ours}`; {how}" if ours else how
    return Row(name, Judged(Verdict.DIFFERS, shown), ours, read, judge)


def idle(name: str, why: str) -> Row:
    """Return the row of a setting without effect."""
    return Row(name, Judged(Verdict.NO_EFFECT, why))


def unsupported(name: str, remedy: str, *, refused: bool = True) -> Row:
    """Return the row of an unsupported setting; `remedy` describes what to do instead."""
    return Row(name, Judged(Verdict.NOT_SUPPORTED, remedy, refused))


def refusal(remedy: str) -> Judged:
    """Return the verdict on a feature with which a worker does not start."""
    return Judged(Verdict.NOT_SUPPORTED, remedy, refused=True)


def each(prefix: str, names: str, row: Callable[[str], Row]) -> Iterable[Row]:
    """Return a row for each name, with the prefix before the name."""
    return [row(f"{prefix}_{name}") for name in names.split()]


# ---- options ---------------------------------------------------------------------------------------
#
# What tasks and queues say for themselves, with the verdict on it.

_CHILD = Judged(Verdict.WORKS, "Celery's own code, in the child process")
_SEND = Judged(Verdict.WORKS, "Celery's own code, where the task is sent")

# Attributes of a task class, with the verdict for values other than Celery's default.
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

DIRECT_EXCHANGE = Judged(Verdict.WORKS)
EXCHANGE_KINDS: Mapping[str, Judged] = {
    "direct": DIRECT_EXCHANGE,
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


# ---- signals ---------------------------------------------------------------------------------------
#
# Which of Celery's are sent by a worker of Umbel's, and where.

_SENT_IN_CHILD = Judged(Verdict.WORKS, "sent in the child process, by Celery's own code")
_SENDER = Judged(
    Verdict.WORKS,
    "sent where a task is sent; for the next step of a chain, a callback or a retry in the child process, "
    "just before the worker sends it",
)
_SENT_IN_MAIN = Judged(
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
        _SENT_IN_CHILD,
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
        _SENT_IN_MAIN,
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
UNKNOWN_SIGNAL = Judged(Verdict.NOT_SUPPORTED, "a signal that this version of Umbel does not know")
