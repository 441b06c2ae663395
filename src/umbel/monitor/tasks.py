"""Tasks of a monitor: which are listed, on which page, and the diagrams of a task and of a workflow.

A filter is judged on what the model stores of a task, before a record is made of it. A page ends with a
cursor that a URL carries. The story of a task is a space-time diagram: within one process events follow one
another; between processes there is one arrow for each delivery, from what put the message into the queue (the
sending, the retry, the receipt that was abandoned) to its receipt. A workflow is the graph of the tasks of
one root; its critical path ends with the task that ended last and goes back through what each task waited
for: its parent, and for a chord's body the part that ended last, which the events name as its parent.
"""

import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec

from umbel.errors import ConfigurationError
from umbel.events.order import Key
from umbel.events.precedence import ENDINGS, state_of
from umbel.events.state import Tracked
from umbel.events.types import EARLIER_STARTS, TaskEvent, TaskReceived, TaskSent
from umbel.events.view import TaskRecord, seconds
from umbel.monitor.records import Attempt, StoryEvent, TaskFilter, Workflow, WorkflowTask
from umbel.protocol.delivery.sensitive import Hides, hides_nothing, is_open

# ---- filters ---------------------------------------------------------------------------------------
#
# Which tasks match, judged on what the model stores of each before a record is made of it.

Admits = Callable[[Tracked], bool]
Redact = Callable[[str], str]


def admits_of(wanted: TaskFilter, redact: Redact, hides: Hides = hides_nothing) -> Admits | None:
    """Return the check that each task must pass, or None if all do; name and worker have separate indices.

    Text that `redact` removes is not searched, and neither are arguments that are stored unmasked of a task
    that `hides` them.
    """
    checks = [check for check in (_state(wanted), _queue(wanted), _root(wanted), _time(wanted)) if check]
    if wanted.text:
        checks.append(_text(wanted.text, redact, hides))
    if not checks:
        return None
    return checks[0] if len(checks) == 1 else lambda task: all(check(task) for check in checks)


def _state(wanted: TaskFilter) -> Admits | None:
    states = frozenset(name.strip().upper() for name in wanted.state.split(",") if name.strip())
    return (lambda task: task.counted in states) if states else None


def _queue(wanted: TaskFilter) -> Admits | None:
    queue = wanted.queue
    return (lambda task: task.sent is not None and task.sent.queue == queue) if queue else None


def _root(wanted: TaskFilter) -> Admits | None:
    root = wanted.root
    return (lambda task: task.uuid == root or root_of(task) == root) if root else None


def _time(wanted: TaskFilter) -> Admits | None:
    since, until = wanted.since, wanted.until
    if since is None and until is None:
        return None
    low, high = since if since is not None else float("-inf"), until if until is not None else float("inf")
    return lambda task: task.best is not None and low <= seconds(task.best.at_us) <= high


def _text(text: str, redact: Redact, hides: Hides) -> Admits:
    found = re.compile(re.escape(text), re.IGNORECASE).search
    named: dict[str | None, bool] = {None: False}  # names are few, and repeat

    def has(shown: str | None) -> bool:
        return bool(shown and found(shown) and found(redact(shown)))

    def is_shown(described: TaskReceived | TaskSent) -> bool:
        return not (hides(described.name) and is_open(described.args, described.kwargs))

    def is_in(task: Tracked) -> bool:
        name = task.name
        if name not in named:
            named[name] = found(name or "") is not None
        if named[name] or task.uuid.startswith(text):
            return True
        described = task.received if task.received is not None else task.sent
        if described is not None and (has(described.args) or has(described.kwargs)) and is_shown(described):
            return True
        return task.failed is not None and has(task.failed.exception)

    return is_in


def root_of(task: Tracked) -> str | None:
    """Return the id of the workflow's root that the task's events name; None if they name none."""
    for described in (task.received, task.sent):
        if described is not None and described.root_id is not None:
            return described.root_id
    return None


# ---- cursors ---------------------------------------------------------------------------------------
#
# Where a page of tasks ended, as text that a URL carries. Anything else is refused.

T = TypeVar("T")
CURSOR_MAX = 2000


def shown_key(key: Key) -> str:
    """Return the cursor of a page that is ordered by Lamport clock."""
    return _encoded_cursor(key)


def read_key(cursor: str) -> Key:
    """Return the position that a cursor by Lamport clock names; ConfigurationError if it is not valid."""
    return _decoded_cursor(cursor, tuple[int, int, str, int, str])


def shown_time(at_us: int, uuid: str) -> str:
    """Return the cursor of a page that is ordered by time."""
    return _encoded_cursor((at_us, uuid))


def read_time(cursor: str) -> tuple[int, str]:
    """Return the position that a cursor by time names; ConfigurationError if it is not valid."""
    return _decoded_cursor(cursor, tuple[int, str])


def _encoded_cursor(value: object) -> str:
    return urlsafe_b64encode(msgspec.json.encode(value)).decode("ascii").rstrip("=")


def _decoded_cursor(cursor: str, kind: type[T]) -> T:
    try:
        plain = urlsafe_b64decode(cursor[:CURSOR_MAX] + "=" * (-len(cursor) % 4))
        return msgspec.json.decode(plain, type=kind)
    except (Error, ValueError, msgspec.MsgspecError):
        raise ConfigurationError(
            f"{cursor[:50]!r} is not a valid cursor; use `next` of the previous page"
        ) from None


# ---- story -----------------------------------------------------------------------------------------
#
# One task as a space-time diagram: its events on the lanes of processes, and which caused which.
#
# Within one process events follow one another. Between processes there is one arrow for each delivery: from
# what put the message into the queue (the sending, the retry, the receipt that was abandoned) to its
# receipt. A receipt that is not the first of its attempt is a repeat: the message was redelivered.

DETAIL_MAX = 300
_DETAILS = ("exception", "result", "queue", "name")
INTERRUPTED = "INTERRUPTED"  # no event of its end, and the message was redelivered
_ENDS = ENDINGS | {"retried", "rejected"}


def story_of(events: Sequence[TaskEvent]) -> tuple[list[StoryEvent], list[tuple[int, int]], list[Attempt]]:
    """Return the dots, the arrows between them, and the attempts, from a task's events in causal order."""
    deliveries = _deliveries(events)
    dots = [
        StoryEvent(
            type=event.type_name,
            at=event.timestamp,
            clock=event.clock,
            node=event.hostname,
            pid=event.pid,
            process=f"client {event.hostname}" if isinstance(event, TaskSent) else event.hostname,
            attempt=event.retries,
            delivery=number,
            repeat=repeat,
            detail=_detail(event),
        )
        for event, (number, repeat) in zip(events, deliveries, strict=True)
    ]
    return dots, _edges(events), _attempts(events, deliveries)


def _deliveries(events: Sequence[TaskEvent]) -> list[tuple[int, str]]:
    """Return for each event the number of its delivery, from 1 (0: before any), and why that is a repeat."""
    found: list[tuple[int, str]] = []
    number, repeat = 0, ""
    given_up: TaskEvent | None = None
    for event in events:
        if isinstance(event, TaskReceived):
            number += 1
            if number > 1:
                repeat = "retried" if given_up is not None and given_up.slot == "retried" else "redelivered"
            if event.extra and isinstance(starts := event.extra.get(EARLIER_STARTS), int):
                repeat = f"requeued after {starts} starts"
        found.append((number, repeat))
        if event.slot != "sent":
            given_up = event
    return found


def _edges(events: Sequence[TaskEvent]) -> list[tuple[int, int]]:
    edges: list[tuple[int, int]] = []
    last: dict[str, int] = {}
    for index, event in enumerate(events):
        if isinstance(event, TaskReceived):
            cause = _cause(events, index)
            if cause is not None:
                edges.append((cause, index))
        lane = f"client {event.hostname}" if isinstance(event, TaskSent) else event.hostname
        if lane in last and not isinstance(event, TaskReceived):
            edges.append((last[lane], index))
        last[lane] = index
    return edges


def _cause(events: Sequence[TaskEvent], index: int) -> int | None:
    """Return the index of the newest earlier event that can have queued the message that was received."""
    for before in range(index - 1, -1, -1):
        if events[before].slot in ("sent", "retried", "received", "started"):
            return before
    return None


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
#
# The tasks of one root as a graph, and the path through it that decided when it ended.
#
# An edge is from a task to one that it sent. The critical path ends with the task that ended last and goes
# back through what each waited for. A task waits for its parent; a chord's body is sent by the part that
# ended last, which the events name as its parent, so the path runs through the slowest part.


def workflow_of(root_id: str, records: Sequence[TaskRecord], more: int = 0) -> Workflow:
    """Return the graph of a workflow's tasks with its critical path; `more` tasks are beyond the limit."""
    known = {record.uuid: record for record in records}
    critical = _critical(known)
    path = frozenset(critical)
    tasks = [_shown(record, record.uuid in path) for record in sorted(records, key=_order)]
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


def ended_at(task: TaskRecord) -> float | None:
    """Return when the task last ended, by success, failure or revocation; None if it has not."""
    return max(
        (at for at in (task.succeeded_at, task.failed_at, task.revoked_at) if at is not None), default=None
    )


def _critical(known: Mapping[str, TaskRecord]) -> list[str]:
    # A task that sent another one cannot be the end, even if its worker reported the end later.
    sent = {task.parent_id for task in known.values() if ended_at(task) is not None}
    ended = [
        (at, task.uuid)
        for task in known.values()
        if (at := ended_at(task)) is not None and task.uuid not in sent
    ]
    if not ended:
        return []
    _, last = max(ended)
    path: list[str] = []
    step: str | None = last
    while step is not None and step in known and step not in path:
        path.append(step)
        step = known[step].parent_id
    return path[::-1]


def _order(task: TaskRecord) -> tuple[float, int, str]:
    first = task.first_sent_at or task.first_received_at or task.first_started_at or task.state_at or 0.0
    return (first, task.clock, task.uuid)


def _shown(task: TaskRecord, is_critical: bool) -> WorkflowTask:
    return WorkflowTask(
        uuid=task.uuid,
        name=task.name or "",
        state=task.state,
        parent_id=task.parent_id or "",
        worker=task.worker or "",
        sent_at=task.first_sent_at or task.first_received_at,
        started_at=task.started_at,
        ended_at=ended_at(task),
        is_critical=is_critical,
    )
