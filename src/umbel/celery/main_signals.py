"""Signals of Celery's that its worker sends from the main process, with the arguments its handlers know.

They are sent off the worker's loop, in order, and only where somebody listens. The log line about a
received task is Celery's, too; it is written before the task can run, so that no line about its end
stands before it.
"""

import logging
from collections.abc import Callable
from signal import Signals
from typing import Any

from celery import signals
from celery.app.task import Context
from celery.app.trace import LOG_RECEIVED
from celery.exceptions import InvalidTaskError
from kombu.serialization import prepare_accept_content

from umbel.celery.endings import as_celery, einfo_of
from umbel.celery.messages import body_of, request_of
from umbel.celery.stand_in import MessageStandIn, RequestStandIn, WorkerStandIn
from umbel.pools.guard import Raised, call_guarded
from umbel.wire.call import read_header_map
from umbel.wire.message import Message
from umbel.worker.user_code.notices import NoticeHooks

log = logging.getLogger("umbel.celery")
strategy_log = logging.getLogger("celery.worker.strategy")  # the name that projects' settings know


def notice_hooks(app: Any, node: str) -> NoticeHooks:
    sender = MainSignals(app, node)

    def heard(signal: Any, hook: Callable[..., None]) -> Any:
        return hook if signal.receivers else None

    return NoticeHooks(
        stopping=heard(signals.worker_shutting_down, sender.stopping),
        heartbeat=heard(signals.heartbeat_sent, sender.heartbeat),
        received=heard(signals.task_received, sender.received),
        log_received=_log_received if strategy_log.isEnabledFor(logging.INFO) else None,
        revoked=heard(signals.task_revoked, sender.revoked),
        unknown=heard(signals.task_unknown, sender.unknown),
        rejected=heard(signals.task_rejected, sender.rejected),
        failed=heard(signals.task_failure, sender.failed),
    )


class MainSignals:
    def __init__(self, app: Any, node: str) -> None:
        self._app = app
        self._node = node
        self._worker = WorkerStandIn(app, node)
        self._accept = prepare_accept_content(app.conf.accept_content)

    def stopping(self, *, signal: str, how: str) -> None:
        how = {"warm": "Warm", "soft": "Soft", "cold": "Cold"}[how]
        exitcode = 1 if how == "Cold" else 0
        signals.worker_shutting_down.send(sender=self._node, sig=signal, how=how, exitcode=exitcode)

    def heartbeat(self) -> None:
        signals.heartbeat_sent.send(sender=self._worker)

    def received(self, *, message: Message, queue: str) -> None:
        context = self._context(message, queue)
        if context is not None:
            signals.task_received.send(
                sender=self._worker, request=RequestStandIn(self._app, context, message)
            )

    def revoked(self, *, message: Message, queue: str, terminated: bool, signal: str, expired: bool) -> None:
        context = self._context(message, queue)
        task = context and self._app.tasks.get(context.task)
        if task is None:
            return
        signum = Signals[signal].value if signal in Signals.__members__ else None
        told = {"terminated": terminated, "signum": signum, "expired": expired}
        signals.task_revoked.send(sender=task, request=context, **told)

    def unknown(self, *, message: Message, queue: str) -> None:
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
        if isinstance(call_guarded(body_of, message, self._accept), Raised):
            return  # Celery has a log line for bytes that it cannot decode, and no signal
        shown = MessageStandIn(message, queue)
        # Of a message that is no task's Celery knows no error.
        exc = InvalidTaskError(str(error)) if "task" in shown.headers else None
        signals.task_rejected.send(sender=self._worker, message=shown, exc=exc)

    def failed(self, *, message: Message, queue: str, error: Exception) -> None:
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
        """The request as `task_prerun` would have it; None where the message cannot be read."""
        read = call_guarded(request_of, message, self._accept, queue=queue, hostname=self._node)
        return None if isinstance(read, Raised) else Context(read.value, called_directly=False)


def _log_received(*, message: Message, queue: str) -> None:  # noqa: ARG001 (a hook's arguments)
    headers = read_header_map(message.headers)
    shown = {"id": headers["id"], "name": headers["task"], "eta": headers.get("eta")}
    shown |= {name: headers.get(f"{name}repr") or "" for name in ("args", "kwargs")}
    strategy_log.info(LOG_RECEIVED, shown, extra={"data": shown})
