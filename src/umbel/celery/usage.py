"""Usage: list the features of Celery that a project uses, with a verdict on each.

A feature is used if it differs from Celery's default. Features that Celery and its fix-ups add are not
listed.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType

from celery import signals
from celery.app.defaults import DEFAULTS
from celery.app.task import Task
from celery.app.utils import filter_hidden_settings
from celery.utils.dispatch import Signal

from umbel.brokers.options import JudgedOption as Option
from umbel.brokers.options import Support, judge_options, judge_result_options
from umbel.celery import verdicts
from umbel.celery.connection_settings import COUNTING_ONLY, broker_url, schemes_of
from umbel.celery.settings_table import SCHEDULE, TABLE
from umbel.celery.verdicts import SIGNALS, UNKNOWN_SIGNAL, Judged, Verdict
from umbel.pools.guard import Raised, call_guarded
from umbel.text import without_password
from umbel.wire.show import cut, show_value

VALUE_CHARS_MAX = 60
NAMES_MAX = 3  # of the tasks that use an option
_CELERYS_OWN = ("celery.", "kombu.", "vine.", "django_celery_beat.", "django_celery_results.")
_VERDICTS = {
    Support.MAPPED: Verdict.WORKS,
    Support.NO_EFFECT: Verdict.NO_EFFECT,
    Support.UNSUPPORTED: Verdict.NOT_SUPPORTED,
}
_ORDINARY = {"acks_on_failure": True, "acks_on_timeout": True, "typing": True}  # of a bound task
_BY_ATTRIBUTE = ("broker_url", "result_backend")  # also read from the environment


@dataclass(frozen=True, slots=True)
class Finding:
    """A feature that the project uses, and the verdict on it."""

    group: str
    name: str
    value: str
    judged: Judged

    @property
    def is_unsupported(self) -> bool:
        """Whether Umbel does not support it."""
        return self.judged.verdict is Verdict.NOT_SUPPORTED


def findings(app: Any, *, all_settings: bool = False) -> list[Finding]:
    """Return the features that the loaded app uses, in the order of the report."""
    sources: tuple[Callable[[Any], Iterator[Finding]], ...] = (
        lambda app: _settings(app, all_settings=all_settings),
        _broker_options,
        _queues,
        _schedule,
        _tasks,
        _signals,
        _steps,
        _control_commands,
        _classes,
    )
    return [finding for source in sources for finding in source(app)]


def recommendations(app: Any) -> list[str]:
    """Return recommendations that make the project safer, the most important first."""
    found = []
    own = [task for name, task in app.tasks.items() if not name.startswith("celery.")]
    early = [task for task in own if not task.acks_late]
    if early:
        found.append(
            f"{len(early)} of {len(own)} tasks are acknowledged before they run: a worker that crashes loses "
            "them. Set task_acks_late = True and task_reject_on_worker_lost = True if they may run twice"
        )
    losing = [task for task in own if task.acks_late and not _comes_back(task)]
    if losing:
        found.append(
            f"{len(losing)} tasks are acknowledged late, but fail when their process dies: set "
            "task_reject_on_worker_lost = True to have them delivered again"
        )
    backend = next(iter(schemes_of(app.conf.result_backend)), "").partition("+")[0]
    if backend in COUNTING_ONLY:
        found.append(
            f"{backend} cannot count the parts of a chord safely: results in Redis can, "
            "result_backend = 'redis://…'"
        )
    return found


def _comes_back(task: Any) -> bool:
    return bool(task.reject_on_worker_lost or getattr(task, "retry_on_worker_lost", False))


def _settings(app: Any, *, all_settings: bool) -> Iterator[Finding]:
    for name, row in TABLE.items():
        value = setting(app, name)
        is_default = value == DEFAULTS[name]
        if all_settings or not is_default:
            judged = row.judged if is_default else row.verdict_on(value)
            yield Finding("settings", name, shown_setting(name, value), judged)


def setting(app: Any, name: str) -> Any:
    """Return the value of a setting, as Celery resolves it."""
    value = getattr(app.conf, name) if name in _BY_ATTRIBUTE else app.conf[name]
    if name == "broker_write_url" and value == (app.conf["broker_read_url"] or app.conf.broker_url):
        return None  # both addresses name one broker
    return value


def shown_setting(name: str, value: Any) -> str:
    """Return the value of a setting for display: shortened, without passwords and secrets."""
    if name.endswith("_url") or name == "result_backend":
        stated = [str(part) for part in value] if isinstance(value, list | tuple) else [str(value)]
        return "" if value is None else cut(";".join(map(without_password, stated)), VALUE_CHARS_MAX)
    hidden = call_guarded(filter_hidden_settings, {name: value})
    return "***" if isinstance(hidden, Raised) else show_value(hidden.value[name], VALUE_CHARS_MAX)


def _broker_options(app: Any) -> Iterator[Finding]:
    stated = app.conf.broker_transport_options or {}
    yield from _judged_options("broker transport options", stated, judge_options(broker_url(app), stated))
    stated = app.conf.result_backend_transport_options or {}
    yield from _judged_options("result backend options", stated, judge_result_options(stated))


def _judged_options(group: str, stated: Mapping[str, Any], judged: list[Option]) -> Iterator[Finding]:
    for option in judged:
        verdict = Judged(_VERDICTS[option.support], option.why, option.support is Support.UNSUPPORTED)
        yield Finding(group, option.name, shown_setting(option.name, stated[option.name]), verdict)


def _queues(app: Any) -> Iterator[Finding]:
    is_redis = any(
        scheme.startswith(("redis", "unix", "sentinel")) for scheme in schemes_of(setting(app, "broker_url"))
    )
    for name, queue in sorted(app.amqp.queues.items()):
        kind = getattr(queue.exchange, "type", "") or "direct"
        judged = verdicts.EXCHANGE_KINDS.get(kind, verdicts.UNKNOWN_KIND)
        if is_redis and kind in verdicts.REDIS_KINDS:
            judged = verdicts.REDIS_KINDS[kind]
        yield Finding("queues", name, _shown_queue(queue, kind), judged)


def _shown_queue(queue: Any, kind: str) -> str:
    exchange = getattr(queue.exchange, "name", "") or queue.name
    keys = ", ".join(
        sorted(
            {str(binding.routing_key) for binding in queue.bindings or ()} or {str(queue.routing_key or "")}
        )
    )
    arguments = "".join(f" {name}={value}" for name, value in sorted((queue.queue_arguments or {}).items()))
    return cut(f"{kind} {exchange}{f' ← {keys}' if keys else ''}{arguments}", VALUE_CHARS_MAX * 2)


def _schedule(app: Any) -> Iterator[Finding]:
    for name, entry in sorted((app.conf.beat_schedule or {}).items()):
        task = entry.get("task", "") if isinstance(entry, Mapping) else getattr(entry, "task", "")
        when = entry.get("schedule", "") if isinstance(entry, Mapping) else getattr(entry, "schedule", "")
        judged = SCHEDULE
        if task not in app.tasks:
            judged = Judged(Verdict.DIFFERS, f"no task is named {task}: its messages become dead letters")
        yield Finding("schedule", str(name), cut(f"{task} {when}", VALUE_CHARS_MAX), judged)


def _tasks(app: Any) -> Iterator[Finding]:
    users: dict[str, list[str]] = {}
    judged: dict[str, Judged] = {}
    for name, task in sorted(app.tasks.items()):
        if not name.startswith("celery."):
            for option, verdict in _used_by(task):
                users.setdefault(option, []).append(name)
                judged[option] = verdict
    for option in sorted(users):
        names = users[option]
        more = f" and {len(names) - NAMES_MAX} more" if len(names) > NAMES_MAX else ""
        yield Finding("tasks", option, ", ".join(names[:NAMES_MAX]) + more, judged[option])


def _used_by(task: Any) -> Iterator[tuple[str, Judged]]:
    for option, verdict in verdicts.TASK_OPTIONS.items():
        stated = getattr(task, option, None)
        ordinary = _ORDINARY.get(option, getattr(Task, option, None))
        if stated != ordinary and not _is_from_settings(task, option, stated):
            yield option, verdict
    for base in type(task).__mro__[1:]:
        if not f"{base.__module__}.".startswith(("celery.", "builtins.")):
            yield f"base class {base.__module__}.{base.__qualname__}", verdicts.BASE_CLASS
    if not isinstance(vars(type(task)).get("run"), staticmethod) and getattr(task, "_decorated", False):
        yield "bind", verdicts.BIND
    if getattr(task, "_dump_pydantic_arguments", None) is not None:
        yield "pydantic", verdicts.PYDANTIC
    if str(task.Strategy) != str(Task.Strategy):
        yield "Strategy", verdicts.STRATEGY
    if str(task.Request) != str(Task.Request):
        yield "Request", verdicts.REQUEST


def _is_from_settings(task: Any, option: str, stated: Any) -> bool:
    """Return whether the option comes from the app's settings, which are listed separately."""
    names = dict(task.from_config)
    return option in names and stated == task.app.conf[names[option]]


def _signals(_: Any) -> Iterator[Finding]:
    for name, signal in vars(signals).items():
        if not isinstance(signal, Signal):
            continue
        receivers = [_receiver(ref) for _, ref in signal.receivers or ()]
        own = sorted(receiver for receiver in receivers if receiver and not receiver.startswith(_CELERYS_OWN))
        if own:
            value = cut(", ".join(own), VALUE_CHARS_MAX * 2)
            yield Finding("signals", name, value, SIGNALS.get(name, UNKNOWN_SIGNAL))


def _receiver(ref: Any) -> str:
    """Return the full name of a handler; "" for a handler that was garbage-collected."""
    target = ref() if isinstance(ref, ReferenceType) else ref
    if target is None:
        return ""
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', repr(target))}"


def _steps(app: Any) -> Iterator[Finding]:
    for blueprint, steps in app.steps.items():
        for name in sorted(_name_of(step) for step in steps):
            yield Finding("bootsteps", name, f"of the {blueprint}", verdicts.BOOTSTEP)


def _name_of(step: Any) -> str:
    kind = step if isinstance(step, type) else type(step)
    return str(step) if isinstance(step, str) else f"{kind.__module__}.{kind.__name__}"


def _control_commands(_: Any) -> Iterator[Finding]:
    from umbel.celery.control import users_commands

    for command in users_commands():
        kind = "control" if command.changes else "inspect"
        yield Finding("control commands", command.name, kind, verdicts.CONTROL_COMMAND)


def _classes(app: Any) -> Iterator[Finding]:
    loader = type(app.loader)
    if not loader.__module__.startswith("celery.loaders."):
        yield Finding("classes", "loader", f"{loader.__module__}.{loader.__qualname__}", verdicts.LOADER)
    for program in ("worker", "preload"):
        if app.user_options.get(program):
            yield Finding("classes", f"user_options[{program!r}]", "", verdicts.WORKER_OPTIONS)
