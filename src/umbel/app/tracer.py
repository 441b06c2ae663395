"""Tracer: runs one call of a task and says how it ended. What a child does all day.

It decodes the message, calls the function with its request in place, turns every ending (a
value, an exception, a retry, a refusal) into an `Outcome` with the result map already encoded,
and never raises because of what a task or a message did.
"""

import asyncio
import contextvars
import logging
import traceback as tracebacks
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from random import random
from time import perf_counter, time
from typing import TYPE_CHECKING, Any

from umbel.app.follow_ups import after_failure, after_success, next_attempt, steps_that_never_run
from umbel.app.request import Request, request_of, running
from umbel.errors import Ignore, NotRegistered, Reject, Retry, UmbelError, WireError
from umbel.pools.guard import Raised, call_guarded
from umbel.pools.interface import Job, Outcome
from umbel.protocol.states import FAILURE, RETRY
from umbel.wire.message import StoredResult
from umbel.wire.result import encode_failure, encode_state, encode_success, exception_map
from umbel.wire.task import TaskCall, decode_task, show_value

if TYPE_CHECKING:
    from umbel.app.app import App
    from umbel.app.task import Task

log = logging.getLogger("umbel.task")
TRACEBACK_MAX_CHARS = 64 * 1024


class Tracer:
    def __init__(self, app: "App", *, hostname: str, is_eager: bool = False) -> None:
        self._app = app
        self._hostname = hostname
        self._is_eager = is_eager
        self._async_runner: asyncio.Runner | None = None

    def __call__(self, job: Job) -> Outcome:
        run = _Run(self._app, job)
        try:
            call = decode_task(job.message, accept=self._app.settings.accept_content)
        except WireError as error:
            return run.refused(job.task_id, error)
        task = self._app.tasks.get(call.headers.task)
        if task is None:
            return run.refused(job.task_id, NotRegistered.named(call.headers.task))
        request = request_of(
            call,
            hostname=self._hostname,
            queue=job.queue,
            redelivered=job.redelivered,
            is_eager=self._is_eager,
        )
        return self._traced(run, task, call, request)

    def close(self) -> None:
        if self._async_runner is not None:
            self._async_runner.close()
            self._async_runner = None

    def _traced(self, run: "_Run", task: "Task[Any, Any]", call: TaskCall, request: Request) -> Outcome:
        signals = self._app.signals
        with running(request):
            if signals.task_prerun:
                signals.task_prerun.send(task=task, task_id=request.id, args=call.args, kwargs=call.kwargs)
            if task.options.track_started:
                meta = {"hostname": self._hostname}
                self._app.backend.store([encode_state(request.id, "STARTED", meta)])
            happened = call_guarded(self._call, task, call)
            if isinstance(happened, Raised):
                outcome = run.raised(task, call, request, happened.error)
            else:
                outcome = run.returned(task, call, request, happened.value)
            if signals.task_postrun:
                value = happened.error if isinstance(happened, Raised) else happened.value
                signals.task_postrun.send(
                    task=task,
                    task_id=request.id,
                    args=call.args,
                    kwargs=call.kwargs,
                    state=outcome.kind,
                    value=value,
                )
        return outcome

    def _call(self, task: "Task[Any, Any]", call: TaskCall) -> Any:
        args = (task, *call.args) if task.options.bind else call.args
        value = task.run(*args, **call.kwargs)
        return self._awaited(value) if task.is_async else value

    def _awaited(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Await on a loop that lasts as long as the child, so that async clients can be kept."""
        context = contextvars.copy_context()
        if _loop_runs_here():  # eager mode inside async code: this thread's loop is taken
            with ThreadPoolExecutor(1) as thread:
                return thread.submit(context.run, asyncio.run, coroutine).result()
        if self._async_runner is None:
            self._async_runner = asyncio.Runner()
        return self._async_runner.run(coroutine, context=context)


class _Run:
    """One run of one job: measures it and builds the outcome."""

    __slots__ = ("_app", "_began", "_job", "_started_at")

    def __init__(self, app: "App", job: Job) -> None:
        self._app = app
        self._job = job
        self._started_at = time()
        self._began = perf_counter()

    def refused(self, task_id: str, error: UmbelError) -> Outcome:
        """A message that no child can run: reported, and kept among the dead letters."""
        result = encode_failure(task_id, exception_map(error), None, done_at=time())
        return self._outcome("rejected", results=(result,), summary=f"{type(error).__name__}: {error}")

    def returned(self, task: "Task[Any, Any]", call: TaskCall, request: Request, value: Any) -> Outcome:
        built = call_guarded(self._success, task, call, request, value)
        if isinstance(built, Raised):  # a value that cannot be sent, or a broken callback
            return self.failed(task, call, request, built.error)
        if self._app.signals.task_success:
            self._app.signals.task_success.send(task=task, task_id=request.id, result=value)
        return built.value

    def _success(self, task: "Task[Any, Any]", call: TaskCall, request: Request, value: Any) -> Outcome:
        follow_ups = after_success(self._app, call, request, value)
        results: tuple[StoredResult, ...] = ()
        if self._keeps_result(task, call):
            results = (encode_success(request.id, value, done_at=time(), **self._about(task, request)),)
        return self._outcome("success", results=results, follow_ups=follow_ups, summary=show_value(value))

    def raised(
        self, task: "Task[Any, Any]", call: TaskCall, request: Request, error: BaseException
    ) -> Outcome:
        policy = task.options.retry
        if isinstance(error, Retry):
            return self._retried(task, call, request, error)
        if isinstance(error, Ignore):
            return self._outcome("ignored")
        if isinstance(error, Reject):
            return self._outcome("requeued" if error.requeue else "rejected", summary=error.reason)
        if isinstance(error, task.options.autoretry_for) and not policy.exhausted(request.retries):
            due = time() + policy.wait_s(request.retries, random())
            again = Retry(repr(error), exc=error, when=due)
            again.__traceback__ = error.__traceback__
            return self._retried(task, call, request, again)
        return self.failed(task, call, request, error)

    def _retried(self, task: "Task[Any, Any]", call: TaskCall, request: Request, retry: Retry) -> Outcome:
        cause = retry.exc or retry
        due = time() if retry.when is None else retry.when
        follow_up = next_attempt(self._job.message, call, request, due=due, queue=self._job.queue)
        text = _traceback_text(cause)
        if self._app.signals.task_retry:
            self._app.signals.task_retry.send(task=task, task_id=request.id, error=cause, due=due)
        results: tuple[StoredResult, ...] = ()
        if self._keeps_result(task, call):
            about = self._about(task, request)
            failure = encode_failure(
                request.id, exception_map(cause), text, status=RETRY, done_at=None, **about
            )
            results = (failure,)
        return self._outcome(
            "retry", results=results, follow_ups=[follow_up], summary=repr(cause), traceback=text, due=due
        )

    def failed(
        self, task: "Task[Any, Any]", call: TaskCall, request: Request, error: BaseException
    ) -> Outcome:
        text = _traceback_text(error)
        described = exception_map(error)
        done_at = time()
        follow_ups = call_guarded(after_failure, self._app, call, request, error, text)
        if isinstance(follow_ups, Raised):
            log.error("an errback cannot be sent", extra={"task_id": request.id}, exc_info=follow_ups.error)
        if self._app.signals.task_failure:
            self._app.signals.task_failure.send(task=task, task_id=request.id, error=error, traceback=text)
        results: list[StoredResult] = []
        if self._keeps_result(task, call):
            about = self._about(task, request)
            results.append(encode_failure(request.id, described, text, done_at=done_at, **about))
        results += steps_that_never_run(call, described, text, status=FAILURE, done_at=done_at)
        return self._outcome(
            "failure",
            results=results,
            follow_ups=[] if isinstance(follow_ups, Raised) else follow_ups.value,
            summary=_safe_repr(error),
            traceback=text,
        )

    def _keeps_result(self, task: "Task[Any, Any]", call: TaskCall) -> bool:
        ignored = call.headers.ignore_result
        if ignored is None:
            ignored = task.options.ignore_result
        return not (self._app.settings.task_ignore_result if ignored is None else ignored)

    def _about(self, task: "Task[Any, Any]", request: Request) -> dict[str, Any]:
        about: dict[str, Any] = {
            "children": request.children,
            "group_id": request.group,
            "parent_id": request.parent_id,
        }
        if self._app.settings.result_extended:
            about["extended"] = {
                "name": task.name,
                "args": request.args,
                "kwargs": request.kwargs,
                "worker": request.hostname,
                "retries": request.retries,
                "queue": self._job.queue,
            }
        return about

    def _outcome(self, kind: Any, *, due: float = 0.0, **fields: Any) -> Outcome:
        return Outcome(
            number=self._job.number,
            kind=kind,
            started_at=self._started_at,
            runtime_s=perf_counter() - self._began,
            not_before=due,
            **fields,
        )


def _traceback_text(error: BaseException) -> str:
    """The traceback from the task's own frame on: ours above it say nothing to a user."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None and _is_ours(frames.tb_frame.f_globals):
        frames = frames.tb_next
    text = "".join(tracebacks.format_exception(type(error), error, frames))
    return text if len(text) <= TRACEBACK_MAX_CHARS else "…" + text[-TRACEBACK_MAX_CHARS:]


def _is_ours(names: dict[str, Any]) -> bool:
    return str(names.get("__name__", "")).startswith("umbel.")


def _safe_repr(error: BaseException) -> str:
    shown = call_guarded(repr, error)
    return f"<{type(error).__name__}>" if isinstance(shown, Raised) else shown.value


def _loop_runs_here() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
