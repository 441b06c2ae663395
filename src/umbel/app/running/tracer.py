"""Tracer: runs one call of a task in a child and reports how it ended.

It decodes the message, calls the function with its request in place, and turns every ending (a value, an
exception, a retry, a rejection) into an `Outcome` with the encoded result. It raises nothing, whatever the
task or the message did. Arguments, exceptions and tracebacks are shown without secrets and within their size
limits.
"""

import contextlib
import logging
import os
from inspect import iscoroutine
from pathlib import Path
from time import monotonic, perf_counter, time
from traceback import StackSummary, TracebackException
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from umbel.app.request import (
    CURRENT_REQUEST,
    EventSender,
    Request,
    RequestScope,
    request_of,
    stores_result,
)
from umbel.app.running.awaiting import ThreadLoops, cancelled_from_within, cancelled_type
from umbel.app.running.child_logs import UNFINISHED, end_lines
from umbel.app.running.follow_ups import (
    NOTHING_FOLLOWS,
    UNCOUNTED,
    BodyOutcome,
    after_failure,
    after_success,
    part_ended,
    steps_that_never_run,
    time_left_s,
)
from umbel.app.running.retries import changed_attempt, next_attempt
from umbel.app.sending.signing import signed
from umbel.app.waiting import patiently
from umbel.chance import random
from umbel.clock import cluster_now, correct, offset_s
from umbel.errors import (
    BrokerError,
    BrokerUnavailable,
    Ignore,
    MaxRetriesExceeded,
    NotRegistered,
    Reject,
    Retry,
    TaskCancelled,
    TaskRejected,
    UmbelError,
    WireError,
    WorkerStopping,
    WrongType,
)
from umbel.pools.guard import Raised, Returned, call_guarded, interruption_or
from umbel.pools.interface import Job, Outcome
from umbel.protocol.delivery.sensitive import MASK, Secrets, Sensitive
from umbel.protocol.delivery.states import FAILURE, RETRY, STARTED, SUCCESS
from umbel.text import leaving
from umbel.wire.call import TaskCall, decode_task
from umbel.wire.message import Outgoing, StoredResult, broken_rule
from umbel.wire.result import ExceptionMap, encode_failure, encode_state, encode_success, exception_map
from umbel.wire.show import cut, show_args, show_kwargs, show_value
from umbel.wire.values import encode_json

if TYPE_CHECKING:
    from umbel.app.app import App
    from umbel.app.task import Task


# ---- what results and headers may show -------------------------------------------------------------

EXCEPTION_ARGS_MAX = 16  # each up to a megabyte; a result must fit its limit


def remove_secrets(call: TaskCall, hides: Sensitive) -> Secrets:
    """Remove the sensitive arguments from the headers, which further attempts reuse; return their values."""
    args, kwargs = hides.hide(call.args, call.kwargs)
    call.headers = replace(call.headers, argsrepr=show_args(args), kwargsrepr=show_kwargs(kwargs))
    return Secrets(hides.values(call.args, call.kwargs))


def described(error: BaseException, secrets: Secrets | None) -> ExceptionMap:
    """The exception as a result stores it, without secrets and with at most EXCEPTION_ARGS_MAX arguments."""
    found = exception_map(error)
    if len(found["exc_message"]) > EXCEPTION_ARGS_MAX:
        found["exc_message"] = [*found["exc_message"][:EXCEPTION_ARGS_MAX], "…"]
    if secrets:
        found["exc_message"] = secrets.strike_all(found["exc_message"])
    return found


# ---- tracebacks ------------------------------------------------------------------------------------
#
# The frames above those of the task say nothing to its author: frames of Umbel, and of the loop that awaits
# the task, are left out, also in the errors that caused the error. If a text is too long, its end is shown,
# because the error is there. Secrets are removed before anything is cut, so that no half of a secret remains.

CUT = "…"
CHAIN_MAX = 20
UNWRITTEN = "(its traceback cannot be written)\n"


def traceback_text(error: BaseException, *, max_bytes: int, secrets: Secrets | None = None) -> str:
    """The traceback as text of at most `max_bytes`, without frames of Umbel and without secrets."""
    written = call_guarded(_written, error)
    text = written.value if isinstance(written, Returned) else f"{type(error).__name__} {UNWRITTEN}"
    if secrets:
        text = secrets.strike(text)
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= max_bytes:
        return data.decode("utf-8")
    return CUT + data[len(CUT.encode()) - max_bytes :].decode("utf-8", "ignore")


def _written(error: BaseException) -> str:
    """The formatted traceback. It may raise anything, because it calls users' classes and their loaders."""
    found = TracebackException.from_exception(error)
    _without_ours(found, CHAIN_MAX)
    return "".join(found.format())


def _without_ours(found: TracebackException | None, left: int) -> None:
    """Drop the leading frames of Umbel from each error of the chain; the last frame always stays."""
    if found is None or not left:
        return
    frames = list(found.stack)
    while len(frames) > 1 and frames[0].filename.startswith(_OURS):
        del frames[0]
    found.stack = StackSummary.from_list(frames)
    _without_ours(found.__cause__, left - 1)
    _without_ours(found.__context__, left - 1)
    for inner in getattr(found, "exceptions", None) or ():
        _without_ours(inner, left - 1)


_LIBRARY = Path(contextlib.__file__).parent  # without importing asyncio, which few children need
_OURS = (
    f"{Path(__file__).parents[2]}/",
    f"{_LIBRARY}/asyncio/",
    f"{_LIBRARY}/concurrent/",
    contextlib.__file__,
    "<frozen ",
)


# ---- the tracer ------------------------------------------------------------------------------------

log = logging.getLogger("umbel.task")
EXCEPTION_MAX_CHARS = 8 * 1024
SUMMARY_MAX_CHARS = 256 * 1024
_RETURNED = {"success": SUCCESS, "failure": FAILURE}  # a task that is retried or requeued has not returned


class Tracer:
    """Runs jobs of tasks in a child, or where they are sent in eager mode."""

    def __init__(
        self, app: "App", *, hostname: str, is_eager: bool = False, send_event: EventSender | None = None
    ) -> None:
        self._app = app
        self._send_event = send_event
        self._hostname = hostname
        self._is_eager = is_eager
        self._loops = ThreadLoops()
        self._clock_offset_s = offset_s()
        self._signs_for = ""

    def __call__(self, job: Job) -> Outcome:
        run = self._open(job)
        if isinstance(run, Outcome):
            return run
        with RequestScope(run.request):
            if self._app.signals.task_prerun.receivers:
                self._send_prerun(run)
            if run.task.options.track_started:
                self._store_started(run.request)
            return self._ended(run, call_guarded(self._call, run))

    def close(self) -> None:
        """Close the event loops that its async tasks ran on."""
        self._loops.close()

    def _open(self, job: Job) -> "Run | Outcome":
        """The run of a job; or the outcome of a message that cannot be run."""
        if job.start_by and monotonic() > job.start_by:
            return Outcome(job.number, "late", time(), 0.0)
        if job.clock_offset_s != self._clock_offset_s and not self._is_eager:
            self._clock_offset_s = job.clock_offset_s
            correct(job.clock_offset_s)
        run = Run(self._app, job)
        try:
            call = run.call = decode_task(job.message, accept=self._app.settings.accept_content)
        except WireError as error:
            return run.refused(error)
        name = call.headers.task
        task = self._app.tasks.get(name) or self._app.find_task(name)
        if task is None:
            return run.refused(NotRegistered.named(name), call)
        request = request_of(
            call,
            hostname=self._hostname,
            queue=job.queue,
            redelivered=job.redelivered,
            is_eager=self._is_eager,
            signs_for=job.signs_for,
        )
        if self._is_eager:  # it inherits the trust of its sender
            outer = CURRENT_REQUEST.get()
            request.signs_for = None if outer is None else outer.signs_for
        elif job.signs_for and job.signs_for != self._signs_for:
            self._signs_for = job.signs_for  # for code outside of tasks
            self._app.signing_cluster.learn(job.signs_for)
        request.send_event, request.number, request.clock = self._send_event, job.number, job.lamport
        if task.options.hides is not None:
            request.secrets = remove_secrets(call, task.options.hides)
        run.task, run.request = task, request
        return run

    def _ended(self, run: "Run", happened: Returned[Any] | Raised) -> Outcome:
        request = run.request
        if request.reports is not None:
            request.reports.flush()
        if UNFINISHED:
            end_lines()
        if isinstance(happened, Raised):
            value, outcome = happened.error, run.raised(happened.error)
        else:
            value, outcome = happened.value, run.returned(happened.value)
        if (postrun := self._app.signals.task_postrun).receivers:
            postrun.send(
                task=run.task,
                task_id=request.id,
                args=run.call.args,
                kwargs=run.call.kwargs,
                state=outcome.kind,
                value=value,
            )
        if (hooks := run.task.hooks) is not None and (state := _RETURNED.get(outcome.kind)) is not None:
            hooks.call("after_return", request, state, value, error_info=(None,))
        if request.unsent:  # buffered while the broker was unavailable: published when the task is settled
            outcome = replace(outcome, follow_ups=[*request.unsent, *outcome.follow_ups])
        return outcome

    def _send_prerun(self, run: "Run") -> None:
        call = run.call
        self._app.signals.task_prerun.send(
            task=run.task, task_id=run.request.id, args=call.args, kwargs=call.kwargs
        )

    def _store_started(self, request: Request) -> None:
        """Store the state STARTED. For display only, so an unavailable backend does not stop the task."""
        try:
            state = encode_state(request.id, STARTED, {"pid": os.getpid(), "hostname": self._hostname})
            self._app.backend.store([replace(state, reply_to=request.reply_to)])
        except BrokerError as error:
            text = "cannot store state STARTED; the task runs anyway"
            log.warning(text, extra={"task_id": request.id, "why": str(error)})

    def _call(self, run: "Run") -> Any:
        run.begin()
        try:  # not cancelled_is_failed(): every task passes here, and a generator is not cheap
            value = run.task.entry(*run.call.args, **run.call.kwargs)
        except cancelled_type() as error:
            raise cancelled_from_within() from error
        # A decorated `async def` may look like a plain function that returns a coroutine.
        return self._loops.run(value) if iscoroutine(value) else value


class Run:
    """One run of a job: what is known of it, and the outcome that each ending has."""

    __slots__ = ("_app", "_began", "_job", "_started_at", "call", "request", "task")
    call: TaskCall
    request: Request
    task: "Task[Any, Any]"

    def __init__(self, app: "App", job: Job) -> None:
        self._app = app
        self._job = job
        self._started_at, self._began = time(), perf_counter()

    def begin(self) -> None:
        """Convert the arguments to the types of the function, and call `before_start`."""
        task, call, request = self.task, self.call, self.request
        if task.options.types is not None:
            call.args, call.kwargs = task.options.types.parse(call.args, call.kwargs)
            request.args, request.kwargs = call.args, call.kwargs
        if task.hooks is not None:
            task.hooks.before(request)

    def refused(self, error: UmbelError, call: TaskCall | None = None) -> Outcome:
        """The outcome of a message that no child can run: a failure, and a dead letter."""
        what, done_at = exception_map(error), time()
        results = [encode_failure(self._job.task_id, what, None, done_at=done_at)]
        if call is not None:
            results += steps_that_never_run(call, what, "", status=FAILURE, done_at=done_at)
        return self._outcome("rejected", results=results, summary=_fit(f"{type(error).__name__}: {error}"))

    def returned(self, value: Any) -> Outcome:
        """The outcome of a run that has returned this value."""
        built = call_guarded(self._success, value)
        if isinstance(built, Raised):
            if isinstance(error := interruption_or(built.error), BrokerUnavailable | WorkerStopping):
                return self._unfinished(error)
            return self._failed(error)  # a value that cannot be sent, an invalid callback
        if (success := self._app.signals.task_success).receivers:
            success.send(task=self.task, task_id=self.request.id, result=value)
        if self.task.hooks is not None:
            self.task.hooks.call("on_success", self.request, value)
        return built.value

    def _success(self, value: Any) -> Outcome:
        call, request = self.call, self.request
        summary = self._shown_value(value)
        if (types := self.task.options.types) is not None:
            value = types.lower_result(value)
        follow_ups: list[Outgoing] = []
        if call.embed.callbacks or call.embed.chain:
            follow_ups = after_success(self._app, call, request, value)
        body = self._part_ended(SUCCESS, value)
        results: tuple[StoredResult, ...] = ()
        if stores_result(call.headers, self.task.options, self._app.settings):
            results = (encode_success(request.id, value, done_at=time(), **self._about()),)
        return self._outcome(
            "success",
            results=[*results, *body.results],
            follow_ups=[*follow_ups, *body.follow_ups],
            summary=summary,
        )

    def raised(self, error: BaseException) -> Outcome:
        """The outcome of a run that has raised this error: a failure, a retry, a rejection, ..."""
        options, retries = self.task.options, self.request.retries
        error = interruption_or(error)
        if isinstance(error, TaskCancelled | WrongType):  # the same arguments would be refused again
            return self._failed(error)
        if isinstance(error, Retry):
            if broken_rule("eta", error.when):
                return self._failed(ValueError(f"Retry(when={error.when!r}): not a time"))
            if error.when is not None:  # self.retry() has checked the limit
                return self._retried(error, error.when)
            if options.retry.exhausted(retries):
                task = f"{self.task.name}[{self.request.id}]"
                spent = MaxRetriesExceeded(f"{task} failed after {retries} retries")
                spent.__cause__ = error
                return self._failed(error.exc or spent)
            return self._retried(error, cluster_now() + options.retry.wait_s(retries, random()))
        if isinstance(error, WorkerStopping):
            return self._outcome("requeued", summary="the worker is shutting down")
        if isinstance(error, Ignore):
            return self._outcome("ignored", follow_ups=error.follow_ups)
        if isinstance(error, Reject):
            return self._rejected(error)
        if (
            isinstance(error, options.autoretry_for)
            and not isinstance(error, options.dont_autoretry_for)
            and not options.autoretry.exhausted(retries)
        ):
            return self._retried_automatically(error)
        return self._failed(error)

    def _rejected(self, error: Reject) -> Outcome:
        secrets = self.request.secrets
        reason = secrets.strike(str(error.reason)) if secrets else str(error.reason)
        if error.requeue:
            return self._outcome("requeued", summary=_fit(reason))
        # TaskRejected, not Reject: a caller that waits for the result must see a failure.
        failure = TaskRejected(reason or "rejected by the task").with_traceback(error.__traceback__)
        outcome = self._failed(failure)
        if outcome.kind != "failure":
            return outcome
        return replace(outcome, kind="rejected", summary=leaving(reason))

    def _retried_automatically(self, error: BaseException) -> Outcome:
        options, request = self.task.options, self.request
        due = cluster_now() + options.autoretry.wait_s(request.retries, random())
        if not options.retry_options:
            return self._retried(error, due)
        built = call_guarded(changed_attempt, self._app, request, None, None, options.retry_options, due=due)
        if isinstance(built, Raised):
            return self._failed(built.error)
        return self._retried(Retry(exc=error, when=due, again=built.value), due)

    def _retried(self, error: BaseException, due: float) -> Outcome:
        call, request = self.call, self.request
        cause = error.exc or error if isinstance(error, Retry) else error
        follow_up = error.again if isinstance(error, Retry) else None
        if follow_up is None:
            follow_up = next_attempt(self._job.message, call, request, due=due, queue=self._job.queue)
            if (keyring := self._app.settings.keyring) is not None:
                follow_up = signed(self._app, keyring, follow_up, request)
        traceback = self._traceback(cause)
        if (retry := self._app.signals.task_retry).receivers:
            retry.send(task=self.task, task_id=request.id, error=cause, due=due)
        if self.task.hooks is not None:
            self.task.hooks.call_with_error("on_retry", request, cause, traceback)
        return self._outcome(
            "retry",
            results=self._error_results(described(cause, request.secrets), traceback, RETRY, None),
            follow_ups=[follow_up],
            summary=self._shown_error(cause),
            traceback=traceback,
            due=due,
        )

    def _failed(self, error: BaseException) -> Outcome:
        call, request = self.call, self.request
        if isinstance(error, TaskCancelled):  # the main process decides what happens to it
            return self._outcome("cancelled", summary=self._shown_error(error))
        traceback = self._traceback(error)
        done_at = time()
        follow_ups = after_failure(self._app, call.embed.errbacks, request, error, traceback)
        if (failure := self._app.signals.task_failure).receivers:
            shown = self._shown_arguments()
            failure.send(task=self.task, task_id=request.id, error=error, traceback=traceback, **shown)
        if self.task.hooks is not None:
            self.task.hooks.call_with_error("on_failure", request, error, traceback)
        what = described(error, request.secrets)
        results = self._error_results(what, traceback, FAILURE, done_at)
        results += steps_that_never_run(call, what, traceback, status=FAILURE, done_at=done_at)
        counted = call_guarded(self._part_ended, FAILURE, what)
        if not isinstance(counted, Raised):
            body = counted.value
        elif isinstance(why := interruption_or(counted.error), BrokerUnavailable | WorkerStopping):
            return self._unfinished(why)
        else:
            log.error(UNCOUNTED, extra={"task_id": request.id}, exc_info=counted.error)
            body = NOTHING_FOLLOWS
        return self._outcome(
            "failure",
            results=[*results, *body.results],
            follow_ups=[*follow_ups, *body.follow_ups],
            summary=self._shown_error(error),
            traceback=traceback,
            expected=isinstance(error, self.task.options.throws),
        )

    def _part_ended(self, status: str, value: object) -> BodyOutcome:
        """Count the task in its chord, waiting for an unavailable broker while its time limits allow."""
        call = self.call
        if call.embed.chord is None and (status == SUCCESS or not call.embed.chain):
            return NOTHING_FOLLOWS  # most tasks
        limits = (self._job.soft_limit_s, self._job.hard_limit_s)
        wait_s = time_left_s(limits, perf_counter() - self._began)
        return patiently(lambda: part_ended(self._app, call, self.request, status, value), wait_s)

    def _unfinished(self, error: BaseException) -> Outcome:
        """The task ran, but its follow-ups cannot be written now: the message is redelivered."""
        why = f"the task ended, but its follow-up messages could not be sent: {error}"
        return self._outcome("requeued", summary=_fit(why))

    def _error_results(
        self, error: ExceptionMap, traceback: str, status: str, done_at: float | None
    ) -> list[StoredResult]:
        """The result of a run that has failed or is retried, if its results are stored."""
        request = self.request
        if not stores_result(self.call.headers, self.task.options, self._app.settings):
            return []
        about = self._about()
        return [encode_failure(request.id, error, traceback, status=status, done_at=done_at, **about)]

    def _about(self) -> dict[str, Any]:
        request = self.request
        about: dict[str, Any] = {
            "children": request.children,
            "group_id": request.group,
            "parent_id": request.parent_id,
        }
        if self._app.settings.result_extended:
            about["extended"] = {
                "name": request.task,
                **self._shown_arguments(),
                "worker": request.hostname,
                "retries": request.retries,
                "queue": self._job.queue,
            }
        return about

    def _shown_arguments(self) -> dict[str, Any]:
        """The arguments without secrets; as text if results cannot hold their values."""
        args, kwargs = self.request.args, self.request.kwargs
        if (hides := self.task.options.hides) is not None:
            args, kwargs = hides.hide(args, kwargs, MASK)
        arguments = {"args": args, "kwargs": kwargs}
        try:
            encode_json(arguments)
        except WireError:
            return {"args": show_args(args), "kwargs": show_kwargs(kwargs)}
        return arguments

    def _traceback(self, error: BaseException) -> str:
        most = self._app.settings.task_traceback_max_bytes
        return traceback_text(error, max_bytes=most, secrets=self.request.secrets)

    def _shown_value(self, value: Any) -> str:
        text_max = min(self._app.settings.task_repr_max_chars, SUMMARY_MAX_CHARS)
        if not (secrets := self.request.secrets):
            return show_value(value, text_max)
        # Shown at length, so that no secret is cut in two before it is removed.
        return cut(secrets.strike(show_value(value, SUMMARY_MAX_CHARS)), text_max)

    def _shown_error(self, error: BaseException) -> str:
        shown = call_guarded(repr, error)
        text = f"<{type(error).__name__}>" if isinstance(shown, Raised) else shown.value
        if self.request.secrets:
            text = self.request.secrets.strike(text)
        return _fit(cut(text, max(self._app.settings.task_repr_max_chars, EXCEPTION_MAX_CHARS)))

    def _outcome(self, kind: Any, *, due: float = 0.0, **fields: Any) -> Outcome:
        return Outcome(
            number=self._job.number,
            kind=kind,
            started_at=self._started_at,
            runtime_s=perf_counter() - self._began,
            not_before=due,
            **fields,
        )


def _fit(text: str) -> str:
    """Text of users' code, cut to what a summary can hold."""
    return cut(leaving(text), SUMMARY_MAX_CHARS)
