"""CeleryEndings: what a Celery task leaves behind that never ran to its end: revoked, expired, lost,
past its hard limit, unknown.

Celery's backend says what is stored and which errbacks are called; results and messages are captured and
travel with the settle. It may block (Redis counts a chord's part, Django writes a row), so all of it
happens off the worker's loop.
"""

from functools import partial
from typing import Any

from billiard.einfo import ExceptionInfo
from billiard.exceptions import TimeLimitExceeded as CeleryTimeLimitExceeded
from billiard.exceptions import WorkerLostError
from celery import states
from celery.app.task import Context
from celery.app.trace import task_has_custom
from celery.exceptions import NotRegistered as CeleryNotRegistered
from kombu.serialization import prepare_accept_content

from umbel.celery.capture import Capture
from umbel.celery.messages import keeps_errors, request_of
from umbel.errors import NotRegistered, TimeLimitExceeded, WorkerLost
from umbel.pools.guard import Raised, call_guarded
from umbel.wire.message import Message
from umbel.worker.settings import Ending

ATTEMPTS_MAX = 5  # to store how a task ended; then its message is settled without it


class CeleryEndings:
    def __init__(self, app: Any) -> None:
        self._app = app
        self._accept = prepare_accept_content(app.conf.accept_content)

    def __call__(self, message: Message, queue: str, error: Exception, status: str) -> Ending:
        before = partial(self._end, message, queue, error, status)
        return Ending(before=before, joins=True, attempts_max=ATTEMPTS_MAX)

    def _end(self, message: Message, queue: str, error: Exception, status: str) -> Ending:
        read = call_guarded(request_of, message, self._accept, queue=queue, hostname="")
        if isinstance(read, Raised):
            return Ending()
        with Capture() as capture:
            self._store(Context(read.value, called_directly=False), error, status)
        return Ending(list(capture.by_task.values()), capture.follow_ups, after=capture.after)

    def _store(self, context: Any, error: Exception, status: str) -> None:
        task = self._app.tasks.get(context.task)
        backend = task.backend if task is not None else self._app.backend
        kept = keeps_errors(self._app, task, context)
        if status == "REVOKED":
            backend.mark_as_revoked(context.id, str(error), request=context, store_result=kept)
            return
        failed = as_celery(error, context.task)
        backend.mark_as_failure(context.id, failed, request=context, store_result=kept)
        if task is not None and isinstance(failed, CeleryTimeLimitExceeded):
            _call_hooks(task, context, failed)


def _call_hooks(task: Any, context: Any, error: Exception) -> None:
    """Of a task past its hard limit: its process is gone, so they run here, as in Celery's main process."""
    call_guarded(task.on_failure, error, context.id, context.args, context.kwargs, einfo_of(error))
    if task_has_custom(task, "after_return"):
        call_guarded(task.after_return, states.FAILURE, error, context.id, context.args, context.kwargs, None)


def einfo_of(error: Exception) -> Any:
    """What handlers get of an error that was raised nowhere."""
    try:
        raise error
    except type(error):
        return ExceptionInfo()


def as_celery(error: Exception, task: str) -> Exception:
    """The same ending by the class that Celery's users catch, with the arguments it has there."""
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
