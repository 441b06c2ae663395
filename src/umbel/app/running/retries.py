"""Retries and replacements: the messages that follow a run in place of its result.

Usually a retry changes only the headers, and the body is sent again in the bytes in which it came. If `retry`
names other arguments or options, the call is encoded again from its message, with those on top.

A replacement takes over everything by which others know the task: its id, its place in a group or chord, its
callbacks and errbacks, and the rest of its chain. Callers that wait for the task get the result of the
replacement.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast
from uuid import NAMESPACE_OID, uuid5

import msgspec

from umbel.app.canvas.chain import Chain
from umbel.app.canvas.group import ACCUMULATE_TASK, Group
from umbel.app.canvas.signature import Signature, signature_from
from umbel.app.options import PRIORITY_MAX, SendOptions
from umbel.app.request import Request
from umbel.app.sending.preparation import prepare
from umbel.app.waiting import patiently
from umbel.errors import ConfigurationError
from umbel.wire.call import OF_ONE_COPY, TaskCall
from umbel.wire.message import Message, Outgoing, format_instant
from umbel.wire.task import encode_headers

if TYPE_CHECKING:
    from umbel.app.app import App


# ---- retries ---------------------------------------------------------------------------------------


def next_attempt(message: Message, call: TaskCall, request: Request, *, due: float, queue: str) -> Outgoing:
    """The same call again, with the same id and one more retry counted, not signed yet.

    A task without a parent becomes its own parent, as in Celery.
    """
    headers = msgspec.structs.replace(
        call.headers,
        retries=request.retries + 1,
        eta=format_instant(due),
        parent_id=request.parent_id or request.id,
        **OF_ONE_COPY,
    )
    again = msgspec.structs.replace(message, headers=encode_headers(headers, call.extra))
    return Outgoing(queue, again, due)


def changed_attempt(
    app: "App",
    request: Request,
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    options: SendOptions,
    *,
    due: float,
) -> Outgoing:
    """The call again with other arguments or options; raises if it cannot be sent."""
    assert request.call is not None, "only a call that came as a message is retried"
    changed = {**_options_of(request.call, request), **options, "eta": due, "retries": request.retries + 1}
    return prepare(
        app,
        request.task,
        request.args if args is None else args,
        request.kwargs if kwargs is None else kwargs,
        cast(SendOptions, changed),
    ).outgoing


def _options_of(call: TaskCall, request: Request) -> dict[str, Any]:
    """The contents of a message as options of a call, with the time limits, which the task may have set."""
    headers, embed = call.headers, call.embed
    hard_s, soft_s = headers.timelimit
    options = {
        "task_id": request.id,
        "root_id": request.root_id,
        "parent_id": request.parent_id or request.id,
        "group_id": headers.group,
        "group_index": headers.group_index,
        "shadow": headers.shadow,
        "expires": headers.expires,
        "time_limit": hard_s or None,
        "soft_time_limit": soft_s or None,
        "ignore_result": headers.ignore_result,
        "headers": call.extra,
        "link": embed.callbacks,
        "link_error": embed.errbacks,
        "chain": embed.chain,
        "chord": embed.chord,
        "reply_to": call.reply_to,
        "priority": min(call.priority, PRIORITY_MAX),  # another program may have sent a higher one
        "queue": request.delivery_info["routing_key"],
        "stamped_headers": headers.stamped_headers,
        "stamps": headers.stamps,
        "unique_token": headers.umbel_unique or None,
    }
    return {name: value for name, value in options.items() if value is not None}


# ---- replacements ----------------------------------------------------------------------------------


def replacement(app: "App", request: Request, signature: Signature[Any]) -> Sequence[Outgoing]:
    """The messages of `signature` in the place of the running task.

    ConfigurationError: the signature cannot replace a task.
    """
    if request.call is None:
        raise RuntimeError(
            "self.replace() needs a task that a worker runs; this one was called as a function"
        )
    _check(signature)
    nesting = request.replaced_task_nesting + 1
    whole = _with_one_result(app, signature_from(signature, app).clone())
    for callback in request.callbacks or ():
        whole.link(signature_from(callback, app))
    for errback in request.errbacks or ():
        whole.link_error(signature_from(errback, app))
    whole.freeze(request.id)
    if request.group is not None:
        whole.join_group(request.group, request.group_index)
    if request.chord is not None:
        whole.join_chord(request.chord)
    rest = [signature_from(step, app).clone() for step in reversed(request.chain or ())]
    steps = Chain(whole, *rest)
    for step in steps.steps:
        step.options["replaced_task_nesting"] = nesting
        if request.reply_to:
            step.options.setdefault("reply_to", request.reply_to)
    batch = patiently(lambda: steps.prepare(sender=request), app.settings.publish_timeout_s)
    request.sent(prepared.task_id for prepared in batch)
    return [prepared.outgoing for prepared in batch]


def added_part(app: "App", request: Request, signature: Signature[Any]) -> Signature[Any]:
    """Add the signature to the chord of the running task, which waits for it from now on; return the new
    part.

    Its id is derived from the task's id, so that a redelivered task adds the same part again.
    """
    if request.chord is None or not request.group:
        raise ValueError(f"{request.task}[{request.id}] is not a part of a chord")
    added = signature_from(signature, app).clone(root_id=request.root_id or request.id)
    request.added_parts += 1
    task_id = added.freeze(str(uuid5(NAMESPACE_OID, f"{request.id}:{request.added_parts}")))
    added.join_group(request.group, request.group_index)
    added.join_chord(request.chord)
    group_id = request.group
    patiently(lambda: app.backend.grow_chord(group_id, task_id), app.settings.publish_timeout_s)
    return added


def _check(signature: Signature[Any]) -> None:
    if "chord" in signature.options:
        raise ConfigurationError("a signature that replaces a task must not be part of a chord itself")
    if isinstance(signature, Chain) and not signature.steps:
        raise ConfigurationError("a task cannot be replaced by an empty chain")


def _with_one_result(app: "App", signature: Signature[Any]) -> Signature[Any]:
    """The signature with one result, as the task has it: the results of a group are gathered into a list."""
    last = signature.steps[-1] if isinstance(signature, Chain) else signature
    if not isinstance(last, Group):
        return signature
    gathered: Signature[Any] = Signature(ACCUMULATE_TASK, kwargs={"index": 0}, app=app)
    return signature | gathered
