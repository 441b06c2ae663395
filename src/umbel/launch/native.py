"""NativeProject: what a worker asks of an `umbel.App`."""

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from time import time
from typing import Any

from umbel.app.app import App
from umbel.app.configuration.settings import Settings
from umbel.app.running.chord_parts import part_ended
from umbel.app.running.follow_ups import after_failure, steps_that_never_run
from umbel.app.running.request import Request, keeps_result, request_of
from umbel.app.sending.defaults import queue_of
from umbel.backends.interface import Backend
from umbel.backends.registry import open_backend
from umbel.brokers.interface import BrokerSettings
from umbel.control.panel import Panel
from umbel.errors import WireError
from umbel.protocol.delivery.delivery import TaskRules
from umbel.wire.message import Message, StoredResult
from umbel.wire.result import ExceptionMap, encode_failure, exception_map
from umbel.wire.task import TaskCall, decode_task, read_headers
from umbel.worker.settings import Ending, EndWithoutRunning, PeriodicTask
from umbel.worker.user_code.hook_queue import HookQueue
from umbel.worker.user_code.hooks import LifeHooks


class NativeProject:
    def __init__(self, app: App) -> None:
        self._app = app

    def begin(self, settings: Settings, node: str) -> Settings:
        return settings

    def logging(
        self, level: str, logfile: str | None, node: str, *, as_json: bool
    ) -> AbstractContextManager[None]:
        return nullcontext()  # the command has set it up

    def task_rules(self, settings: Settings) -> dict[str, TaskRules]:
        return task_rules(self._app, settings)

    def task_names(self) -> Collection[str]:
        return self._app.tasks

    def queue_of(self, task: str) -> str:
        return queue_of(self._app, task, self._app.all_tasks()[task].options)

    def for_broker(self, settings: Settings) -> BrokerSettings:
        return settings.for_broker()

    def open_backend(self, settings: Settings) -> Backend:
        return open_backend(settings.backend, settings.for_broker())

    def end_without_running(self) -> EndWithoutRunning:
        return Leftovers(self._app)

    def life_hooks(self, node: str, timeout_s: float) -> LifeHooks:
        signals = self._app.signals
        return LifeHooks(
            init=partial(signals.worker_init.send, node=node),
            ready=partial(signals.worker_ready.send, node=node),
            shutdown=partial(signals.worker_shutdown.send, node=node),
            timeout_s=timeout_s,
        )

    def control_commands(self) -> Panel:
        return self._app.panel

    def written_by_users(self, node: str) -> Mapping[str, Any]:
        app = self._app
        return {
            "app": app,
            "control_commands": self.control_commands(),
            "election_handlers": app.topics.handlers,
            "periodic": {one.name: PeriodicTask(one.entry, one.messages) for one in app.periodic_tasks},
            "steps": tuple(app.steps),
            "node_hooks": app.signals.of_nodes(),
        }


def task_rules(app: App, settings: Settings) -> dict[str, TaskRules]:
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
        )
        for name, task in app.all_tasks().items()
    }


class Leftovers:
    """What a task leaves behind that never ran to its end: revoked, lost, unknown, timed out."""

    def __init__(self, app: App) -> None:
        self._app = app
        # Errbacks that take the error itself are users' code: they run off the worker's loop, and one
        # that hangs does not keep the worker from ending.
        self._errbacks = HookQueue({"errback": lambda work: work()})

    def __call__(self, message: Message, queue: str, error: Exception, status: str) -> Ending:
        described = exception_map(error)
        done_at = time()
        headers = read_headers(message)
        results: list[StoredResult] = []
        known = self._app.tasks.get(headers.task)
        if keeps_result(headers, known.options if known else None, self._app.settings):
            results.append(encode_failure(headers.id, described, None, status=status, done_at=done_at))
        try:
            call = decode_task(message, accept=self._app.settings.accept_content)
        except WireError:
            return Ending(results)
        results += steps_that_never_run(call, described, "", status=status, done_at=done_at)
        request = request_of(call, hostname="", queue=queue)
        follow_ups = after_failure(self._app, call.embed.errbacks, request, error, "", run=self._run)
        if call.embed.chord is None and not call.embed.chain:
            return Ending(results, follow_ups)
        return Ending(results, follow_ups, before=lambda: self._count_part(call, request, status, described))

    def _count_part(self, call: TaskCall, request: Request, status: str, error: ExceptionMap) -> Ending:
        body = part_ended(self._app, call, request, status, error, run=self._run)
        return Ending(body.results, body.follow_ups)

    def _run(self, work: Callable[[], object]) -> None:
        self._errbacks.call("errback", work=work)
