"""CeleryEndings: what a Celery task leaves behind that never ran to its end: revoked, expired, lost,
past its hard limit, unknown.

Celery's backend says what is stored and which errbacks are called; results and messages are captured and
travel with the settle. It may block (Redis counts a chord's part, Django writes a row), so all of it
happens off the worker's loop.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from billiard.exceptions import TimeLimitExceeded as CeleryTimeLimitExceeded
from billiard.exceptions import WorkerLostError
from celery.app.task import Context
from celery.exceptions import NotRegistered as CeleryNotRegistered
from kombu.serialization import prepare_accept_content

from umbel.celery.capture import CAPTURE, Capture
from umbel.celery.messages import call_of, request_of
from umbel.errors import NotRegistered, TimeLimitExceeded, WorkerLost
from umbel.pools.guard import Raised, call_guarded
from umbel.wire.message import Message
from umbel.worker.settings import Ending

log = logging.getLogger("umbel.celery")


class CeleryEndings:
    def __init__(self, app: Any) -> None:
        self._app = app
        self._accept = prepare_accept_content(app.conf.accept_content)

    def __call__(self, message: Message, queue: str, error: Exception, status: str) -> Ending:
        return Ending(before=lambda: self._end(message, queue, error, status))

    def _end(self, message: Message, queue: str, error: Exception, status: str) -> Ending:
        decoded = call_guarded(call_of, message, self._accept)
        if isinstance(decoded, Raised):
            return Ending()
        headers, args, kwargs, embed = decoded.value
        request = request_of(headers, message, queue=queue, hostname="", redelivered=False)
        request.update(embed, args=args, kwargs=kwargs)
        context = Context(request, called_directly=False)
        capture = Capture()
        token = CAPTURE.set(capture)
        try:
            stored = call_guarded(self._store, context, error, status)
        finally:
            CAPTURE.reset(token)
        if isinstance(stored, Raised):
            log.error("cannot store how a task ended", extra={"task_id": context.id}, exc_info=stored.error)
        return Ending(list(capture.by_task.values()), capture.follow_ups)

    def _store(self, context: Any, error: Exception, status: str) -> None:
        task = self._app.tasks.get(context.task)
        backend = task.backend if task is not None else self._app.backend
        kept = self._keeps(task, context)
        if status == "REVOKED":
            backend.mark_as_revoked(context.id, str(error), request=context, store_result=kept)
        else:
            backend.mark_as_failure(context.id, as_celery(error), request=context, store_result=kept)

    def _keeps(self, task: Any, context: Any) -> bool:
        ignored = context.ignore_result
        if ignored is None:
            ignored = task.ignore_result if task is not None else self._app.conf.task_ignore_result
        return not ignored or bool(task is not None and task.store_errors_even_if_ignored)


def as_celery(error: Exception) -> Exception:
    """The same ending by the class that Celery's users catch."""
    kind = _CLASSES.get(type(error))
    return error if kind is None else kind(*error.args)


_CLASSES: Mapping[type[Exception], Callable[..., Exception]] = {
    TimeLimitExceeded: CeleryTimeLimitExceeded,
    WorkerLost: WorkerLostError,
    NotRegistered: CeleryNotRegistered,
}
