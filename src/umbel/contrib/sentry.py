"""Sentry: reports failures of an app's tasks as events, and runs of its periodic tasks as check-ins.

    import sentry_sdk
    from umbel.contrib.sentry import instrument

    sentry_sdk.init(dsn=...)
    instrument(app)

The reports are made by handlers of the app's signals. Each run has a separate scope, with the task's name and
id as tags, so that nothing of one task shows in the event of another. In every event, log line and metric of
a run, the task's `sensitive` arguments and texts that look like secrets (`redaction.py`) are replaced. Values
are replaced everywhere, names only where users choose them. The names of Sentry's protocol and the fields
that its SDK fills stay: without them Sentry would drop the event or its exception. If every argument is
sensitive, an event contains only the kind of error and the task.

Limits: logs and metrics of a thread that the task started are not changed, because such a thread does not
know its task. A task whose process is killed, by its time limit or from outside, is not reported; it appears
in the worker's log, events and metrics.
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
from umbel.app.request import Request, current_request
from umbel.errors import ConfigurationError
from umbel.pools.guard import Raised, call_guarded
from umbel.protocol.delivery.redaction import is_secret, redact
from umbel.protocol.delivery.sensitive import DEPTH_MAX, MASK, Secrets
from umbel.protocol.leadership.schedule import Every

if TYPE_CHECKING:
    from sentry_sdk.types import Event, MonitorConfig


# ---- secrets ---------------------------------------------------------------------------------------

TASK, TASK_ID, NODE, ABOUT = "umbel.task", "umbel.task_id", "umbel.node", "umbel-task"
Fields = dict[str, Any]

_OURS = frozenset({TASK, TASK_ID, NODE, ABOUT})  # names that Umbel adds
_BY_SDK = frozenset({"event_id", "timestamp", "start_timestamp", "platform", "level", "type", "sdk"})
_BY_SETUP = frozenset({"release", "environment", "dist", "server_name", "transaction", "transaction_info"})
_OF_TRACE = frozenset({"trace_id", "span_id", "parent_span_id", "op", "origin", "status", "type"})
_OF_ERROR = frozenset({"type", "module", "mechanism"})
_OF_LOG = frozenset({"body", "name", "value"})
_WITH_USERS_NAMES = frozenset(
    {"extra", "tags", "contexts", "data", "params", "kwargs", "user", "headers", "cookies", "env", "vars"}
)


def struck_event(event: Fields, secrets: Secrets) -> Fields:
    """The event without sensitive arguments, and without local variables, whose shortened values may hide
    parts of a secret.
    """
    if secrets.is_everything:
        return _bare(event)
    for entry in (*_values(event, "exception"), *_values(event, "threads")) if secrets else ():
        for frame in (entry.get("stacktrace") or {}).get("frames") or ():
            frame.pop("vars", None)
    strike = _Striking(secrets)
    return {name: field if name in _BY_SDK else strike.field(name, field) for name, field in event.items()}


def struck_log(log: Fields, secrets: Secrets) -> Fields:
    """A log line or a metric without sensitive arguments."""
    strike = _Striking(secrets)
    found = {
        name if name.startswith("sentry.") else secrets.strike(name): strike.named(name, attribute)
        for name, attribute in (log.get("attributes") or {}).items()
    }
    return log | {name: strike.leaf(log[name]) for name in _OF_LOG & log.keys()} | {"attributes": found}


class _Striking:
    """Replaces secrets in the fields of events, logs and metrics."""

    def __init__(self, secrets: Secrets) -> None:
        self._secrets = secrets

    def field(self, name: str, value: Any) -> Any:
        """A field of an event."""
        struck = self.value(value, names=name in _WITH_USERS_NAMES)
        if name == "contexts" and isinstance(trace := (value or {}).get("trace"), dict):
            struck["trace"] = self.value(trace, names=False) | _of_trace(trace)
        return struck

    def value(self, value: Any, *, names: bool, depth: int = 0) -> Any:
        """A value without secrets. `names`: users choose the names in this mapping and in those below."""
        if depth > DEPTH_MAX:
            return MASK
        if isinstance(value, list | tuple):
            return [self.value(item, names=names, depth=depth + 1) for item in value]
        if not isinstance(value, dict):
            return self.leaf(value)
        return {
            (self.leaf(name) if names and name not in _OURS else name): self._below(name, item, names, depth)
            for name, item in value.items()
        }

    def leaf(self, value: Any) -> Any:
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return self._clean(value)
        for form in (str, repr):  # the SDK would send either
            shown = call_guarded(form, value)
            if isinstance(shown, Raised) or self._clean(shown.value) != shown.value:
                return MASK
        return value

    def _clean(self, text: str) -> str:
        return redact(self._secrets.strike(text))

    def named(self, name: str, value: Any) -> Any:
        """A value under a name that users choose; replaced if the name looks like that of a secret."""
        is_logged = name.startswith("sentry.")
        return MASK if value and not is_logged and is_secret(name) else self.value(value, names=True)

    def _below(self, name: str, value: Any, names: bool, depth: int) -> Any:
        if name == ABOUT and isinstance(value, dict):
            about = {key: value[key] for key in ("task", "id") if key in value}
            return self.value(value, names=False, depth=depth + 1) | about
        if name in _OURS:
            return value
        if names and value and is_secret(str(name)):
            return MASK
        return self.value(value, names=names or name in _WITH_USERS_NAMES, depth=depth + 1)


def _bare(event: Fields) -> Fields:
    bare = {name: field for name, field in event.items() if name in _BY_SDK | _BY_SETUP}
    bare["tags"] = {name: field for name, field in (event.get("tags") or {}).items() if name in _OURS}
    if errors := _values(event, "exception"):
        kinds = [
            {name: field[name] for name in _OF_ERROR & field.keys()} | {"value": MASK} for field in errors
        ]
        bare["exception"] = {"values": kinds}
    else:
        bare["message"] = MASK
    if about := (event.get("extra") or {}).get(ABOUT):
        bare["extra"] = {ABOUT: {name: about[name] for name in ("task", "id") if name in about}}
    if trace := (event.get("contexts") or {}).get("trace"):
        bare["contexts"] = {"trace": _of_trace(trace)}
    return bare


def _values(event: Fields, name: str) -> list[Fields]:
    return list((event.get(name) or {}).get("values") or ())


def _of_trace(trace: Fields) -> Fields:
    return {name: field for name, field in trace.items() if name in _OF_TRACE}


# ---- reports ---------------------------------------------------------------------------------------

try:
    import sentry_sdk
    from sentry_sdk.crons import MonitorStatus, capture_checkin
    from sentry_sdk.utils import event_from_exception
except ImportError as missing:
    raise ConfigurationError("umbel.contrib.sentry needs Sentry's SDK: pip install sentry-sdk") from missing


FLUSH_S = 3.0
SLUG_MAX_CHARS = 50
MINUTE_US = 60_000_000
STATUS = {
    "success": MonitorStatus.OK,
    "ignored": MonitorStatus.OK,
    "failure": MonitorStatus.ERROR,
    "rejected": MonitorStatus.ERROR,
    "cancelled": MonitorStatus.ERROR,
}  # after a retry or a requeue the slot's run has not ended

HOOKS = ("before_send_log", "before_send_metric")
NOTHING = Secrets(())  # texts that look like secrets are still replaced


@dataclass(frozen=True, slots=True)
class _Run:
    block: ExitStack
    secrets: tuple[Secrets, ...]  # of this run and of the runs around it
    around: "_Run | None"  # of the task that called this one in this process


_RUN: ContextVar[_Run | None] = ContextVar("umbel_sentry_run", default=None)


def instrument(app: App, *, arguments: bool = True, check_ins: bool = True) -> None:
    """Report failures of `app`'s tasks and runs of its periodic tasks to Sentry; further calls do nothing.

    With `arguments`, events contain the arguments of the task that failed, except the sensitive ones.
    """
    signals = app.signals
    if any(
        isinstance(getattr(receiver, "__self__", None), _Reports)
        for receiver in signals.task_failure.receivers
    ):
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
        secrets = NOTHING if request.secrets is None else request.secrets
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
        entry = next((periodic for periodic in self._app.periodic_tasks if periodic.name == name), None)
        config = _config(entry) if entry is not None else None
        # The same id for all attempts, which together are the run of one slot.
        check_in_id = uuid5(NAMESPACE_OID, request.id).hex
        capture_checkin(_slug(name), check_in_id, status, monitor_config=config)


def _request() -> Request:
    request = current_request()
    assert request is not None, "a task runs with its request in place"
    return request


def _without(event: "Event", secrets: Secrets) -> "Event":
    return cast("Event", struck_event(cast("dict[str, Any]", event), secrets))


def _strike_logs() -> None:
    """Hook into the current client, because processors of a scope do not see logs and metrics."""
    client = sentry_sdk.get_client()
    for name in HOOKS if client.is_active() else ():
        theirs = client.options.get(name) or (client.options.get("_experiments") or {}).get(name)
        if not isinstance(theirs, _Hook):
            client.options[name] = _Hook(theirs)


@dataclass(frozen=True, slots=True)
class _Hook:
    """Removes secrets from logs and metrics, before the user's hook."""

    theirs: Callable[[Any, Any], Any] | None

    def __call__(self, item: Any, hint: Any) -> Any:
        run = _RUN.get()
        for secrets in () if run is None else run.secrets or (NOTHING,):
            item = struck_log(item, secrets)
        return item if self.theirs is None else self.theirs(item, hint)


def _slug(name: str) -> str:
    """The name in the form that Sentry accepts for monitors."""
    return re.sub(r"[^a-z0-9_-]+", "-", name.lower()).strip("-")[:SLUG_MAX_CHARS]


def _config(entry: Periodic) -> "MonitorConfig | None":
    """The configuration with which Sentry creates the monitor; None if intervals are not whole minutes."""
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
    """Send the buffered reports before the process ends."""
    sentry_sdk.flush(timeout=FLUSH_S)
