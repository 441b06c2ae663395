"""Replacing: a running task has another signature run in its place, or adds a part to its chord.

A replacement takes over all that others know the task by: its id, its place in a group or chord, its
callbacks and errbacks, and the rest of its chain. Who waits for the task is given its result.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from uuid import NAMESPACE_OID, uuid5

from umbel.app.canvas.builtin_tasks import ACCUMULATE_TASK
from umbel.app.canvas.chain import Chain
from umbel.app.canvas.group import Group
from umbel.app.canvas.signature import Signature, signature_from
from umbel.app.running.request import Request
from umbel.app.sending.patience import patiently
from umbel.errors import ConfigurationError
from umbel.wire.message import Outgoing

if TYPE_CHECKING:
    from umbel.app.interfaces import SendingApp


def replacement(app: "SendingApp", request: Request, signature: Signature[Any]) -> Sequence[Outgoing]:
    """The messages of `signature` in the place of the task that this request is of."""
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
    prepared = patiently(lambda: steps.prepare(sender=request), app.settings.publish_timeout_s)
    request.sent(one.task_id for one in prepared)
    return [one.outgoing for one in prepared]


def added_part(app: "SendingApp", request: Request, signature: Signature[Any]) -> Signature[Any]:
    """The signature as a further part of the chord, which waits for it from now on.

    Its id follows from the task's own, so that a task that is redelivered adds the same part again.
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


def _with_one_result(app: "SendingApp", signature: Signature[Any]) -> Signature[Any]:
    """A group has many results, and the task had one: what follows it is given them as a list."""
    last = signature.steps[-1] if isinstance(signature, Chain) else signature
    if not isinstance(last, Group):
        return signature
    gathered: Signature[Any] = Signature(ACCUMULATE_TASK, kwargs={"index": 0}, app=app)
    return signature | gathered
