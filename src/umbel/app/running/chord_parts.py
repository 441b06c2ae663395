"""Chord parts: they are counted as they end, and after the last one the body is sent.

The backend counts the parts, each once however often it is delivered. The task that brings the last
one sends the body; the sending and the mark that it was sent are one step where broker and backend are
one, so the body is sent once. Keys and forms are Celery's: parts of one chord may run on both kinds
of worker.
"""

import logging
from collections.abc import Iterable, Sequence
from time import time
from typing import TYPE_CHECKING, Any

import msgspec

from umbel.app.canvas.group import Chord, Group
from umbel.app.canvas.signature import Signature, listed, signature_from
from umbel.app.rebuilding import rebuild_exception
from umbel.app.results import GroupResult
from umbel.app.running.follow_ups import Runner, after_failure, run_here
from umbel.app.running.request import Request
from umbel.app.running.unrun import ids_in, parts_in
from umbel.app.sending.prepare import new_id
from umbel.backends.interface import ChordPart
from umbel.brokers.interface import Refused
from umbel.brokers.refusals import log_refused
from umbel.errors import BrokerRefused, ChordError, RemoteError, WireError
from umbel.pools.guard import Raised, call_guarded
from umbel.protocol.delivery.states import FAILURE, SUCCESS
from umbel.wire.message import Outgoing, StoredResult
from umbel.wire.result import encode_failure, exception_map
from umbel.wire.show import cut
from umbel.wire.steps import readable_steps
from umbel.wire.task import SignatureMap, TaskCall
from umbel.wire.values import decode_json, encode_json

if TYPE_CHECKING:
    from umbel.app.interfaces import SendingApp

log = logging.getLogger("umbel.task")
STORE_WAIT_S = 60.0
LIMIT_MARGIN_S = 0.5
CAUSE_MAX_CHARS = 1024
UNCOUNTED = (
    "cannot count a failed task in its chord: the chord's callback never runs, and its result never comes; "
    "fix the cause, and send the chord again"
)


class BodyOutcome(msgspec.Struct, frozen=True):
    """What is left to store and to send for the body, beside what the backend has done."""

    results: Sequence[StoredResult] = ()
    follow_ups: Sequence[Outgoing] = ()


NOTHING_FOLLOWS = BodyOutcome()


def part_ended(
    app: "SendingApp",
    call: TaskCall,
    request: Request,
    status: str,
    value: object,
    *,
    run: Runner = run_here,
) -> BodyOutcome:
    """A task has its final state: if it is a part of a chord count it, and after the last send the body.

    Called again after a failure it continues: a part counts once, and the body is sent once.
    BrokerUnavailable says nothing of the task: wait, or leave it to redelivery. `run` calls errbacks that
    take the error itself.
    """
    payload = encode_json(value)
    if call.embed.chord is not None and request.group:
        part = ChordPart(request.group, request.group_index, request.id, status, payload)
        return _counted(app, [part], call.embed.chord, request, run)
    if status == SUCCESS or not call.embed.chain:
        return NOTHING_FOLLOWS
    # The end of its chain, which would have been the part, never runs.
    (last,) = readable_steps(call.embed.chain[:1]) or [None]
    return _counted(app, *parts_in(last, status, payload), request, run)


def _counted(
    app: "SendingApp",
    ended: Sequence[ChordPart],
    body_map: SignatureMap | None,
    request: Request,
    run: Runner,
) -> BodyOutcome:
    parts: Sequence[ChordPart] | None = None
    try:
        for part in ended:
            parts = app.backend.add_chord_part(part)
        if parts is None or not app.backend.claim_chord(part.group_id, part.task_id):
            return NOTHING_FOLLOWS
        values = _values(app, part.group_id, parts)
    except BrokerRefused as refused:  # the task keeps its outcome, and the body fails
        error = ChordError(f"cannot count part {request.id} of the chord, so the chord fails: {refused}")
        log.error(
            "cannot count a finished chord part; the chord fails",
            extra={"task_id": request.id, "why": str(refused)},
        )
        return BodyOutcome(_failures(ids_in([body_map]), error))
    assert body_map is not None, "parts name their body"
    failed = next((one for one in parts if one.status != SUCCESS), None)
    if failed is not None:
        outcome = _failed_body(app, body_map, request, failed, run)
        app.backend.end_chord(part.group_id, ())
        return outcome
    prepared = signature_from(body_map, app).clone([values]).prepare(sender=request)
    request.children.extend(one.task_id for one in prepared)
    return _send_once(app, part.group_id, [one.outgoing for one in prepared])


def _values(app: "SendingApp", group_id: str, parts: Sequence[ChordPart]) -> list[Any]:
    """The results of the header. Where a member of it ends in a group, they are a list in its place."""
    if any(one.status != SUCCESS for one in parts):
        return []
    values = {one.task_id: decode_json(one.payload) for one in parts}
    try:
        header = GroupResult.restore(group_id, app=app)
    except WireError as error:  # a peer wrote it
        log.warning(
            "cannot read the saved header of a chord; its results become one flat list",
            extra={"group_id": group_id, "why": str(error)},
        )
        header = None
    return list(values.values()) if header is None else header.arranged(values)


def time_left_s(limits: Iterable[float | None], ran_s: float) -> float:
    """Seconds that a task may wait for an unavailable broker, after it has run; then it is redelivered."""
    left_s = [limit_s - ran_s - LIMIT_MARGIN_S for limit_s in limits if limit_s and limit_s > ran_s]
    return min([STORE_WAIT_S, *left_s])


def _send_once(app: "SendingApp", group_id: str, batch: Sequence[Outgoing]) -> BodyOutcome:
    if app.eager_backend is not None:  # nothing can come in between here
        app.backend.end_chord(group_id, ())
        return BodyOutcome(follow_ups=batch)
    if app.backend.shares_settle(app.settings.broker):
        refused = app.backend.end_chord(group_id, batch)
        log_refused(refused)
        return BodyOutcome(tuple(failure for one in refused for failure in _refused_body(one)))
    # A crash in between may send the body again, under the same id.
    try:
        app.producer.publish(batch)
        left: Sequence[Outgoing] = ()
    except BrokerRefused as error:  # it has its end where the task that brought the last part is settled
        left = [batch[place] for place in error.places] or batch
    app.backend.end_chord(group_id, ())
    return BodyOutcome(follow_ups=left)


def _refused_body(refused: Refused) -> list[StoredResult]:
    """A failure for callers that wait for a body that became a dead letter."""
    assert isinstance(refused.part, Outgoing)
    error = ChordError(f"queue {refused.part.queue!r} refused the chord's body: {refused.reason}")
    return _failures([refused.part.message.correlation_id], error)


def _failed_body(
    app: "SendingApp", body_map: SignatureMap, request: Request, failed: ChordPart, run: Runner
) -> BodyOutcome:
    """The body and all behind it fail, its errbacks are called; a chord that it is a part of counts it."""
    cause = rebuild_exception(decode_json(failed.payload))
    error = ChordError(f"Dependency {failed.task_id} raised {_shown(cause)}")
    error.__cause__ = cause
    body = signature_from(body_map, app)
    behind = body.options.get("chain") or []
    follow_ups: list[Outgoing] = []
    if isinstance(body, Group):
        for member in body.members:
            errbacks = [*errbacks_of(member), *errbacks_of(body)]
            follow_ups += _told(app, member, errbacks, request, cause, run)
        results = _failures(ids_in([body_map]), cause)
    else:
        follow_ups = _told(app, body, errbacks_of(body), request, error, run)
        results = _failures(ids_in([body_map]), error)
    results += _failures(ids_in(behind), error)
    payload = encode_json(exception_map(cause if isinstance(body, Group) else error))
    outer = _counted(app, *parts_in(behind[0] if behind else body_map, FAILURE, payload), request, run)
    return BodyOutcome([*results, *outer.results], [*follow_ups, *outer.follow_ups])


def _told(
    app: "SendingApp",
    failed: Signature[Any],
    errbacks: Sequence[Any],
    part: Request,
    error: BaseException,
    run: Runner,
) -> list[Outgoing]:
    """Its errbacks are called as if it had run and failed."""
    if not errbacks:
        return []
    task_id = next(ids_in([failed.to_map()]), None) or new_id()
    request = Request(
        id=task_id,
        task=failed.task,
        args=failed.args,
        kwargs=failed.kwargs,
        root_id=part.root_id,
        parent_id=part.id,
        hostname=part.hostname,
        called_directly=False,
        is_eager=part.is_eager,
    )
    return after_failure(app, errbacks, request, error, "", run=run)


def errbacks_of(signature: Signature[Any]) -> list[Any]:
    """Those of the task whose result it has; of a chain, those of the whole."""
    own = listed(signature.options.get("link_error"))
    return [*own, *errbacks_of(signature.body)] if isinstance(signature, Chord) else own


def _shown(cause: Exception) -> str:
    """As its task would show it; a class that is not known here by its name."""
    shown = call_guarded(str if isinstance(cause, RemoteError) else repr, cause)
    return f"<{type(cause).__name__}>" if isinstance(shown, Raised) else cut(shown.value, CAUSE_MAX_CHARS)


def _failures(ids: Iterable[str], error: BaseException) -> list[StoredResult]:
    described = exception_map(error)
    return [encode_failure(task_id, described, None, done_at=time()) for task_id in ids]
