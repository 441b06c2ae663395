"""CeleryProject: the interface of a worker to a Celery app (`launch.project.Project`), and the report at the
start.

A worker does not start if the project uses unsupported features that would lose tasks or run them
incorrectly. It logs all other differences.
"""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from celery import signals
from celery.utils.time import rate
from msgspec.structs import replace

from umbel.app.settings import Settings, override
from umbel.backends.interface import Backend
from umbel.brokers.interface import BrokerSettings
from umbel.celery import messages
from umbel.celery.configuration import broker_settings, consumed_names, select_queues, settings_of
from umbel.celery.control import celery_panel
from umbel.celery.loading import LogSettings, WorkerStandIn, in_main_process, load, note_task_modules
from umbel.celery.main_process import CeleryEndings, notice_hooks
from umbel.celery.results import ForeignBackend, mark_chords, open_results
from umbel.celery.schedule import CelerySchedule, has_schedule
from umbel.celery.usage import Finding, findings, recommendations
from umbel.celery.verdicts import Verdict
from umbel.control.panel import Panel
from umbel.errors import ConfigurationError
from umbel.pools.abilities import OPTIONS, lacks
from umbel.protocol.delivery.delivery import TaskRules
from umbel.worker.context import EndWithoutRunning
from umbel.worker.user_code import LifeHooks

# ---- report ----------------------------------------------------------------------------------------
#
# What a starting worker says of a Celery project: refuses what it cannot honour, and logs the rest.

log = logging.getLogger("umbel.celery")


def refuse_or_report(app: Any, settings: Settings) -> None:
    """Raise ConfigurationError for features with which a worker must not start, and log other differences.
    The app must be loaded, because its modules register bootsteps, tasks and signals.
    """
    found = [finding for finding in findings(app) if _concerns(finding, app, settings)]
    refused = [finding for finding in found if finding.judged.refused]
    if refused:
        problems = "; ".join(f"{_named(finding)}: {finding.judged.note}" for finding in refused)
        raise ConfigurationError(
            f"cannot run this Celery project. {problems}. `umbel celery check` lists all that it uses"
        )
    stated = [finding for finding in found if finding.group == "settings"]
    _log("Celery settings that work", stated, Verdict.WORKS)
    _log("Celery settings that differ", stated, Verdict.DIFFERS, with_notes=True)
    _log("Celery settings without effect", stated, Verdict.NO_EFFECT, with_notes=True)
    _log("not supported, and left out", found, Verdict.NOT_SUPPORTED, logging.WARNING, with_notes=True)
    for advice in recommendations(app)[:1]:
        log.info("recommendation: %s", advice)


def for_the_pool(app: Any, settings: Settings) -> Settings:
    """Reset settings about child processes if the pool has none, and log it. Celery ignores them too."""
    stated = settings_of(app)
    for name in ("worker_max_tasks_per_child", "worker_max_memory_per_child", "worker_child_start"):
        reason = lacks(settings.worker_pool, OPTIONS[name])
        if reason and getattr(settings, name) == getattr(stated, name) != getattr(Settings(), name):
            log.warning("%s has no effect in the pool %s: %s", name, settings.worker_pool, reason)
            settings = replace(settings, **{name: getattr(Settings(), name)})
    return settings


def _concerns(finding: Finding, app: Any, settings: Settings) -> bool:
    """Return whether a finding matters for this worker. Options of the command line have priority, so with
    -P or -Q other pools and queues do not matter.
    """
    if finding.group == "queues":
        return finding.name in settings.worker_queues
    return finding.name != "worker_pool" or settings.worker_pool == settings_of(app).worker_pool


def _log(
    what: str,
    found: Iterable[Finding],
    verdict: Verdict,
    level: int = logging.INFO,
    *,
    with_notes: bool = False,
) -> None:
    chosen: Sequence[Finding] = [finding for finding in found if finding.judged.verdict is verdict]
    if chosen:
        shown = [
            f"{_named(finding)} ({finding.judged.note})" if with_notes else _named(finding)
            for finding in chosen
        ]
        log.log(level, "%s: %s", what, "; ".join(shown) if with_notes else ", ".join(shown))


def _named(finding: Finding) -> str:
    return finding.name if finding.group == "settings" else f"{finding.group}: {finding.name}"


# ---- celery project --------------------------------------------------------------------------------
#
# What a worker asks of a Celery app (`launch.project.Project`).

SCHEDULE_LEASE = "celery-schedule"


class CeleryProject:
    """Implements `launch.project.Project` for a `celery.Celery`."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._ours: Backend | None = None  # for results that Umbel stores itself

    @property
    def app(self) -> Any:
        """The `celery.Celery`."""
        return self._app

    def begin(self, settings: Settings, node: str) -> Settings:
        """Load the app, select its queues, and refuse or report unsupported features."""
        app = load(self._app)
        select_queues(app, settings.worker_queues)
        worker = WorkerStandIn(app, node)
        signals.celeryd_after_setup.send(sender=node, instance=worker, conf=app.conf)
        settings = override(settings, worker_queues=consumed_names(app))
        refuse_or_report(app, settings)
        note_task_modules(app)
        return for_the_pool(app, settings)

    def logging(
        self, level: str, logfile: str | None, node: str, *, as_json: bool
    ) -> AbstractContextManager[None]:
        """Log like Celery's main process until the worker has ended."""
        load(self._app)  # handlers of the logging signals are in its modules
        return in_main_process(self._app, LogSettings(level, logfile, as_json), node)

    def task_rules(self, settings: Settings) -> dict[str, TaskRules]:
        """Return the rules of each task, from its options and the settings."""
        app = load(self._app)
        messages.install(app)
        return {name: _rules(task, settings) for name, task in app.tasks.items()}

    def task_names(self) -> Collection[str]:
        """Return the names of all tasks."""
        return list(load(self._app).tasks)

    def queue_of(self, task: str) -> str:
        """Return the queue that Celery's router selects for this task."""
        options = self._app.amqp.router.route({}, task, (), {}, self._app.tasks[task])
        queue = options.get("queue")
        return str(getattr(queue, "name", queue) or self._app.conf.task_default_queue)

    def for_broker(self, settings: Settings) -> BrokerSettings:
        """Return the settings of Umbel's broker, with the project's queues."""
        return broker_settings(self._app, settings)

    def open_backend(self, settings: Settings) -> Backend:
        """Return the backend in which the worker stores results; a ForeignBackend if Celery stores them."""
        self._ours = open_results(self._app, settings)
        return self._ours or ForeignBackend(self._app)

    def _after_settle(self, work: Sequence[bytes]) -> None:
        if self._ours is not None:
            mark_chords(self._ours, work)

    def end_without_running(self) -> EndWithoutRunning:
        """Return the handler for tasks that do not run to completion."""
        return CeleryEndings(self._app)

    def life_hooks(self, node: str, timeout_s: float) -> LifeHooks:
        """Return hooks that send worker_ready and worker_shutdown."""
        worker = WorkerStandIn(self._app, node)
        return LifeHooks(
            ready=partial(signals.worker_ready.send, sender=worker),
            shutdown=partial(signals.worker_shutdown.send, sender=worker),
            timeout_s=timeout_s,
        )

    def control_commands(self) -> Panel:
        """Return the project's control commands, and Celery's `conf` and `report`."""
        load(self._app)  # a command may call this without a worker
        return celery_panel()

    def written_by_users(self, node: str) -> Mapping[str, Any]:
        """Return the app's commands, signal hooks and schedule."""
        app = self._app
        scheduler = partial(CelerySchedule, app) if has_schedule(app) else None
        return {
            "app": app,
            "after_settle": self._after_settle,
            "control_commands": self.control_commands(),
            "children_log_endings": True,
            "notices": notice_hooks(app, node),
            "scheduler": scheduler,
            "scheduler_lease": SCHEDULE_LEASE,
        }


def _rules(task: Any, settings: Settings) -> TaskRules:
    """Return the rules of a task with the meaning that its options have in Celery. By default, a task whose
    child process is lost fails.
    """
    late = bool(task.acks_late)
    return TaskRules(
        acks_taken=not late,
        rate_per_second=_rate(task),
        soft_limit_s=task.soft_time_limit or settings.task_soft_time_limit_s,
        hard_limit_s=task.time_limit or settings.task_time_limit_s,
        redelivers_lost=bool(task.reject_on_worker_lost or task.retry_on_worker_lost),
        redelivers_timed_out=late and not task.acks_on_timeout,
        rejects_failed=late and not task.acks_on_failure,
        rejects_by_queue=True,
        keeps_failed=settings.failed_keep > 0 and getattr(task, "keep_failed", True) is not False,
    )


def _rate(task: Any) -> float:
    if task.app.conf.worker_disable_rate_limits or not task.rate_limit:
        return 0.0
    return float(rate(task.rate_limit))
