"""CeleryHost: run the tasks of a Celery app in a child process, with Celery's tracer."""

import logging
import multiprocessing
import os
import traceback
from collections.abc import Callable
from functools import partial
from importlib import import_module
from time import perf_counter, time
from typing import Any

from celery import signals
from celery._state import _set_task_join_will_block
from celery.app.task import Context
from celery.app.trace import TraceInfo, build_tracer, setup_worker_optimizations
from celery.exceptions import Reject, SoftTimeLimitExceeded
from celery.states import RETRY
from kombu.serialization import prepare_accept_content

from umbel.celery import loading
from umbel.celery.configuration import settings_of
from umbel.celery.loading import LogSettings, WorkerStandIn, find_celery, load_for_children
from umbel.celery.messages import Capture, install, keeps_errors, request_of, signed_for
from umbel.celery.results import open_results
from umbel.celery.schedule import SCHEDULE_HEADER, warn_of_beat
from umbel.clock import correct
from umbel.errors import AppNotFound, TaskCancelled, WorkerStopping
from umbel.pools.guard import Raised, call_guarded, interruption_or
from umbel.pools.interface import ChildContext, Host, Job, Outcome, Runner
from umbel.text import leaving
from umbel.wire.show import cut

TEXT_MAX_CHARS = 64 * 1024
log = logging.getLogger("umbel.celery")


def load_host(target: str) -> Host:
    """Return the host for the Celery app `target`. Raise AppNotFound if there is none."""
    import_module(target.partition(":")[0])
    app = find_celery(target)
    if app is None:
        raise AppNotFound(f"-A {target}: it contains no Celery app")
    return CeleryHost(app)


class CeleryHost:
    """Implements `pools.interface.Host` for a `celery.Celery`."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._node = ""
        self._close: list[Callable[[], None]] = []

    @property
    def soft_limit_error(self) -> type[Exception]:
        """Celery's SoftTimeLimitExceeded, which tasks of the project may catch."""
        error: type[Exception] = SoftTimeLimitExceeded
        return error

    def before_children(self, node: str, *, forks: bool) -> None:
        """Load everything that children can share, so that its memory is needed only once."""
        app = self._app
        load_for_children(app, node)
        app.set_current()
        app.set_default()
        app.finalize()
        _set_task_join_will_block(True)  # a task must not wait for another's result
        # Here, in the process that forks, because Django then gives each child its own connections.
        signals.worker_init.send(sender=WorkerStandIn(app, node))
        install(app)
        ours = open_results(app, settings_of(app))
        if ours is not None:
            self._close.append(ours.close)
        setup_worker_optimizations(app, node)
        with loading.asked_for_successes():
            for name, task in app.tasks.items():
                task.__trace__ = build_tracer(name, task, app.loader, node, Info=_Info, app=app)

    def start_child(self, context: ChildContext) -> Runner:
        """Set up logging and the loader like Celery in a child, send worker_process_init, and return the
        runner.
        """
        self._node = context.node
        if context.is_process:
            multiprocessing.current_process().name = (
                f"ForkPoolWorker-{context.child + 1}"  # the name that Celery's logs show
            )
        loading.set_up(
            self._app,
            LogSettings(context.loglevel, context.logfile, context.log_json),
            context.node,
            child=context.child + 1,
            redirects=context.is_process,
        )
        self._app.loader.init_worker_process()
        signals.worker_process_init.send(sender=context.node)
        return _Runner(self._app, context.node)

    def stop_child(self) -> None:
        """Send worker_process_shutdown and close the result backend."""
        signals.worker_process_shutdown.send(sender=self._node, pid=os.getpid(), exitcode=0)
        for close in self._close:
            close()


class _Runner:
    """Runs one job at a time. Each error of a message or a task becomes an outcome."""

    def __init__(self, app: Any, node: str) -> None:
        self._app = app
        self._node = node
        self._accept = prepare_accept_content(app.conf.accept_content)
        self._tasks = app.tasks

    def __call__(self, job: Job) -> Outcome:
        correct(job.clock_offset_s)
        run = _Run(job)
        task = self._tasks.get(job.task)
        if task is None:
            return run.outcome("rejected", summary=f"task {job.task!r} is not registered in this process")
        opened = call_guarded(
            request_of,
            job.message,
            self._accept,
            queue=job.queue,
            hostname=self._node,
            redelivered=job.redelivered,
        )
        if isinstance(opened, Raised):
            error = opened.error
            return run.outcome(
                "rejected", summary=f"cannot read the message: {type(error).__name__}: {error}"
            )
        request = opened.value
        if "celery_beat_task" in request and SCHEDULE_HEADER not in request:
            warn_of_beat()
        args, kwargs = request["args"], request["kwargs"]
        sign = partial(signed_for, self._app, signs_for=job.signs_for, cause=job.task_id)
        with Capture(sign) as capture:
            try:
                traced = call_guarded(task.__trace__, job.task_id, args, kwargs, request)
                return self._ended(run, task, request, capture, traced)
            except _Interrupted as interrupted:
                kind = "cancelled" if isinstance(interrupted.error, TaskCancelled) else "requeued"
                return run.outcome(kind, summary=str(interrupted.error))

    def _ended(
        self, run: "_Run", task: Any, request: dict[str, Any], capture: Capture, traced: Any
    ) -> Outcome:
        if isinstance(traced, Raised):
            if isinstance(traced.error, Reject):  # from a hook, after the task's own end
                return self._rejected(run, task, request, capture, traced.error, None)
            if isinstance(traced.error, SystemExit):  # the process ends, as it does under Celery
                raise traced.error
            log.error(
                "task failed outside its own code (a signal handler, hook or result backend)",
                extra={"task": task.name},
                exc_info=traced.error,
            )
            text = "".join(traceback.format_exception(traced.error))
            return run.outcome("failure", capture, summary=repr(traced.error), traceback=text)
        retval, info, _, shown = traced.value
        if info is None:
            return run.outcome("success", capture, summary=shown or "")
        if isinstance(info.retval, Reject):
            return self._rejected(run, task, request, capture, info.retval, retval)
        kind = _KINDS[info.state]
        if kind == "ignored":
            return run.outcome(kind, capture)
        error = info.retval
        return run.outcome(
            kind,
            capture,
            summary=repr(getattr(error, "exc", None) or error),
            traceback=str(getattr(retval, "traceback", "")),
        )

    def _rejected(
        self, run: "_Run", task: Any, request: dict[str, Any], capture: Capture, error: Reject, einfo: Any
    ) -> Outcome:
        if error.requeue:
            # A message that was acknowledged when the task began cannot be requeued; Celery ignores that too.
            return run.outcome("requeued" if task.acks_late else "ignored", summary=str(error.reason))
        context = Context(request, called_directly=False)
        stored = keeps_errors(self._app, task, context)
        task.backend.mark_as_failure(context.id, error, request=context, store_result=stored)
        signals.task_failure.send(
            sender=task,
            task_id=context.id,
            exception=error,
            args=context.args,
            kwargs=context.kwargs,
            traceback=getattr(einfo, "traceback", None),
            einfo=einfo,
        )
        return run.outcome("rejected", capture, summary=str(error.reason))


class _Interrupted(BaseException):
    """Carries an interruption of a task through Celery's tracer, which does not handle it."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class _Info(TraceInfo):  # type: ignore[misc]
    """The end of a task. An interrupted task has not failed; the main process decides how to handle it."""

    __slots__ = ()

    def handle_error_state(self, *args: Any, **kwargs: Any) -> Any:
        led_to_it = self.retval.exc if self.state == RETRY else self.retval
        if isinstance(led_to_it, BaseException):
            error = interruption_or(led_to_it)
            if isinstance(error, TaskCancelled | WorkerStopping):
                raise _Interrupted(error)
        return super().handle_error_state(*args, **kwargs)


_KINDS: dict[str, Any] = {
    "RETRY": "retry",
    "FAILURE": "failure",
    "IGNORED": "ignored",
    "REJECTED": "rejected",
}


class _Run:
    __slots__ = ("_began", "_number", "_started_at")

    def __init__(self, job: Job) -> None:
        self._number = job.number
        self._started_at = time()
        self._began = perf_counter()

    def outcome(
        self, kind: Any, capture: Capture | None = None, *, summary: str = "", traceback: str = ""
    ) -> Outcome:
        return Outcome(
            self._number,
            kind,
            self._started_at,
            perf_counter() - self._began,
            list(capture.by_task.values()) if capture else (),
            capture.follow_ups if capture else (),
            cut(leaving(summary), TEXT_MAX_CHARS),
            cut(leaving(traceback), TEXT_MAX_CHARS),
            after=capture.after if capture else b"",
        )
