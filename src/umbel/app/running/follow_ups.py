"""Follow-ups: what is sent when a task ends.

The child that ran the task works them out; the worker sends them in the same step that settles
the message, so a crash in between repeats the task and never loses what comes after it.

Order and fields as in Celery: callbacks first, then the next step of the chain; both get the
result as their first argument unless they are immutable. An errback gets the id of the task that
failed, or, if it can take three arguments more than it has, is called at once with (request, error,
traceback).
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from inspect import iscoroutine
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from umbel.app.canvas.signature import Signature, signature_from
from umbel.app.running.awaiting import run_to_end
from umbel.app.running.request import Request
from umbel.app.running.unrun import ids_in
from umbel.pools.guard import Raised, call_guarded
from umbel.wire.message import Outgoing, StoredResult
from umbel.wire.result import ExceptionMap, encode_failure
from umbel.wire.steps import readable_steps, step_map
from umbel.wire.task import SignatureMap, TaskCall

if TYPE_CHECKING:
    from umbel.app.interfaces import SendingApp

log = logging.getLogger("umbel.task")


def after_success(app: "SendingApp", call: TaskCall, request: Request, value: Any) -> list[Outgoing]:
    embed = call.embed
    sent: list[Outgoing] = []
    for callback in embed.callbacks or ():
        sent += _linked(app, callback, [value], request)
    if embed.chain:
        *remaining, following = embed.chain
        signature = signature_from(following, app).clone([value])
        # What a plain task is followed by it only passes on; of a group, each member's message says it.
        is_plain = type(signature) is Signature
        signature.options["chain"] = remaining if is_plain else [step_map(step) for step in remaining]
        sent += _sent_by(request, signature.prepare(sender=request))
    return sent


Runner = Callable[[Callable[[], object]], None]
"""Runs what users wrote."""


def run_here(work: Callable[[], object]) -> None:
    work()


def after_failure(
    app: "SendingApp",
    errbacks: Sequence[SignatureMap | Signature[Any]] | None,
    request: Request,
    error: BaseException,
    traceback: str,
    *,
    run: Runner = run_here,
) -> list[Outgoing]:
    """Call or prepare the errbacks; one that cannot be sent is logged and the others still are.

    `run` calls those that take the error itself: a worker's loop must not run users' code.
    """
    sent: list[Outgoing] = []
    for errback in errbacks or ():
        happened = call_guarded(_fail_over, app, errback, request, error, traceback, run)
        if isinstance(happened, Raised):
            log.error(
                "errback raised an exception",
                extra={"task_id": request.id, "errback": errback},
                exc_info=happened.error,
            )
        else:
            sent += happened.value
    return sent


def _fail_over(
    app: "SendingApp",
    errback: SignatureMap | Signature[Any],
    request: Request,
    error: BaseException,
    traceback: str,
    run: Runner,
) -> list[Outgoing]:
    signature = signature_from(errback, app)
    facts = (request, error, traceback)
    if not _takes(app, signature, facts):
        return _linked(app, signature, [request.id], request)
    run(lambda: _call(signature, facts))
    return []


def _call(signature: Signature[Any], facts: tuple[object, ...]) -> None:
    answer = signature(*facts)
    if iscoroutine(answer):
        run_to_end(answer)


def _takes(app: "SendingApp", signature: Signature[Any], more: tuple[object, ...]) -> bool:
    known = app.tasks.get(signature.task)
    if known is None or signature.immutable:
        return False
    try:
        known.check_arguments([*more, *signature.args], signature.kwargs)
    except TypeError:
        return False
    return True


def steps_that_never_run(
    call: TaskCall, error: ExceptionMap, traceback: str, *, status: str, done_at: float
) -> Iterable[StoredResult]:
    """The rest of a chain fails with the step that failed, or its waiters would wait for ever."""
    for task_id in ids_in(readable_steps(call.embed.chain or ())):
        yield encode_failure(task_id, error, traceback, status=status, done_at=done_at)


def _linked(app: "SendingApp", linked: Any, args: list[Any], request: Request) -> list[Outgoing]:
    signature = signature_from(linked, app).clone(args)
    signature.options.setdefault("group_id", str(uuid4()))
    return _sent_by(request, signature.prepare(sender=request))


def _sent_by(request: Request, prepared: Iterable[Any]) -> list[Outgoing]:
    ready = list(prepared)
    request.sent(one.task_id for one in ready)
    return [one.outgoing for one in ready]
