"""Project: what a worker asks of the app it runs, whichever library that app was written with.

NativeProject answers for an `umbel.App`; CeleryProject (`celery/project.py`) for a Celery app.
"""

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from time import time
from typing import Any, Protocol

from umbel.app.app import App
from umbel.app.request import Request, RequestScope, request_of, stores_result
from umbel.app.running.follow_ups import after_failure, part_ended, steps_that_never_run
from umbel.app.sending.preparation import queue_of
from umbel.app.settings import Settings
from umbel.backends.interface import Backend
from umbel.backends.registry import open_backend
from umbel.brokers.interface import BrokerSettings
from umbel.control.panel import Panel
from umbel.errors import WireError
from umbel.protocol.delivery.delivery import TaskRules
from umbel.protocol.delivery.trust import UNSIGNED
from umbel.wire.call import TaskCall, decode_task, read_headers
from umbel.wire.message import Message, StoredResult
from umbel.wire.result import ExceptionMap, encode_failure, exception_map
from umbel.worker.context import Ending, EndWithoutRunning, PeriodicTask
from umbel.worker.user_code import HookQueue, LifeHooks

# ---- project ---------------------------------------------------------------------------------------


class Project(Protocol):
    """What a worker asks of its app, an `umbel.App` or a `celery.Celery`."""

    def begin(self, settings: Settings, node: str) -> Settings:
        """Load the app, refuse what a worker cannot honour, and return the settings of the worker.

        It is called before all other methods.
        """
        ...

    def logging(
        self, level: str, logfile: str | None, node: str, *, as_json: bool
    ) -> AbstractContextManager[None]:
        """Log the way the app wants, in the main process, until the worker has ended."""
        ...

    def task_rules(self, settings: Settings) -> dict[str, TaskRules]:
        """Return what the main process must know of each task; `settings` include the command's flags."""
        ...

    def task_names(self) -> Collection[str]:
        """Return the names of all tasks."""

    def queue_of(self, task: str) -> str:
        """Return the queue for calls of the task that name none."""
        ...

    def for_broker(self, settings: Settings) -> BrokerSettings:
        """Return the settings with which the broker is opened."""

    def open_backend(self, settings: Settings) -> Backend:
        """Open the result backend."""

    def end_without_running(self) -> EndWithoutRunning:
        """Return the function that is called for tasks that do not run to their end."""

    def life_hooks(self, node: str, timeout_s: float) -> LifeHooks:
        """Return users' hooks at the start, when ready, and at shutdown; each has `timeout_s`."""

    def control_commands(self) -> Panel:
        """Return the control commands that users have written."""

    def written_by_users(self, node: str) -> Mapping[str, Any]:
        """Return users' control commands, election handlers, periodic tasks, steps and hooks of nodes."""
        ...


# ---- native project --------------------------------------------------------------------------------


class NativeProject:
    """Implements Project for an `umbel.App`."""

    def __init__(self, app: App) -> None:
        self._app = app

    def begin(self, settings: Settings, node: str) -> Settings:
        """Return the settings unchanged: the app is loaded already."""
        return settings

    def logging(
        self, level: str, logfile: str | None, node: str, *, as_json: bool
    ) -> AbstractContextManager[None]:
        """Do nothing: the command has set up the log."""
        return nullcontext()

    def task_rules(self, settings: Settings) -> dict[str, TaskRules]:
        """Return the rules of each task, from its options and the settings."""
        return task_rules(self._app, settings)

    def task_names(self) -> Collection[str]:
        """Return the names of all tasks."""
        return self._app.tasks

    def queue_of(self, task: str) -> str:
        """Return the queue for calls of the task that name none."""
        return queue_of(self._app, task, self._app.all_tasks()[task].options)

    def for_broker(self, settings: Settings) -> BrokerSettings:
        """Return the broker settings of the app."""
        return settings.for_broker()

    def open_backend(self, settings: Settings) -> Backend:
        """Open the backend that the settings name."""
        return open_backend(settings.backend, settings.for_broker())

    def end_without_running(self) -> EndWithoutRunning:
        """Return the function that is called for tasks that do not run to their end."""
        return NativeEndings(self._app)

    def life_hooks(self, node: str, timeout_s: float) -> LifeHooks:
        """Return hooks that send the app's signals worker_init, worker_ready and worker_shutdown."""
        signals = self._app.signals
        return LifeHooks(
            init=partial(signals.worker_init.send, node=node),
            ready=partial(signals.worker_ready.send, node=node),
            shutdown=partial(signals.worker_shutdown.send, node=node),
            timeout_s=timeout_s,
        )

    def control_commands(self) -> Panel:
        """Return the commands that the app has registered."""
        return self._app.panel

    def written_by_users(self, node: str) -> Mapping[str, Any]:
        """Return the app's commands, election handlers, periodic tasks, steps and hooks."""
        app = self._app
        return {
            "app": app,
            "control_commands": self.control_commands(),
            "election_handlers": app.topics.handlers,
            "periodic": {task.name: PeriodicTask(task.entry, task.messages) for task in app.periodic_tasks},
            "steps": tuple(app.steps),
            "node_hooks": app.signals.of_nodes(),
        }


def task_rules(app: App, settings: Settings) -> dict[str, TaskRules]:
    """Return the rules of each task; raises if a task's argument types cannot be resolved."""
    late = settings.task_acks_late
    for task in app.all_tasks().values():
        if task.options.types is not None:
            task.options.types.require()
    return {
        name: TaskRules(
            acks_early=(not late) if task.options.acks_early is None else task.options.acks_early,
            rate_per_second=task.options.rate_per_second,
            limit=task.options.cluster_limit,
            hides=task.options.hides,
            soft_limit_s=task.options.soft_time_limit_s or settings.task_soft_time_limit_s,
            hard_limit_s=task.options.time_limit_s or settings.task_time_limit_s,
            is_async=task.is_async,
            keeps_failed=settings.failed_keep > 0 and task.options.keep_failed,
        )
        for name, task in app.all_tasks().items()
    }


class NativeEndings:
    """Returns what to store and send for a task that did not run to its end: revoked, lost, timed out."""

    def __init__(self, app: App) -> None:
        self._app = app
        # Errbacks that take the error itself are users' code: they run off the worker's loop, and an
        # errback that hangs does not keep the worker from ending.
        self._errbacks = HookQueue({"errback": lambda work: work()})

    def __call__(
        self, message: Message, queue: str, error: Exception, status: str, *, signs_for: str | None = UNSIGNED
    ) -> Ending:
        described = exception_map(error)
        done_at = time()
        headers = read_headers(message)
        results: list[StoredResult] = []
        known = self._app.tasks.get(headers.task)
        if stores_result(headers, known.options if known else None, self._app.settings):
            results.append(encode_failure(headers.id, described, None, status=status, done_at=done_at))
        try:
            call = decode_task(message, accept=self._app.settings.accept_content)
        except WireError:
            return Ending(results)
        results += steps_that_never_run(call, described, "", status=status, done_at=done_at)
        request = request_of(call, hostname="", queue=queue, signs_for=signs_for)
        run = partial(self._run, request)
        follow_ups = after_failure(self._app, call.embed.errbacks, request, error, "", run=run)
        if call.embed.chord is None and not call.embed.chain:
            return Ending(results, follow_ups)
        return Ending(results, follow_ups, before=lambda: self._count_part(call, request, status, described))

    def _count_part(self, call: TaskCall, request: Request, status: str, error: ExceptionMap) -> Ending:
        body = part_ended(self._app, call, request, status, error, run=partial(self._run, request))
        return Ending(body.results, body.follow_ups)

    def _run(self, request: Request, work: Callable[[], object]) -> None:
        def run() -> None:
            if request.signs_for != UNSIGNED:
                work()
                return
            # What an errback sends is caused by this message.
            with RequestScope(Request(id=request.id, signs_for=UNSIGNED)):
                work()

        self._errbacks.call("errback", work=run)
