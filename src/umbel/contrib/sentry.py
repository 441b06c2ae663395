"""Sentry: failures of an app's tasks as events, runs of its periodic tasks as check-ins.

    import sentry_sdk
    from umbel.contrib.sentry import instrument

    sentry_sdk.init(dsn=...)
    instrument(app)

It hangs on the app's signals. Each run has a scope of its own, with the task's name and id as tags, so that
nothing of one task shows in the event of another. Every event, log line and metric of a run, whoever made
it, is rid of the task's `sensitive` arguments (`sentry_secrets.py`).

Logs and metrics of a thread that the task started itself are not: such a thread does not know its task.

It stops being right where no process is left to tell: a task whose process is killed, by its time limit or
from outside, is known to the worker's log, events and metrics alone.
"""

import re
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast
from uuid import NAMESPACE_OID, uuid5

from umbel.app.app import App
from umbel.app.cluster.periodic import PERIODIC_HEADER, Cron, Periodic
from umbel.app.running.request import Request, current_request
from umbel.contrib.sentry_secrets import ABOUT, NODE, TASK, TASK_ID, struck_event, struck_log
from umbel.errors import ConfigurationError
from umbel.protocol.delivery.sensitive import Secrets
from umbel.protocol.leadership.schedule import Every

try:
    import sentry_sdk
    from sentry_sdk.crons import MonitorStatus, capture_checkin
    from sentry_sdk.utils import event_from_exception
except ImportError as missing:
    raise ConfigurationError("umbel.contrib.sentry needs Sentry's SDK: pip install sentry-sdk") from missing

if TYPE_CHECKING:
    from sentry_sdk.types import Event, MonitorConfig

FLUSH_S = 3.0
SLUG_MAX_CHARS = 50
MINUTE_US = 60_000_000
STATUS = {
    "success": MonitorStatus.OK,
    "ignored": MonitorStatus.OK,
    "failure": MonitorStatus.ERROR,
    "rejected": MonitorStatus.ERROR,
    "cancelled": MonitorStatus.ERROR,
}  # a retry, or a return to the queue, is no end

HOOKS = ("before_send_log", "before_send_metric")


@dataclass(frozen=True, slots=True)
class _Run:
    block: ExitStack
    secrets: tuple[Secrets, ...]  # also of the runs around it
    around: "_Run | None"  # of the task that called this one in this process


_RUN: ContextVar[_Run | None] = ContextVar("umbel_sentry_run", default=None)


def instrument(app: App, *, arguments: bool = True, check_ins: bool = True) -> None:
    """Tell Sentry of failures of `app`'s tasks, and of the runs of its periodic ones; once is enough.

    `arguments`: also those of the task that failed, but for the sensitive ones.
    """
    signals = app.signals
    if any(isinstance(getattr(one, "__self__", None), _Reports) for one in signals.task_failure.receivers):
        return
    reports = _Reports(app, arguments, check_ins)
    signals.task_prerun.connect(reports.begin)
    signals.task_failure.connect(reports.failed)
    signals.task_postrun.connect(reports.end)
    signals.worker_process_shutdown.connect(_flush)
    signals.worker_shutdown.connect(_flush)


class _Reports:
    def __init__(self, app: App, arguments: bool, check_ins: bool) -> None:
        self._app = app
        self._arguments = arguments
        self._check_ins = check_ins

    def begin(self, task: Any, task_id: str, **_: Any) -> None:
        request = _request()
        block = ExitStack()
        scope = block.enter_context(sentry_sdk.isolation_scope())
        around = _RUN.get() if request.is_eager else None
        own = () if request.secrets is None else (request.secrets,)
        _RUN.set(_Run(block, (*around.secrets, *own) if around else own, around))
        scope.set_transaction_name(task.name, source="task")
        scope.set_tag(TASK, task.name)
        scope.set_tag(TASK_ID, task_id)
        scope.set_tag(NODE, request.hostname)
        if request.secrets is not None:
            secrets = request.secrets
            scope.add_event_processor(lambda event, _hint: _without(event, secrets))
            _strike_logs()
        if request.retries == 0:
            self._check_in(request, MonitorStatus.IN_PROGRESS)

    def failed(self, task: Any, task_id: str, args: Any, kwargs: Any, error: BaseException, **_: Any) -> None:
        if isinstance(error, task.options.throws):
            return
        options = sentry_sdk.get_client().options
        how = {"type": "umbel", "handled": False}
        event, hint = event_from_exception(error, client_options=options, mechanism=how)
        given = {"args": args, "kwargs": kwargs} if self._arguments else {}
        event["extra"] = {ABOUT: {"task": task.name, "id": task_id, **given}}
        sentry_sdk.capture_event(event, hint=hint)

    def end(self, state: str, **_: Any) -> None:
        if (status := STATUS.get(state)) is not None:
            self._check_in(_request(), status)
        if (run := _RUN.get()) is not None:
            _RUN.set(run.around)
            run.block.close()

    def _check_in(self, request: Request, status: str) -> None:
        name = request.headers.get(PERIODIC_HEADER)
        if not self._check_ins or not isinstance(name, str):
            return
        entry = next((one for one in self._app.periodic_tasks if one.name == name), None)
        config = _config(entry) if entry is not None else None
        # The same for all attempts: together they are the run of one slot.
        check_in_id = uuid5(NAMESPACE_OID, request.id).hex
        capture_checkin(_slug(name), check_in_id, status, monitor_config=config)


def _request() -> Request:
    request = current_request()
    assert request is not None, "a task runs with its request in place"
    return request


def _without(event: "Event", secrets: Secrets) -> "Event":
    return cast("Event", struck_event(cast("dict[str, Any]", event), secrets))


def _strike_logs() -> None:
    """Logs and metrics pass no scope's processors, only the client's: whichever is in place now."""
    client = sentry_sdk.get_client()
    for name in HOOKS if client.is_active() else ():
        theirs = client.options.get(name) or (client.options.get("_experiments") or {}).get(name)
        if not isinstance(theirs, _Hook):
            client.options[name] = _Hook(theirs)


@dataclass(frozen=True, slots=True)
class _Hook:
    """Before what the user has there: it sees no secret either."""

    theirs: Callable[[Any, Any], Any] | None

    def __call__(self, told: Any, hint: Any) -> Any:
        run = _RUN.get()
        for secrets in run.secrets if run is not None else ():
            told = struck_log(told, secrets)
        return told if self.theirs is None else self.theirs(told, hint)


def _slug(name: str) -> str:
    """As Sentry's monitors may be named."""
    return re.sub(r"[^a-z0-9_-]+", "-", name.lower()).strip("-")[:SLUG_MAX_CHARS]


def _config(entry: Periodic) -> "MonitorConfig | None":
    """So that Sentry makes the monitor; it knows no slots that are not whole minutes apart."""
    rule = entry.entry.rule
    if isinstance(rule, Cron):
        return {
            "schedule": {"type": "crontab", "value": rule.expression},
            "timezone": str(rule.zone),
        }
    if isinstance(rule, Every) and rule.interval_us % MINUTE_US == 0:
        return {"schedule": {"type": "interval", "value": rule.interval_us // MINUTE_US, "unit": "minute"}}
    return None


def _flush(**_: Any) -> None:
    """A process that ends would lose what waits to be sent."""
    sentry_sdk.flush(timeout=FLUSH_S)
