"""Main process: send the signals of Celery's main process, and end tasks that did not run to completion.

Such tasks were revoked, expired or lost, exceeded their hard limit, or are unknown. Celery's backend decides
what is stored for them and which errbacks are called. Their results and messages are captured and written
together with the acknowledgement.

Signals are sent in order with Celery's arguments, and only if a handler is connected. Celery's log line
about a received task is written before the task can run, so that it precedes the lines about the task's end.

Backends and handlers may block (Redis counts a part of a chord, Django writes a row), so this code does not
run in the worker's event loop.
"""

import logging
from collections.abc import Callable
from functools import partial
from signal import Signals
from typing import Any

from billiard.einfo import ExceptionInfo
from billiard.exceptions import TimeLimitExceeded as CeleryTimeLimitExceeded
from billiard.exceptions import WorkerLostError
from celery import signals, states
from celery.app.task import Context
from celery.app.trace import LOG_RECEIVED, task_has_custom
from celery.exceptions import InvalidTaskError
from celery.exceptions import NotRegistered as CeleryNotRegistered
from kombu.serialization import prepare_accept_content

from umbel.celery.loading import MessageStandIn, RequestStandIn, WorkerStandIn
from umbel.celery.messages import Capture, body_of, keeps_errors, request_of, signed_for
from umbel.errors import NotRegistered, TimeLimitExceeded, WorkerLost
from umbel.pools.guard import Raised, call_guarded
from umbel.protocol.delivery.trust import UNSIGNED
from umbel.wire.call import read_header_map
from umbel.wire.message import Message
from umbel.worker.context import Ending
from umbel.worker.user_code import NoticeHooks

# ---- celery endings --------------------------------------------------------------------------------
#
# What a Celery task leaves behind that never ran to its end: revoked, expired, lost, past its hard limit,
# unknown.
#
# Celery's backend says what is stored and which errbacks are called; results and messages are captured and
# travel with the settle. It may block (Redis counts a chord's part, Django writes a row), so all of it
# happens off the worker's loop.

ATTEMPTS_MAX = 5  # to store how a task ended; then its message is settled without it


class CeleryEndings:
    """Called for a message whose task did not run to completion; returns what to store and send."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._accept = prepare_accept_content(app.conf.accept_content)

    def __call__(
        self, message: Message, queue: str, error: Exception, status: str, *, signs_for: str | None = UNSIGNED
    ) -> Ending:
        before = partial(self._end, message, queue, error, status, signs_for)
        return Ending(before=before, joins=True, attempts_max=ATTEMPTS_MAX)

    def _end(
        self, message: Message, queue: str, error: Exception, status: str, signs_for: str | None
    ) -> Ending:
        read = call_guarded(request_of, message, self._accept, queue=queue, hostname="")
        if isinstance(read, Raised):
            return Ending()
        sign = partial(signed_for, self._app, signs_for=signs_for, cause=str(read.value["id"]))
        with Capture(sign) as capture:
            self._store(Context(read.value, called_directly=False), error, status)
        return Ending(list(capture.by_task.values()), capture.follow_ups, after=capture.after)

    def _store(self, context: Any, error: Exception, status: str) -> None:
        task = self._app.tasks.get(context.task)
        backend = task.backend if task is not None else self._app.backend
        store_result = keeps_errors(self._app, task, context)
        if status == "REVOKED":
            backend.mark_as_revoked(context.id, str(error), request=context, store_result=store_result)
            return
        failed = as_celery(error, context.task)
        backend.mark_as_failure(context.id, failed, request=context, store_result=store_result)
        if task is not None and isinstance(failed, CeleryTimeLimitExceeded):
            _call_hooks(task, context, failed)


def _call_hooks(task: Any, context: Any, error: Exception) -> None:
    """Call the task's hooks after its hard limit. Its process has been killed, so they run in the main
    process, as in Celery.
    """
    call_guarded(task.on_failure, error, context.id, context.args, context.kwargs, einfo_of(error))
    if task_has_custom(task, "after_return"):
        call_guarded(task.after_return, states.FAILURE, error, context.id, context.args, context.kwargs, None)


def einfo_of(error: Exception) -> Any:
    """Return an ExceptionInfo for an error that was not raised."""
    try:
        raise error
    except type(error):
        return ExceptionInfo()


def as_celery(error: Exception, task: str) -> Exception:
    """Convert an error to Celery's exception for the same case, with the same arguments."""
    made: Exception = _made(error, task)
    return made


def _made(error: Exception, task: str) -> Any:
    match error:
        case TimeLimitExceeded(limit_s=limit_s):
            whole = limit_s is not None and float(limit_s).is_integer()
            return CeleryTimeLimitExceeded(int(limit_s) if whole and limit_s else limit_s)
        case WorkerLost():
            return WorkerLostError(*error.args)
        case NotRegistered():
            return CeleryNotRegistered(task)
        case _:
            return error


# ---- main signals ----------------------------------------------------------------------------------
#
# Signals of Celery's that its worker sends from the main process, with the arguments its handlers know.
#
# They are sent off the worker's loop, in order, and only where somebody listens. The log line about a
# received task is Celery's, too; it is written before the task can run, so that no line about its end
# stands before it.

log = logging.getLogger("umbel.celery")
strategy_log = logging.getLogger("celery.worker.strategy")  # the name that projects' settings know


def notice_hooks(app: Any, node: str) -> NoticeHooks:
    """Return the worker's hooks for the signals that have receivers."""
    sender = MainSignals(app, node)

    def if_received(signal: Any, hook: Callable[..., None]) -> Any:
        return hook if signal.receivers else None

    return NoticeHooks(
        stopping=if_received(signals.worker_shutting_down, sender.stopping),
        heartbeat=if_received(signals.heartbeat_sent, sender.heartbeat),
        received=if_received(signals.task_received, sender.received),
        log_received=_log_received if strategy_log.isEnabledFor(logging.INFO) else None,
        revoked=if_received(signals.task_revoked, sender.revoked),
        unknown=if_received(signals.task_unknown, sender.unknown),
        rejected=if_received(signals.task_rejected, sender.rejected),
        failed=if_received(signals.task_failure, sender.failed),
    )


class MainSignals:
    """Sends the signals of Celery's main process with Celery's arguments."""

    def __init__(self, app: Any, node: str) -> None:
        self._app = app
        self._node = node
        self._worker = WorkerStandIn(app, node)
        self._accept = prepare_accept_content(app.conf.accept_content)

    def stopping(self, *, signal: str, how: str) -> None:
        """Send worker_shutting_down, with Celery's names for the kinds of shutdown."""
        how = {"warm": "Warm", "soft": "Soft", "cold": "Cold"}[how]
        exitcode = 1 if how == "Cold" else 0
        signals.worker_shutting_down.send(sender=self._node, sig=signal, how=how, exitcode=exitcode)

    def heartbeat(self) -> None:
        """Send heartbeat_sent."""
        signals.heartbeat_sent.send(sender=self._worker)

    def received(self, *, message: Message, queue: str) -> None:
        """Send task_received, if the message can be read."""
        context = self._context(message, queue)
        if context is not None:
            signals.task_received.send(
                sender=self._worker, request=RequestStandIn(self._app, context, message)
            )

    def revoked(self, *, message: Message, queue: str, terminated: bool, signal: str, expired: bool) -> None:
        """Send task_revoked, if the task is registered."""
        context = self._context(message, queue)
        task = context and self._app.tasks.get(context.task)
        if task is None:
            return
        signum = Signals[signal].value if signal in Signals.__members__ else None
        details = {"terminated": terminated, "signum": signum, "expired": expired}
        signals.task_revoked.send(sender=task, request=context, **details)

    def unknown(self, *, message: Message, queue: str) -> None:
        """Send task_unknown for a task that is not registered."""
        context = self._context(message, queue)
        if context is not None:
            name = context.task
            signals.task_unknown.send(
                sender=self._worker,
                message=MessageStandIn(message, queue),
                exc=KeyError(name),
                name=name,
                id=context.id,
            )

    def rejected(self, *, message: Message, queue: str, error: Exception) -> None:
        """Send task_rejected, except for bytes that Celery cannot decode."""
        if isinstance(call_guarded(body_of, message, self._accept), Raised):
            return  # Celery has a log line for bytes that it cannot decode, and no signal
        shown = MessageStandIn(message, queue)
        # For a message that is not a task Celery passes no error.
        exc = InvalidTaskError(str(error)) if "task" in shown.headers else None
        signals.task_rejected.send(sender=self._worker, message=shown, exc=exc)

    def failed(self, *, message: Message, queue: str, error: Exception) -> None:
        """Send task_failure for a task that failed outside a child, with its request on the request stack."""
        context = self._context(message, queue)
        task = context and self._app.tasks.get(context.task)
        if task is None:
            return
        failed = as_celery(error, context.task)
        einfo = einfo_of(failed)
        task.request_stack.push(context)  # for the handlers
        try:
            signals.task_failure.send(
                sender=task,
                task_id=context.id,
                exception=failed,
                args=context.args,
                kwargs=context.kwargs,
                traceback=einfo.traceback,
                einfo=einfo,
            )
        finally:
            task.request_stack.pop()

    def _context(self, message: Message, queue: str) -> Any:
        """Return the request as in `task_prerun`; None if the message is unreadable."""
        read = call_guarded(request_of, message, self._accept, queue=queue, hostname=self._node)
        return None if isinstance(read, Raised) else Context(read.value, called_directly=False)


def _log_received(*, message: Message, queue: str) -> None:  # noqa: ARG001 (a hook's arguments)
    headers = read_header_map(message.headers)
    shown = {"id": headers["id"], "name": headers["task"], "eta": headers.get("eta")}
    shown |= {name: headers.get(f"{name}repr") or "" for name in ("args", "kwargs")}
    strategy_log.info(LOG_RECEIVED, shown, extra={"data": shown})
