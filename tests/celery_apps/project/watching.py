"""Handlers of signals. Each notes what it was given; tasks whose name begins with `watched` are noted."""

import os
from typing import Any

from celery import signals

from tests.celery_apps.project.journal import note, note_once

RUN = os.environ.get("RUN", "")


def _is_watched(name: Any) -> bool:
    return str(name).rpartition(".")[2].startswith("watched")


def _of_task(name: str, task: Any, root_id: Any, *line: Any) -> None:
    if _is_watched(getattr(task, "name", task)):
        note(f"signals-{root_id}", name, *line)


@signals.task_prerun.connect
def on_prerun(sender: Any, task_id: Any, task: Any, args: Any, kwargs: Any, **more: Any) -> None:
    same = sender is task and task.request.id == task_id
    _of_task("prerun", task, task.request.root_id, same, args, kwargs, sorted(more))


@signals.task_postrun.connect
def on_postrun(
    sender: Any, task_id: Any, task: Any, args: Any, kwargs: Any, retval: Any, state: Any, **more: Any
) -> None:
    _of_task("postrun", task, task.request.root_id, args, kwargs, repr(retval), state, sorted(more))


@signals.task_success.connect
def on_success(sender: Any, result: Any, **more: Any) -> None:
    _of_task("success", sender, sender.request.root_id, result, sorted(more))


@signals.task_failure.connect
def on_failure(
    sender: Any, task_id: Any, exception: Any, args: Any, kwargs: Any, traceback: Any, einfo: Any, **more: Any
) -> None:
    # In the main process there is no current request: the task's id is its root in these cases.
    given = [repr(exception), list(args), kwargs, type(einfo).__name__, sorted(more)]
    _of_task("failure", sender, sender.request.root_id or task_id, *given)


@signals.task_retry.connect
def on_retry(sender: Any, request: Any, reason: Any, einfo: Any, **more: Any) -> None:
    given = [repr(reason), type(einfo).__name__, type(request).__name__, sorted(more)]
    _of_task("retry", sender, request.root_id, *given)


@signals.task_revoked.connect
def on_revoked(sender: Any, request: Any, terminated: Any, signum: Any, expired: Any, **more: Any) -> None:
    given = [type(request).__name__, terminated, signum and int(signum), expired, sorted(more)]
    _of_task("revoked", sender, request.root_id, *given)


@signals.task_received.connect
def on_received(sender: Any, request: Any, **more: Any) -> None:
    if _is_watched(request.name):
        shown = [
            request.name,
            request.id,
            list(request.args),
            request.kwargs,
            request.task.name,
            sorted(more),
        ]
        note(f"received-{request.root_id}", "received", *shown)


@signals.task_rejected.connect
def on_rejected(sender: Any, message: Any, exc: Any, **more: Any) -> None:
    note(f"rejected-{message.headers.get('id')}", "rejected", type(exc).__name__, sorted(more))


@signals.task_unknown.connect
def on_unknown(sender: Any, message: Any, exc: Any, name: Any, id: Any, **more: Any) -> None:
    note(f"unknown-{id}", "unknown", type(exc).__name__, str(exc), name, sorted(more))


@signals.task_internal_error.connect
def on_internal_error(sender: Any, task_id: Any, exception: Any, **more: Any) -> None:
    note(f"internal-{task_id}", "internal error", repr(exception), sorted(more))


@signals.before_task_publish.connect
def before_publish(sender: Any, headers: Any, body: Any, **more: Any) -> None:
    if _is_watched(sender):
        given = [sender, headers["id"], list(body[0]), body[1], sorted(more)]
        note(f"published-{headers['root_id']}", "before publish", *given)


@signals.after_task_publish.connect
def after_publish(sender: Any, headers: Any, body: Any, **more: Any) -> None:
    if _is_watched(sender):
        note(f"published-{headers['root_id']}", "after publish", sender, headers["id"], sorted(more))


# ---- the worker's own life -------------------------------------------------------------------------


def _of_worker(signal: Any, *names: str) -> None:
    @signal.connect(weak=False)
    def on_signal(sender: Any, **given: Any) -> None:
        kept = {name: _shown(given[name]) for name in names if name in given}
        name = sender if isinstance(sender, str) else getattr(sender, "hostname", None)
        note_once(f"worker-{RUN}", signal.name, name, kept, sorted(given))


def _shown(value: Any) -> Any:
    return value if isinstance(value, str | int | float | None) else value is not None


_of_worker(signals.celeryd_init, "instance", "conf", "options")
_of_worker(signals.celeryd_after_setup, "instance", "conf")
_of_worker(signals.worker_init)
_of_worker(signals.worker_ready)
_of_worker(signals.worker_shutting_down, "sig", "how", "exitcode")
_of_worker(signals.worker_shutdown)
_of_worker(signals.import_modules)


@signals.worker_process_init.connect
def on_child(sender: Any, **given: Any) -> None:
    note(f"children-{RUN}", "process init", type(sender).__name__, sorted(given))


@signals.worker_process_shutdown.connect
def on_child_end(sender: Any, **given: Any) -> None:
    note(f"ended-children-{RUN}", "process shutdown", type(sender).__name__, sorted(given))
