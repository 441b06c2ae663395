"""Chord parts: they are counted as they end, and after the last one the body is sent.

The backend counts the parts, each once however often it is delivered. The task that brings the last
one sends the body; the sending and the mark that it was sent are one step where broker and backend are
one, so the body is sent once. Keys and forms are Celery's: parts of one chord may run on both kinds
of worker.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import time
from typing import TYPE_CHECKING, Any

from umbel.app.canvas.signature import Chain, Signature, signature_from
from umbel.app.running.request import Request
from umbel.backends.interface import ChordPart
from umbel.brokers.interface import Refused
from umbel.brokers.refusals import log_refused
from umbel.errors import BrokerRefused, ChordError
from umbel.protocol.delivery.states import SUCCESS
from umbel.wire.message import Outgoing, StoredResult
from umbel.wire.result import encode_failure, exception_map
from umbel.wire.task import SignatureMap, TaskCall
from umbel.wire.values import decode_json, encode_json

if TYPE_CHECKING:
    from umbel.app.interfaces import SendingApp

log = logging.getLogger("umbel.task")
STORE_WAIT_S = 60.0
LIMIT_MARGIN_S = 0.5


@dataclass(frozen=True, slots=True)
class BodyOutcome:
    """What is left to store and to send for the body, beside what the backend has done."""

    results: Sequence[StoredResult] = ()
    follow_ups: Sequence[Outgoing] = ()


NOTHING_FOLLOWS = BodyOutcome()


def part_ended(
    app: "SendingApp", call: TaskCall, request: Request, status: str, value: object
) -> BodyOutcome:
    """A task has its final state: if it is a part of a chord count it, and after the last send the body.

    Called again after a failure it continues: a part counts once, and the body is sent once.
    BrokerUnavailable says nothing of the task: wait, or leave it to redelivery.
    """
    ended, body_map = _parts_of(call, request, status, value)
    parts: Sequence[ChordPart] | None = None
    try:
        for part in ended:
            parts = app.backend.add_chord_part(part)
        if parts is None or not app.backend.claim_chord(part.group_id, part.task_id):
            return NOTHING_FOLLOWS
    except BrokerRefused as refused:  # the task keeps its outcome, and the body fails
        error = ChordError(f"cannot count part {request.id} of the chord: {refused}")
        log.error(
            "cannot count a finished chord part; the chord fails",
            extra={"task_id": request.id, "why": str(refused)},
        )
        return BodyOutcome(_failures(_ids_of(signature_from(body_map, app)), error))
    body = signature_from(body_map, app)
    failed = next((one for one in parts if one.status != SUCCESS), None)
    if failed is not None:
        app.backend.end_chord(part.group_id, ())
        return _failed_body(app, body, request, failed)
    results = [decode_json(one.payload) for one in parts]
    prepared = body.clone([results]).prepare(sender=request)
    request.children.extend(one.task_id for one in prepared)
    return _send_once(app, part.group_id, [one.outgoing for one in prepared])


def time_left_s(limits: Iterable[float | None], ran_s: float) -> float:
    """Seconds that a task may wait for an unavailable broker, after it has run; then it is redelivered."""
    left_s = [limit_s - ran_s - LIMIT_MARGIN_S for limit_s in limits if limit_s and limit_s > ran_s]
    return min([STORE_WAIT_S, *left_s])


def _parts_of(
    call: TaskCall, request: Request, status: str, value: object
) -> tuple[list[ChordPart], SignatureMap | None]:
    """The part that this task is, or, when it failed, those that the end of its chain would be; the body."""
    payload = encode_json(value)
    if call.embed.chord is not None and request.group:
        return [ChordPart(request.group, request.group_index, request.id, status, payload)], call.embed.chord
    if status == SUCCESS or not call.embed.chain:
        return [], None
    found = _ends_of(call.embed.chain[0])
    ends = [options for options in found if options.get("group_id") and options.get("task_id")]
    parts = [
        ChordPart(options["group_id"], options.get("group_index"), options["task_id"], status, payload)
        for options in ends
    ]
    return parts, ends[0]["chord"] if ends else None


def _ends_of(step: object) -> list[Mapping[str, Any]]:
    """The options of the tasks at the end of a step that belong to a chord: of a group, those of all.

    What a peer wrote in another form has none.
    """
    whole = step if isinstance(step, dict) else {}
    kwargs, options, kind = whole.get("kwargs"), whole.get("options"), whole.get("subtask_type")
    contents = kwargs if isinstance(kwargs, dict) else {}
    tasks = contents.get("tasks")
    inner = tasks if isinstance(tasks, list) else []
    match kind:
        case "chain":
            inner = inner[-1:]
        case "chord":
            inner = [contents.get("body")]
        case "group":
            pass
        case _:
            return [options] if isinstance(options, dict) and options.get("chord") else []
    return [found for one in inner for found in _ends_of(one)]


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


def _failed_body(app: "SendingApp", body: Signature[Any], request: Request, failed: ChordPart) -> BodyOutcome:
    error = ChordError(f"part {failed.task_id} of the chord ended as {failed.status}")
    ids = _ids_of(body)
    errbacks = body.options.get("link_error") or []
    follow_ups: list[Outgoing] = []
    for errback in errbacks if isinstance(errbacks, list) else [errbacks]:
        prepared = signature_from(errback, app).clone([ids[0]] if ids else []).prepare(sender=request)
        follow_ups += [one.outgoing for one in prepared]
    return BodyOutcome(_failures(ids, error), follow_ups)


def _ids_of(body: Signature[Any]) -> list[str]:
    steps = body.steps if isinstance(body, Chain) else [body]
    return [step.options["task_id"] for step in steps if "task_id" in step.options]


def _failures(ids: Sequence[str], error: ChordError) -> list[StoredResult]:
    described = exception_map(error)
    return [encode_failure(task_id, described, None, done_at=time()) for task_id in ids]
