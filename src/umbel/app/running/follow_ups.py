"""Follow-ups: the messages that the end of a run causes. Callbacks and errbacks, the next step of the chain,
the body of a chord whose last part has ended, and the results of steps that will never run.

The child that ran the task makes them. The worker sends them in the step that settles the message, so a crash
in between repeats the task and never loses what follows it.

Order and fields are those of Celery: callbacks first, then the next step of the chain; both get the result as
their first argument unless they are immutable. An errback gets the id of the failed task. If it can take
three arguments more than it has, it is called at once, with (request, error, traceback).
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from inspect import iscoroutine
from time import time
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import msgspec

from umbel.app.canvas.group import Chord, Group
from umbel.app.canvas.signature import Signature, listed, signature_from
from umbel.app.request import Request
from umbel.app.results import GroupResult, rebuild_exception
from umbel.app.running.awaiting import run_to_end
from umbel.app.sending.preparation import Prepared, new_id
from umbel.backends.interface import ChordPart
from umbel.brokers.interface import Refused
from umbel.brokers.refusals import log_refused
from umbel.errors import BrokerRefused, ChordError, RemoteError, WireError
from umbel.pools.guard import Raised, call_guarded
from umbel.protocol.delivery.states import FAILURE, SUCCESS
from umbel.wire.call import TaskCall
from umbel.wire.message import Outgoing, StoredResult
from umbel.wire.result import ExceptionMap, encode_failure, exception_map
from umbel.wire.show import cut
from umbel.wire.steps import SignatureMap, readable_steps, step_map
from umbel.wire.values import decode_json, encode_json

if TYPE_CHECKING:
    from umbel.app.app import App


log = logging.getLogger("umbel.task")

# ---- steps that never run --------------------------------------------------------------------------
#
# If a step fails, the steps behind it never run. Callers that wait for one of them must get a failure, and a
# chord must count it as failed. A step is a map as it travels in messages; a map in another form has no
# tasks.

Options = Mapping[str, Any]


def steps_that_never_run(
    call: TaskCall, error: ExceptionMap, traceback: str, *, status: str, done_at: float
) -> Iterable[StoredResult]:
    """Failures for the rest of a chain, so that callers that wait for those tasks get an answer."""
    for task_id in ids_in(readable_steps(call.embed.chain or ())):
        yield encode_failure(task_id, error, traceback, status=status, done_at=done_at)


def ids_in(steps: Iterable[object]) -> Iterator[str]:
    """The ids of all tasks in these steps, also inside chains, groups and chords."""
    for step in steps:
        whole = step if isinstance(step, dict) else {}
        kind, inside = whole.get("subtask_type"), _inside(whole)
        options = whole.get("options")
        task_id = options.get("task_id") if isinstance(options, dict) else None
        if kind not in _COMPOSED and isinstance(task_id, str) and task_id:
            yield task_id
        yield from ids_in(part for several in inside.values() for part in several)


def parts_in(step: object, status: str, payload: bytes) -> tuple[list[ChordPart], SignatureMap | None]:
    """The chord parts at the end of this step, with this status, and the body of their chord."""
    ends = [end for end in _ends_of(step) if end.get("group_id") and end.get("task_id")]
    parts = [
        ChordPart(end["group_id"], end.get("group_index"), end["task_id"], status, payload) for end in ends
    ]
    return parts, ends[0]["chord"] if ends else None


def _ends_of(step: object) -> list[Options]:
    """The options of the tasks with which a step ends, if they belong to a chord. A group ends with all
    members.
    """
    whole = step if isinstance(step, dict) else {}
    inside, options = _inside(whole), whole.get("options")
    match whole.get("subtask_type"):
        case "chain":
            ends = inside.get("tasks", [])[-1:]
        case "chord":
            ends = inside.get("body", [])
        case "group":
            ends = inside.get("tasks", [])
        case _:
            return [options] if isinstance(options, dict) and options.get("chord") else []
    return [found for end in ends for found in _ends_of(end)]


_COMPOSED = frozenset({"chain", "group", "chord"})


def _inside(whole: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The signatures inside a chain, a group or a chord, as lists."""
    kwargs = whole.get("kwargs")
    if whole.get("subtask_type") not in _COMPOSED or not isinstance(kwargs, dict):
        return {}
    named = {name: kwargs[name] for name in ("tasks", "header", "body") if kwargs.get(name) is not None}
    lists = {name: list(part) if isinstance(part, list | tuple) else [part] for name, part in named.items()}
    return {name: [part for part in items if isinstance(part, dict)] for name, items in lists.items()}


# ---- callbacks and errbacks ------------------------------------------------------------------------


def after_success(app: "App", call: TaskCall, request: Request, value: Any) -> list[Outgoing]:
    """The messages of callbacks and of the chain's next step, which are given the value."""
    embed = call.embed
    sent: list[Outgoing] = []
    for callback in embed.callbacks or ():
        sent += _linked(app, callback, [value], request)
    if embed.chain:
        *remaining, following = embed.chain
        signature = signature_from(following, app).clone([value])
        # A plain task passes the rest of the chain on unread; a group puts it into each member's message.
        is_plain = type(signature) is Signature
        signature.options["chain"] = remaining if is_plain else [step_map(step) for step in remaining]
        sent += _sent_by(request, signature.prepare(sender=request))
    return sent


Runner = Callable[[Callable[[], object]], object]
"""Runs code of users."""


def run_here(work: Callable[[], object]) -> object:
    """Run code of users in this thread."""
    return work()


def after_failure(
    app: "App",
    errbacks: Sequence[SignatureMap | Signature[Any]] | None,
    request: Request,
    error: BaseException,
    traceback: str,
    *,
    run: Runner = run_here,
) -> list[Outgoing]:
    """Call or prepare the errbacks. If one of them raises, that is logged, and the others are still sent.

    `run` calls the errbacks that take the error itself, because a worker's loop must not run code of users.
    """
    sent: list[Outgoing] = []
    for errback in errbacks or ():
        happened = call_guarded(_errback_ended, app, errback, request, error, traceback, run)
        if isinstance(happened, Raised):
            log.error(
                "errback raised an exception",
                extra={"task_id": request.id, "errback": errback},
                exc_info=happened.error,
            )
        else:
            sent += happened.value
    return sent


def _errback_ended(
    app: "App",
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
    value = signature(*facts)
    if iscoroutine(value):
        run_to_end(value)


def _takes(app: "App", signature: Signature[Any], facts: tuple[object, ...]) -> bool:
    """Whether the errback can be called with these facts in front of its arguments."""
    task = app.tasks.get(signature.task)
    if task is None or signature.immutable:
        return False
    try:
        task.check_arguments([*facts, *signature.args], signature.kwargs)
    except TypeError:
        return False
    return True


def _linked(app: "App", linked: Any, args: list[Any], request: Request) -> list[Outgoing]:
    signature = signature_from(linked, app).clone(args)
    signature.options.setdefault("group_id", str(uuid4()))
    return _sent_by(request, signature.prepare(sender=request))


def _sent_by(request: Request, batch: Sequence[Prepared]) -> list[Outgoing]:
    request.sent(prepared.task_id for prepared in batch)
    return [prepared.outgoing for prepared in batch]


# ---- parts of a chord ------------------------------------------------------------------------------
#
# The backend counts the parts, each of them once however often it is delivered. The task that brings the last
# part sends the body. If broker and backend are one, sending the body and recording it are one step, so the
# body is sent once. Keys and forms are Celery's: parts of one chord may run on both kinds of worker.

STORE_WAIT_S = 60.0
LIMIT_MARGIN_S = 0.5
CAUSE_MAX_CHARS = 1024
UNCOUNTED = (
    "cannot count a failed task in its chord: the chord's callback never runs, and its result never comes; "
    "fix the cause, and send the chord again"
)


class BodyOutcome(msgspec.Struct, frozen=True):
    """The results and messages for the body that the backend has not written itself."""

    results: Sequence[StoredResult] = ()
    follow_ups: Sequence[Outgoing] = ()


NOTHING_FOLLOWS = BodyOutcome()


def part_ended(
    app: "App",
    call: TaskCall,
    request: Request,
    status: str,
    value: object,
    *,
    run: Runner = run_here,
) -> BodyOutcome:
    """Count a task that has its final state in its chord, and send the body after the last part.

    A call after a failure continues: a part counts once, and the body is sent once. `run` calls the errbacks
    that take the error itself. BrokerUnavailable does not concern the task: wait, or leave it to redelivery.
    """
    payload, counting = encode_json(value), _Counting(app, request, run)
    if call.embed.chord is not None and request.group:
        part = ChordPart(request.group, request.group_index, request.id, status, payload)
        return counting.add([part], call.embed.chord)
    if status == SUCCESS or not call.embed.chain:
        return NOTHING_FOLLOWS
    # The end of its chain, which would have been the part, never runs.
    (last,) = readable_steps(call.embed.chain[:1]) or [None]
    return counting.add(*parts_in(last, status, payload))


def time_left_s(limits: Iterable[float | None], ran_s: float) -> float:
    """Seconds that a task which has run may wait for an unavailable broker; after that it is redelivered."""
    left_s = [limit_s - ran_s - LIMIT_MARGIN_S for limit_s in limits if limit_s and limit_s > ran_s]
    return min([STORE_WAIT_S, *left_s])


class _Counting:
    """Counts parts of chords for the task of a request, and sends or fails the body after the last part."""

    def __init__(self, app: "App", request: Request, run: Runner) -> None:
        self._app = app
        self._request = request
        self._run = run

    def add(self, ended: Sequence[ChordPart], body_map: SignatureMap | None) -> BodyOutcome:
        backend, request = self._app.backend, self._request
        parts: Sequence[ChordPart] | None = None
        try:
            for part in ended:
                parts = backend.add_chord_part(part)
            if parts is None or not backend.claim_chord(part.group_id, part.task_id):
                return NOTHING_FOLLOWS
            values, failed = _read(parts)
            arranged = self._arranged(part.group_id, values) if failed is None else []
        except BrokerRefused as refused:  # the task keeps its outcome, and the body fails
            error = ChordError(f"cannot count part {request.id} of the chord, so the chord fails: {refused}")
            log.error(
                "cannot count a finished chord part; the chord fails",
                extra={"task_id": request.id, "why": str(refused)},
            )
            return BodyOutcome(_failures(ids_in([body_map]), error))
        assert body_map is not None, "parts name their body"
        if failed is not None:
            outcome = self._fail_body(body_map, failed)
            backend.end_chord(part.group_id, ())
            return outcome
        batch = signature_from(body_map, self._app).clone([arranged]).prepare(sender=request)
        request.children.extend(prepared.task_id for prepared in batch)
        return self._send_once(part.group_id, [prepared.outgoing for prepared in batch])

    def _arranged(self, group_id: str, values: dict[str, Any]) -> list[Any]:
        """The results of the header. A member that ends in a group has a list in its place."""
        try:
            header = GroupResult.restore(group_id, app=self._app)
        except WireError as error:  # written by another program
            log.warning(
                "cannot read the saved header of a chord; its results become one flat list",
                extra={"group_id": group_id, "why": str(error)},
            )
            header = None
        return list(values.values()) if header is None else header.arranged(values)

    def _send_once(self, group_id: str, messages: Sequence[Outgoing]) -> BodyOutcome:
        app, backend = self._app, self._app.backend
        if app.eager_backend is not None:  # nothing can happen in between here
            backend.end_chord(group_id, ())
            return BodyOutcome(follow_ups=messages)
        if backend.shares_settle(app.settings.broker):
            refused = backend.end_chord(group_id, messages)
            log_refused(refused)
            return BodyOutcome(tuple(failure for refusal in refused for failure in _refused_body(refusal)))
        # A crash in between may send the body again, under the same id.
        try:
            app.producer.publish(messages)
            unsent: Sequence[Outgoing] = ()
        except (
            BrokerRefused
        ) as error:  # refused again when the last part is settled, and becomes a dead letter
            unsent = [messages[place] for place in error.places] or messages
        backend.end_chord(group_id, ())
        return BodyOutcome(follow_ups=unsent)

    def _fail_body(self, body_map: SignatureMap, failed: ChordPart) -> BodyOutcome:
        """Fail the body and all that follows it, and call its errbacks. An outer chord counts the failure."""
        cause = rebuild_exception(decode_json(failed.payload))
        error = ChordError(f"Dependency {failed.task_id} raised {_shown(cause)}")
        error.__cause__ = cause
        body = signature_from(body_map, self._app)
        behind = body.options.get("chain") or []
        reported: Exception = error
        follow_ups: list[Outgoing] = []
        if isinstance(body, Group):
            reported = cause
            for member in body.members:
                follow_ups += self._call_errbacks(member, [*errbacks_of(member), *errbacks_of(body)], cause)
        else:
            follow_ups = self._call_errbacks(body, errbacks_of(body), error)
        results = [*_failures(ids_in([body_map]), reported), *_failures(ids_in(behind), error)]
        payload = encode_json(exception_map(reported))
        outer = self.add(*parts_in(behind[0] if behind else body_map, FAILURE, payload))
        return BodyOutcome([*results, *outer.results], [*follow_ups, *outer.follow_ups])

    def _call_errbacks(
        self, failed: Signature[Any], errbacks: Sequence[Any], error: BaseException
    ) -> list[Outgoing]:
        """Call the errbacks of a task that never ran, as if it had run and failed."""
        if not errbacks:
            return []
        part = self._request
        request = Request(
            id=next(ids_in([failed.to_map()]), None) or new_id(),
            task=failed.task,
            args=failed.args,
            kwargs=failed.kwargs,
            root_id=part.root_id,
            parent_id=part.id,
            hostname=part.hostname,
            called_directly=False,
            is_eager=part.is_eager,
            signs_for=part.signs_for,
        )
        return after_failure(self._app, errbacks, request, error, "", run=self._run)


def _read(parts: Sequence[ChordPart]) -> tuple[dict[str, Any], ChordPart | None]:
    """The results by task, and the first part that failed or whose result cannot be read."""
    values: dict[str, Any] = {}
    for part in parts:
        try:
            values[part.task_id] = decode_json(part.payload)
        except WireError as error:
            lost = exception_map(ChordError(f"its result in the chord cannot be read: {error}"))
            return {}, msgspec.structs.replace(part, status=FAILURE, payload=encode_json(lost))
        if part.status != SUCCESS:
            return {}, part
    return values, None


def _refused_body(refused: Refused) -> list[StoredResult]:
    """A failure for callers that wait for a body that became a dead letter."""
    assert isinstance(refused.part, Outgoing)
    error = ChordError(f"queue {refused.part.queue!r} refused the chord's body: {refused.reason}")
    return _failures([refused.part.message.correlation_id], error)


def errbacks_of(signature: Signature[Any]) -> list[Any]:
    """The errbacks of the task whose result the signature has; of a chain, those of the whole."""
    own = listed(signature.options.get("link_error"))
    return [*own, *errbacks_of(signature.body)] if isinstance(signature, Chord) else own


def _shown(cause: Exception) -> str:
    """The exception as its task would show it; if its class is unknown here, the name of the class."""
    shown = call_guarded(str if isinstance(cause, RemoteError) else repr, cause)
    return f"<{type(cause).__name__}>" if isinstance(shown, Raised) else cut(shown.value, CAUSE_MAX_CHARS)


def _failures(ids: Iterable[str], error: BaseException) -> list[StoredResult]:
    what = exception_map(error)
    return [encode_failure(task_id, what, None, done_at=time()) for task_id in ids]
