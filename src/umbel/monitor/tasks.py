"""Tasks of a monitor: filters, cursors of pages, and the diagrams of a task and of a workflow.

A filter is applied to what the model stores of a task, before a record is made of it, because making records
is expensive.

The story of a task is a space-time diagram. Within one process events follow one another. Between processes
there is one arrow for each delivery: from the event that put the message into the queue (the sending, the
retry, or the receipt by a worker that was lost) to its receipt.

A workflow is the graph of the tasks of one root. Its critical path ends with the task that ended last and
goes back from each task to its parent. This is also right for a chord: its body is sent by the part that
ended last, which the events name as the parent.
"""

import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import TypeVar

import msgspec

from umbel.errors import ConfigurationError
from umbel.events.precedence import ENDINGS, state_of
from umbel.events.state import Tracked
from umbel.events.types import EARLIER_STARTS, TaskEvent, TaskReceived, TaskSent
from umbel.events.view import TaskRecord, seconds
from umbel.monitor.records import Attempt, StoryEvent, TaskFilter, Workflow, WorkflowTask
from umbel.protocol.delivery.sensitive import Hides, hides_nothing, is_open

# ---- filters ---------------------------------------------------------------------------------------

Admits = Callable[[Tracked], bool]
Redact = Callable[[str], str]


def admits_of(wanted: TaskFilter, redact: Redact, hides: Hides = hides_nothing) -> Admits | None:
    """Return the check that each task must pass, or None if all tasks do.

    Name and worker are not checked: they are looked up in indices. Text that `redact` removes is not
    searched, and neither are the arguments of a task that `hides` names.
    """
    checks: list[Admits] = []
    if states := frozenset(name.strip().upper() for name in wanted.state.split(",") if name.strip()):
        checks.append(lambda task: task.counted in states)
    if queue := wanted.queue:
        checks.append(lambda task: task.sent is not None and task.sent.queue == queue)
    if root := wanted.root:
        checks.append(lambda task: task.uuid == root or root_of(task) == root)
    if wanted.since is not None or wanted.until is not None:
        low = wanted.since if wanted.since is not None else -inf
        high = wanted.until if wanted.until is not None else inf
        checks.append(lambda task: task.best is not None and low <= seconds(task.best.at_us) <= high)
    if wanted.text:
        checks.append(_text(wanted.text, redact, hides))
    if not checks:
        return None
    return checks[0] if len(checks) == 1 else lambda task: all(check(task) for check in checks)


def _text(text: str, redact: Redact, hides: Hides) -> Admits:
    """Return a check for a part of the name, the arguments or the error, or the beginning of the id."""
    search = re.compile(re.escape(text), re.IGNORECASE).search
    names: dict[str | None, bool] = {None: False}  # whether each name matches: names are few, and repeat

    def has(value: str | None) -> bool:
        return bool(value and search(value) and search(redact(value)))

    def is_hidden(call: TaskReceived | TaskSent) -> bool:
        return hides(call.name) and is_open(call.args, call.kwargs)

    def admits(task: Tracked) -> bool:
        name = task.name
        if name not in names:
            names[name] = search(name or "") is not None
        if names[name] or task.uuid.startswith(text):
            return True
        call = task.received if task.received is not None else task.sent
        if call is not None and (has(call.args) or has(call.kwargs)) and not is_hidden(call):
            return True
        return task.failed is not None and has(task.failed.exception)

    return admits


def root_of(task: Tracked) -> str | None:
    """Return the root of the task's workflow, as its events name it; None if they do not."""
    for described in (task.received, task.sent):
        if described is not None and described.root_id is not None:
            return described.root_id
    return None


# ---- cursors ---------------------------------------------------------------------------------------

T = TypeVar("T")
CURSOR_MAX = 2000


def encode_cursor(place: object) -> str:
    """Return the place where a page of tasks ends as text for a URL."""
    return urlsafe_b64encode(msgspec.json.encode(place)).decode("ascii").rstrip("=")


def decode_cursor(cursor: str, kind: type[T]) -> T:
    """Return the place that a cursor names; ConfigurationError if the cursor is not valid."""
    try:
        plain = urlsafe_b64decode(cursor[:CURSOR_MAX] + "=" * (-len(cursor) % 4))
        return msgspec.json.decode(plain, type=kind)
    except (Error, ValueError, msgspec.MsgspecError):
        raise ConfigurationError(
            f"{cursor[:50]!r} is not a valid cursor; use `next` of the previous page"
        ) from None


# ---- story -----------------------------------------------------------------------------------------

DETAIL_MAX = 300
_DETAILS = ("exception", "result", "queue", "name")
INTERRUPTED = "INTERRUPTED"  # no event reports the end of the attempt, and the message was redelivered
_ENDS = ENDINGS | {"retried", "rejected"}


def story_of(events: Sequence[TaskEvent]) -> tuple[list[StoryEvent], list[tuple[int, int]], list[Attempt]]:
    """Return a task's dots, the arrows between them, and its attempts, from its events in causal order."""
    deliveries = _deliveries(events)
    dots = [
        StoryEvent(
            type=event.type_name,
            at=event.timestamp,
            clock=event.clock,
            node=event.hostname,
            pid=event.pid,
            process=_process(event),
            attempt=event.retries,
            delivery=number,
            repeat=repeat,
            detail=_detail(event),
        )
        for event, (number, repeat) in zip(events, deliveries, strict=True)
    ]
    return dots, _edges(events), _attempts(events, deliveries)


def _deliveries(events: Sequence[TaskEvent]) -> list[tuple[int, str]]:
    """Return for each event the number of its delivery (0 before the first), and why that is a repeat."""
    found: list[tuple[int, str]] = []
    number, repeat = 0, ""
    previous: TaskEvent | None = None
    for event in events:
        if isinstance(event, TaskReceived):
            number += 1
            if number > 1:
                repeat = "retried" if previous is not None and previous.slot == "retried" else "redelivered"
            if event.extra and isinstance(starts := event.extra.get(EARLIER_STARTS), int):
                repeat = f"requeued after {starts} starts"
        found.append((number, repeat))
        if event.slot != "sent":
            previous = event
    return found


def _edges(events: Sequence[TaskEvent]) -> list[tuple[int, int]]:
    edges: list[tuple[int, int]] = []
    last: dict[str, int] = {}
    for index, event in enumerate(events):
        if isinstance(event, TaskReceived):
            cause = _cause(events, index)
            if cause is not None:
                edges.append((cause, index))
        process = _process(event)
        if process in last and not isinstance(event, TaskReceived):
            edges.append((last[process], index))
        last[process] = index
    return edges


def _process(event: TaskEvent) -> str:
    return f"client {event.hostname}" if isinstance(event, TaskSent) else event.hostname


def _cause(events: Sequence[TaskEvent], index: int) -> int | None:
    """Return the index of the newest earlier event that can have queued the message that was received."""
    earlier = range(index - 1, -1, -1)
    return next((at for at in earlier if events[at].slot in ("sent", "retried", "received", "started")), None)


def _attempts(events: Sequence[TaskEvent], deliveries: Sequence[tuple[int, str]]) -> list[Attempt]:
    attempts: list[Attempt] = []
    waits_since: float | None = None
    for number in sorted({number for number, _ in deliveries}):
        own = [event for event, (of, _) in zip(events, deliveries, strict=True) if of == number]
        if number:
            repeat = next(why for of, why in deliveries if of == number)
            found = _attempt(number, repeat, own, waits_since)
            is_over = found.ended_at is None and number < deliveries[-1][0]
            attempts.append(msgspec.structs.replace(found, state=INTERRUPTED) if is_over else found)
        queued = [event.timestamp for event in own if event.slot in ("sent", "retried")]
        waits_since = queued[-1] if queued else waits_since
    return attempts


def _attempt(number: int, repeat: str, own: Sequence[TaskEvent], waits_since: float | None) -> Attempt:
    at = {event.slot: event.timestamp for event in own}
    ends = [event for event in own if event.slot in _ENDS]
    ended_at = ends[-1].timestamp if ends else None
    started_at = at.get("started")
    began = waits_since if waits_since is not None else at.get("received")
    last = ends[-1] if ends else own[-1]
    runtime = getattr(last, "runtime", None)
    if runtime is None and ended_at is not None and started_at is not None:
        runtime = max(0.0, ended_at - started_at)
    return Attempt(
        attempt=max((event.retries or 0 for event in own), default=0),
        delivery=number,
        node=last.hostname,
        state=state_of(last),
        received_at=at.get("received"),
        started_at=started_at,
        ended_at=ended_at,
        wait_s=None if started_at is None or began is None else max(0.0, started_at - began),
        run_s=runtime,
        repeat=repeat,
        error=(getattr(last, "exception", None) or "")[:DETAIL_MAX],
    )


def _detail(event: TaskEvent) -> str:
    found = next((value for field in _DETAILS if (value := getattr(event, field, None)) is not None), "")
    return str(found)[:DETAIL_MAX]


# ---- workflow --------------------------------------------------------------------------------------


def workflow_of(root_id: str, records: Sequence[TaskRecord], more: int = 0) -> Workflow:
    """Return the graph of a workflow's tasks with its critical path; `more` tasks are beyond the limit."""
    known = {record.uuid: record for record in records}
    critical = _critical(known)
    path = set(critical)
    tasks = [_workflow_task(record, record.uuid in path) for record in sorted(records, key=_order)]
    edges = [
        (record.parent_id, record.uuid)
        for record in records
        if record.parent_id in known and record.parent_id
    ]
    begins = [at for task in tasks if (at := task.sent_at or task.started_at) is not None]
    ends = [task.ended_at for task in tasks if task.ended_at is not None]
    return Workflow(
        root_id=root_id,
        tasks=tasks,
        edges=sorted(edges),
        critical=critical,
        duration_s=max(0.0, max(ends) - min(begins)) if begins and ends else None,
        more=more,
    )


def _ended_at(task: TaskRecord) -> float | None:
    """Return when the task last ended, by success, failure or revocation; None if it has not."""
    ends = (task.succeeded_at, task.failed_at, task.revoked_at)
    return max((at for at in ends if at is not None), default=None)


def _critical(known: Mapping[str, TaskRecord]) -> list[str]:
    """Return the ids on the critical path, the first task first; parents may form a loop in forged events."""
    ended = {uuid: at for uuid, task in known.items() if (at := _ended_at(task)) is not None}
    # A task that sent another task does not end the path, even if its worker reports the end later.
    parents = {known[uuid].parent_id for uuid in ended}
    last = max(((at, uuid) for uuid, at in ended.items() if uuid not in parents), default=None)
    path: dict[str, None] = {}
    step = None if last is None else last[1]
    while step is not None and step in known and step not in path:
        path[step] = None
        step = known[step].parent_id
    return list(path)[::-1]


def _order(task: TaskRecord) -> tuple[float, int, str]:
    first = task.first_sent_at or task.first_received_at or task.first_started_at or task.state_at or 0.0
    return (first, task.clock, task.uuid)


def _workflow_task(task: TaskRecord, is_critical: bool) -> WorkflowTask:
    return WorkflowTask(
        uuid=task.uuid,
        name=task.name or "",
        state=task.state,
        parent_id=task.parent_id or "",
        worker=task.worker or "",
        sent_at=task.first_sent_at or task.first_received_at,
        started_at=task.started_at,
        ended_at=_ended_at(task),
        is_critical=is_critical,
    )
