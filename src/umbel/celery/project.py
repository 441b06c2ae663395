"""CeleryProject: what a worker asks of a Celery app (`launch.project.Project`)."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from celery import signals
from celery.utils.time import rate

from umbel.app.configuration.settings import Settings, override
from umbel.backends.interface import Backend
from umbel.brokers.interface import BrokerSettings
from umbel.celery import capture
from umbel.celery.backend import ForeignBackend
from umbel.celery.control import celery_panel
from umbel.celery.endings import CeleryEndings
from umbel.celery.loading import load, note_task_modules
from umbel.celery.logs import LogSettings, in_main_process
from umbel.celery.main_signals import notice_hooks
from umbel.celery.queues import broker_settings, consumed_names, select_queues
from umbel.celery.report import for_the_pool, refuse_or_report
from umbel.celery.results import mark_chords, open_results
from umbel.celery.schedule import CelerySchedule, has_schedule
from umbel.celery.stand_in import WorkerStandIn
from umbel.control.panel import Panel
from umbel.protocol.delivery.delivery import TaskRules
from umbel.worker.settings import EndWithoutRunning
from umbel.worker.user_code.hooks import LifeHooks

SCHEDULE_LEASE = "celery-schedule"


class CeleryProject:
    def __init__(self, app: Any) -> None:
        self._app = app
        self._ours: Backend | None = None  # where results are that Umbel stores itself

    @property
    def app(self) -> Any:
        return self._app

    def begin(self, settings: Settings, node: str) -> Settings:
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
        load(self._app)  # its handlers of logging's signals are in its modules
        return in_main_process(self._app, LogSettings(level, logfile, as_json), node)

    def task_rules(self, settings: Settings) -> dict[str, TaskRules]:
        app = load(self._app)
        capture.install(app)
        return {name: _rules(task, settings) for name, task in app.tasks.items()}

    def task_names(self) -> Collection[str]:
        return list(load(self._app).tasks)

    def queue_of(self, task: str) -> str:
        options = self._app.amqp.router.route({}, task, (), {}, self._app.tasks[task])
        queue = options.get("queue")
        return str(getattr(queue, "name", queue) or self._app.conf.task_default_queue)

    def for_broker(self, settings: Settings) -> BrokerSettings:
        return broker_settings(self._app, settings)

    def open_backend(self, settings: Settings) -> Backend:
        self._ours = open_results(self._app, settings)
        return self._ours or ForeignBackend(self._app)

    def _after_settle(self, work: Sequence[bytes]) -> None:
        if self._ours is not None:
            mark_chords(self._ours, work)

    def end_without_running(self) -> EndWithoutRunning:
        return CeleryEndings(self._app)

    def life_hooks(self, node: str, timeout_s: float) -> LifeHooks:
        worker = WorkerStandIn(self._app, node)
        return LifeHooks(
            ready=partial(signals.worker_ready.send, sender=worker),
            shutdown=partial(signals.worker_shutdown.send, sender=worker),
            timeout_s=timeout_s,
        )

    def control_commands(self) -> Panel:
        load(self._app)  # a command line asks before any worker does
        return celery_panel()

    def written_by_users(self, node: str) -> Mapping[str, Any]:
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
    """As Celery's worker goes by the task's options; a lost child is a failure unless they say otherwise."""
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
