"""Tracer: runs one call of a task in a child and reports how it ended.

It decodes the message, calls the function with its request in place, turns every ending (a value, an
exception, a retry, a rejection) into an `Outcome` with the result map already encoded, and never raises
because of what a task or a message did. Arguments, exceptions and tracebacks are shown without secrets, and
within their size limits.
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
    Request,
    RequestScope,
    Teller,
    keeps_result,
    parse_arguments,
    request_of,
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


# ---- showing ---------------------------------------------------------------------------------------
#
# The arguments and the error of a call as results and headers may show them, without sensitive values.

EXCEPTION_ARGS_MAX = 16  # each up to a megabyte; a result must fit its limit


def shown_arguments(request: Request, hides: Sensitive | None) -> dict[str, Any]:
    """The arguments unchanged, or as text if results cannot hold their values."""
    args, kwargs = request.args, request.kwargs
    if hides is not None:
        args, kwargs = hides.hide(args, kwargs, MASK)
    given = {"args": args, "kwargs": kwargs}
    try:
        encode_json(given)
    except WireError:
        return {"args": show_args(args), "kwargs": show_kwargs(kwargs)}
    return given


def hidden(call: TaskCall, hides: Sensitive) -> Secrets:
    """The sensitive values of a call; removes them from the headers, which further attempts reuse."""
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
# How a task failed, as text that is short enough to store and send.
#
# The frames above a task's own tell its author nothing: ours, and those of the loop that awaits it, are
# left out, also in the errors that caused it. Of a text that is too long the end is shown, because the
# error is there. Secrets are struck out before anything is cut, so that no half of one remains.

CUT = "…"
CHAIN_MAX = 20
UNWRITTEN = "(its traceback cannot be written)\n"


def traceback_text(error: BaseException, *, max_bytes: int, secrets: Secrets | None = None) -> str:
    """The traceback as text of at most `max_bytes`, without our frames and without secrets."""
    written = call_guarded(_written, error)
    text = written.value if isinstance(written, Returned) else f"{type(error).__name__} {UNWRITTEN}"
    if secrets:
        text = secrets.strike(text)
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= max_bytes:
        return data.decode("utf-8")
    return CUT + data[len(CUT.encode()) - max_bytes :].decode("utf-8", "ignore")


def _written(error: BaseException) -> str:
    """The formatted traceback. May raise anything: it calls users' classes, and reads source from their
    loaders.
    """
    found = TracebackException.from_exception(error)
    _without_ours(found, CHAIN_MAX)
    return "".join(found.format())


def _without_ours(found: TracebackException | None, left: int) -> None:
    """Drop the leading frames that are ours from each error of the chain; the last frame always stays."""
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


# ---- tracer ----------------------------------------------------------------------------------------
#
# Runs one call of a task in a child and reports how it ended.
#
# It decodes the message, calls the function with its request in place, turns every ending (a value, an
# exception, a retry, a rejection) into an `Outcome` with the result map already encoded, and never raises
# because of what a task or a message did.

log = logging.getLogger("umbel.task")
EXCEPTION_MAX_CHARS = 8 * 1024
_RETURNED = {"success": SUCCESS, "failure": FAILURE}  # a task that is retried or requeued has not returned
STRUCK_MAX_CHARS = 256 * 1024


class Tracer:
    """Runs jobs of tasks in a child, or where they are sent in eager mode."""

    def __init__(
        self, app: "App", *, hostname: str, is_eager: bool = False, tell: Teller | None = None
    ) -> None:
        self._app = app
        self._tell = tell
        self._hostname = hostname
        self._is_eager = is_eager
        self._loop = ThreadLoops()
        self._clock_offset_s = offset_s()
        self._signs_for = ""

    def __call__(self, job: Job) -> Outcome:
        opened = self._open(job)
        if isinstance(opened, Outcome):
            return opened
        _, task, call, request = opened
        with RequestScope(request):
            if self._app.signals.task_prerun.receivers:
                self._tell_prerun(task, call, request)
            if task.options.track_started:
                self._tell_started(request)
            return self._ended(opened, call_guarded(self._call, task, call, request))

    def close(self) -> None:
        """Close the event loops that its async tasks ran on."""
        self._loop.close()

    def _open(self, job: Job) -> "_Opened | Outcome":
        """The call and what is known about it; or the outcome of a message that cannot be run."""
        if job.start_by and monotonic() > job.start_by:
            return Outcome(job.number, "late", time(), 0.0)
        if job.clock_offset_s != self._clock_offset_s and not self._is_eager:
            self._clock_offset_s = job.clock_offset_s
            correct(job.clock_offset_s)
        run = _Run(self._app, job)
        try:
            call = decode_task(job.message, accept=self._app.settings.accept_content)
        except WireError as error:
            return run.refused(job.task_id, error)
        name = call.headers.task
        task = self._app.tasks.get(name) or self._app.find_task(name)
        if task is None:
            return run.refused(job.task_id, NotRegistered.named(name), call)
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
        request.tell, request.number, request.clock = self._tell, job.number, job.lamport
        if task.options.hides is not None:
            run.hides = task.options.hides
            request.secrets = run.secrets = hidden(call, task.options.hides)
        return run, task, call, request

    def _ended(self, opened: "_Opened", happened: Returned[Any] | Raised) -> Outcome:
        run, task, call, request = opened
        if request.reports is not None:
            request.reports.flush()
        if UNFINISHED:
            end_lines()
        if isinstance(happened, Raised):
            outcome = run.raised(task, call, request, happened.error)
        else:
            outcome = run.returned(task, call, request, happened.value)
        signals = self._app.signals
        if signals.task_postrun.receivers:
            signals.task_postrun.send(
                task=task,
                task_id=request.id,
                args=call.args,
                kwargs=call.kwargs,
                state=outcome.kind,
                value=happened.error if isinstance(happened, Raised) else happened.value,
            )
        if task.hooks is not None:
            value = happened.error if isinstance(happened, Raised) else happened.value
            if (state := _RETURNED.get(outcome.kind)) is not None:
                task.hooks.call("after_return", request, state, value, error_info=(None,))
        return outcome if not request.unsent else _with_unsent(outcome, request.unsent)

    def _tell_prerun(self, task: "Task[Any, Any]", call: TaskCall, request: Request) -> None:
        self._app.signals.task_prerun.send(task=task, task_id=request.id, args=call.args, kwargs=call.kwargs)

    def _tell_started(self, request: Request) -> None:
        """Store the state STARTED. For display only, so an unavailable backend does not stop the task."""
        try:
            state = encode_state(request.id, STARTED, {"pid": os.getpid(), "hostname": self._hostname})
            self._app.backend.store([replace(state, reply_to=request.reply_to)])
        except BrokerError as error:
            text = "cannot store state STARTED; the task runs anyway"
            log.warning(text, extra={"task_id": request.id, "why": str(error)})

    def _call(self, task: "Task[Any, Any]", call: TaskCall, request: Request) -> Any:
        if task.options.types is not None:
            parse_arguments(task.options.types, call, request)
        if task.hooks is not None:
            task.hooks.before(request)
        try:  # not cancelled_is_failed(): every task passes here, and a generator is not cheap
            value = task.entry(*call.args, **call.kwargs)
        except cancelled_type() as error:
            raise cancelled_from_within() from error
        # A decorated `async def` may look like a plain function that returns a coroutine.
        return self._loop.run(value) if iscoroutine(value) else value


class _Run:
    """One run of one job: measures it and builds the outcome."""

    __slots__ = ("_app", "_began", "_job", "_started_at", "hides", "secrets")

    def __init__(self, app: "App", job: Job) -> None:
        self._app = app
        self._job = job
        self.hides: Sensitive | None = None
        self.secrets: Secrets | None = None
        self._started_at, self._began = time(), perf_counter()

    def refused(self, task_id: str, error: UmbelError, call: TaskCall | None = None) -> Outcome:
        """A message that no child can run: reported, and put among the dead letters."""
        what, done_at = exception_map(error), time()
        results = [encode_failure(task_id, what, None, done_at=done_at)]
        if call is not None:
            results += steps_that_never_run(call, what, "", status=FAILURE, done_at=done_at)
        return self._outcome("rejected", results=results, summary=_fit(f"{type(error).__name__}: {error}"))

    def returned(self, task: "Task[Any, Any]", call: TaskCall, request: Request, value: Any) -> Outcome:
        built = call_guarded(self._success, task, call, request, value)
        if isinstance(built, Raised):
            if isinstance(error := interruption_or(built.error), BrokerUnavailable | WorkerStopping):
                return self._unfinished(error)
            return self.failed(task, call, request, error)  # an unsendable value, a broken callback
        if self._app.signals.task_success.receivers:
            self._app.signals.task_success.send(task=task, task_id=request.id, result=value)
        if task.hooks is not None:
            task.hooks.call("on_success", request, value)
        return built.value

    def _success(self, task: "Task[Any, Any]", call: TaskCall, request: Request, value: Any) -> Outcome:
        shown = self._show(value)
        if task.options.types is not None:
            value = task.options.types.lower_result(value)
        follow_ups: list[Outgoing] = []
        if call.embed.callbacks or call.embed.chain:
            follow_ups = after_success(self._app, call, request, value)
        body = self._part_ended(call, request, SUCCESS, value)
        results: tuple[StoredResult, ...] = ()
        if keeps_result(call.headers, task.options, self._app.settings):
            results = (encode_success(request.id, value, done_at=time(), **self._about(request)),)
        return self._outcome(
            "success",
            results=[*results, *body.results],
            follow_ups=[*follow_ups, *body.follow_ups],
            summary=shown,
        )

    def raised(
        self, task: "Task[Any, Any]", call: TaskCall, request: Request, error: BaseException
    ) -> Outcome:
        policy, error = task.options.retry, interruption_or(error)
        if isinstance(error, TaskCancelled | WrongType):  # the same arguments would be refused again
            return self.failed(task, call, request, error)
        if isinstance(error, Retry):
            if broken_rule("eta", error.when):
                return self.failed(task, call, request, ValueError(f"Retry(when={error.when!r}): not a time"))
            if error.when is not None:  # self.retry() has checked the limit
                return self._retried(task, call, request, error, error.when)
            if policy.exhausted(request.retries):
                text = f"{task.name}[{request.id}] failed after {request.retries} retries"
                spent = MaxRetriesExceeded(text)
                spent.__cause__ = error
                return self.failed(task, call, request, error.exc or spent)
            due = cluster_now() + policy.wait_s(request.retries, random())
            return self._retried(task, call, request, error, due)
        if isinstance(error, WorkerStopping):
            return self._outcome("requeued", summary="the worker is shutting down")
        if isinstance(error, Ignore):
            return self._outcome("ignored", follow_ups=error.follow_ups)
        if isinstance(error, Reject):
            reason = self.secrets.strike(str(error.reason)) if self.secrets else str(error.reason)
            if error.requeue:
                return self._outcome("requeued", summary=_fit(reason))
            # TaskRejected, not Reject: a caller that waits for the result must see a failure.
            failure = TaskRejected(reason or "rejected by the task").with_traceback(error.__traceback__)
            ended = self.failed(task, call, request, failure)
            shown = leaving(reason)
            return replace(ended, kind="rejected", summary=shown) if ended.kind == "failure" else ended
        if isinstance(error, task.options.autoretry_for) and self._may_retry(task, request, error):
            return self._retried_by_itself(task, call, request, error)
        return self.failed(task, call, request, error)

    def _may_retry(self, task: "Task[Any, Any]", request: Request, error: BaseException) -> bool:
        own = task.options
        return not isinstance(error, own.dont_autoretry_for) and not own.autoretry.exhausted(request.retries)

    def _retried_by_itself(
        self, task: "Task[Any, Any]", call: TaskCall, request: Request, error: BaseException
    ) -> Outcome:
        due = cluster_now() + task.options.autoretry.wait_s(request.retries, random())
        if not (options := task.options.retry_options):
            return self._retried(task, call, request, error, due)
        built = call_guarded(changed_attempt, self._app, request, None, None, options, due=due)
        if isinstance(built, Raised):
            return self.failed(task, call, request, built.error)
        again = Retry(exc=error, when=due, again=built.value)
        return self._retried(task, call, request, again, due)

    def _retried(
        self, task: "Task[Any, Any]", call: TaskCall, request: Request, error: BaseException, due: float
    ) -> Outcome:
        cause = error.exc or error if isinstance(error, Retry) else error
        follow_up = error.again if isinstance(error, Retry) else None
        if follow_up is None:
            follow_up = next_attempt(self._job.message, call, request, due=due, queue=self._job.queue)
            if (keyring := self._app.settings.keyring) is not None:
                follow_up = signed(self._app, keyring, follow_up, request)
        text = self._text(cause)
        if self._app.signals.task_retry.receivers:
            self._app.signals.task_retry.send(task=task, task_id=request.id, error=cause, due=due)
        if task.hooks is not None:
            task.hooks.call_with_error("on_retry", request, cause, text)
        results: tuple[StoredResult, ...] = ()
        if keeps_result(call.headers, task.options, self._app.settings):
            results = (self._failure(request, cause, text, status=RETRY, done_at=None),)
        return self._outcome(
            "retry",
            results=results,
            follow_ups=[follow_up],
            summary=self._repr(cause),
            traceback=text,
            due=due,
        )

    def failed(
        self, task: "Task[Any, Any]", call: TaskCall, request: Request, error: BaseException
    ) -> Outcome:
        if isinstance(error, TaskCancelled):  # the main process decides what happens to it
            return self._outcome("cancelled", summary=self._repr(error))
        text = self._text(error)
        done_at = time()
        follow_ups = after_failure(self._app, call.embed.errbacks, request, error, text)
        if (failure := self._app.signals.task_failure).receivers:
            shown = shown_arguments(request, self.hides)
            failure.send(task=task, task_id=request.id, error=error, traceback=text, **shown)
        if task.hooks is not None:
            task.hooks.call_with_error("on_failure", request, error, text)
        results: list[StoredResult] = []
        if keeps_result(call.headers, task.options, self._app.settings):
            results.append(self._failure(request, error, text, status=FAILURE, done_at=done_at))
        what = described(error, self.secrets)
        results += steps_that_never_run(call, what, text, status=FAILURE, done_at=done_at)
        counted = call_guarded(self._part_ended, call, request, FAILURE, what)
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
            summary=self._repr(error),
            traceback=text,
            expected=isinstance(error, task.options.throws),
        )

    def _part_ended(self, call: TaskCall, request: Request, status: str, value: object) -> BodyOutcome:
        """Count the task in its chord, waiting for an unavailable broker while its time limits allow."""
        if call.embed.chord is None and (status == SUCCESS or not call.embed.chain):
            return NOTHING_FOLLOWS  # most tasks
        limits = (self._job.soft_limit_s, self._job.hard_limit_s)
        wait_s = time_left_s(limits, perf_counter() - self._began)
        return patiently(lambda: part_ended(self._app, call, request, status, value), wait_s)

    def _unfinished(self, error: BaseException) -> Outcome:
        """The task ran, but its follow-ups cannot be written now: the message is redelivered."""
        why = f"the task ended, but its follow-up messages could not be sent: {error}"
        return self._outcome("requeued", summary=_fit(why))

    def _failure(
        self, request: Request, error: BaseException, text: str, *, status: str, done_at: float | None
    ) -> StoredResult:
        about = self._about(request)
        return encode_failure(
            request.id, described(error, self.secrets), text, status=status, done_at=done_at, **about
        )

    def _about(self, request: Request) -> dict[str, Any]:
        about: dict[str, Any] = {
            "children": request.children,
            "group_id": request.group,
            "parent_id": request.parent_id,
        }
        if self._app.settings.result_extended:
            about["extended"] = {
                "name": request.task,
                **shown_arguments(request, self.hides),
                "worker": request.hostname,
                "retries": request.retries,
                "queue": self._job.queue,
            }
        return about

    def _text(self, error: BaseException) -> str:
        most = self._app.settings.task_traceback_max_bytes
        return traceback_text(error, max_bytes=most, secrets=self.secrets)

    def _show(self, value: Any) -> str:
        text_max = min(self._app.settings.task_repr_max_chars, STRUCK_MAX_CHARS)
        if not self.secrets:
            return show_value(value, text_max)
        # Shown at length, so that no secret is cut in two before it is struck out.
        return cut(self.secrets.strike(show_value(value, STRUCK_MAX_CHARS)), text_max)

    def _repr(self, error: BaseException) -> str:
        shown = call_guarded(repr, error)
        text = f"<{type(error).__name__}>" if isinstance(shown, Raised) else shown.value
        if self.secrets:
            text = self.secrets.strike(text)
        return _fit(cut(text, max(self._app.settings.task_repr_max_chars, EXCEPTION_MAX_CHARS)))

    def _outcome(self, kind: Any, *, due: float = 0.0, summary: str = "", **fields: Any) -> Outcome:
        return Outcome(
            summary=summary,
            number=self._job.number,
            kind=kind,
            started_at=self._started_at,
            runtime_s=perf_counter() - self._began,
            not_before=due,
            **fields,
        )


def _fit(text: str) -> str:
    """Text of users' code, cut to what a summary can hold."""
    return cut(leaving(text), STRUCK_MAX_CHARS)


_Opened = tuple[_Run, "Task[Any, Any]", TaskCall, Request]


def _with_unsent(outcome: Outcome, unsent: list[Outgoing]) -> Outcome:
    """Return the outcome with the messages that the task sent while the broker was unavailable; they are
    published when the task is settled.
    """
    return replace(outcome, follow_ups=[*unsent, *outcome.follow_ups])
