"""Records: what a monitor answers, as plain structs that pages, the web API and `--json` share.

Times are Unix seconds, and the names of durations end in `_s`. Records leave the process, so their arguments,
results and tracebacks are redacted and cut (`redaction.py`). Waiting messages and dead letters become rows
here, so that commands and pages show the same.
"""

from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import msgspec

from umbel.brokers.interface import DeadLetter, Delivery
from umbel.errors import WireError
from umbel.events.view import TaskRecord
from umbel.protocol.delivery.redaction import is_secret, redact
from umbel.protocol.delivery.sensitive import MASK, Hides, hides_nothing, is_open
from umbel.wire.call import TaskHeaders, read_headers
from umbel.wire.task import to_v2

Moment = Annotated[float, msgspec.Meta(ge=0, le=100_000_000_000)]
"""A Unix time within the range of calendars, and not NaN."""
NodeState = Literal["alive", "suspect", "lost", "left"]
Level = Literal["ok", "warning", "bad"]


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A member of the cluster, an Umbel or a Celery worker.

    `leads` has the names of the leases that the node holds. `seen_by` is the number of nodes that consider it
    alive, and `differs` has the state that other nodes report instead, by their names. Both are empty in a
    cluster of Celery nodes, which report no opinions.
    """

    node: str
    state: NodeState
    software: str = "unknown"
    version: str = ""
    pid: int = 0
    incarnation: int = 0
    clock: int = 0
    freq_s: float = 0.0
    silent_s: float = 0.0
    since_s: float = 0.0
    reason: str = ""
    active: int = 0
    processed: int = 0
    load: float | None = None
    messages_per_s: float = 0.0  # the node's heartbeats
    queues: list[str] = []
    leads: list[str] = []
    seen_by: int = 0
    differs: dict[str, str] = {}


class Health(msgspec.Struct, frozen=True):
    """The state of the cluster in one sentence, and how serious it is."""

    level: Level
    sentence: str


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Rates and durations of the last few seconds, and the depths of all queues."""

    events_per_s: float
    sent_per_s: float
    done_per_s: float
    failed_per_s: float
    retried_per_s: float
    wait_p50_s: float | None
    wait_p95_s: float | None
    run_p50_s: float | None
    run_p95_s: float | None
    ready: int
    delayed: int
    claimed: int
    oldest_s: float | None  # the age of the oldest task that is known to wait


class Failing(msgspec.Struct, frozen=True):
    """A task that fails: how many runs failed and ended in the last hour, and the newest failure."""

    name: str
    failed: int
    ended: int
    exception: str
    task_id: str


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """The cluster at a glance: its health, figures, counts by state, and the tasks that fail most."""

    health: Health
    now: Figures
    nodes: dict[str, int]  # by state
    tasks: dict[str, int]  # by state, including tasks that were dropped from memory
    leader: str  # the holder of the scheduler's lease, else of any lease; "" for none
    failing: list[Failing]
    clock: int
    tasks_known: int
    tasks_max: int
    heard: int
    unreadable: int
    problem: str  # why the dashboard receives no events; "" if it does


class TaskFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which tasks match: all fields that are set must match. The names are those of the query string."""

    state: str = ""  # several joined by commas
    name: str = ""
    queue: str = ""
    worker: str = ""
    text: str = ""  # a part of the name, the arguments or the error, or the beginning of the id
    root: str = ""
    since: Moment | None = None
    until: Moment | None = None


class TaskPage(msgspec.Struct, frozen=True, kw_only=True):
    """A page of tasks. `next` is the cursor of the next page, "" at the end; `total` counts all matches."""

    tasks: list[TaskRecord]
    total: int
    next: str
    partial: bool = False  # older tasks were dropped from memory


class StoryEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a task, which is one dot of the space-time diagram.

    `process` names the lane of the dot: `client NAME` or `NODE`. `attempt` is None if the sender did not
    report it. `delivery` counts receipts from 1. `repeat` says why a delivery is not the first:
    `redelivered`, `retried`, or for a dead letter `requeued after 3 starts`.
    """

    type: str
    at: float
    clock: int
    node: str
    pid: int
    process: str
    attempt: int | None = None
    delivery: int = 0
    repeat: str = ""
    detail: str = ""


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One delivery of a task: the node that received it, when the task started and ended, and its state."""

    attempt: int
    delivery: int
    node: str
    state: str
    received_at: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
    wait_s: float | None = None
    run_s: float | None = None
    repeat: str = ""
    error: str = ""


class TaskDetail(msgspec.Struct, frozen=True, kw_only=True):
    """One task. `edges` has pairs of indices into `events`: the event that causes the other comes first."""

    task: TaskRecord
    events: list[StoryEvent]
    edges: list[tuple[int, int]]
    attempts: list[Attempt]
    progress: dict[str, Any] | None = None
    can_retry: bool = False
    why_not: str = ""  # why the task cannot be retried
    as_call: str = ""  # the command `umbel call …`, if the arguments are complete
    truncated: list[str] = []  # the fields that were cut or redacted


class WorkflowTask(msgspec.Struct, frozen=True, kw_only=True):
    """One task in the graph of a workflow."""

    uuid: str
    name: str
    state: str
    parent_id: str
    worker: str
    sent_at: float | None
    started_at: float | None
    ended_at: float | None
    is_critical: bool


class Workflow(msgspec.Struct, frozen=True, kw_only=True):
    """All known tasks of one root, in the order in which they were sent.

    `critical` is the critical path: the tasks that determined when the workflow ended.
    """

    root_id: str
    tasks: list[WorkflowTask]
    edges: list[tuple[str, str]]  # (cause, effect), by id
    critical: list[str]
    duration_s: float | None
    more: int = 0  # the number of tasks beyond the limit


class Queue(msgspec.Struct, frozen=True, kw_only=True):
    """One queue: depths, flow and consumers. `oldest_s` is the age of the oldest known waiting task."""

    queue: str
    ready: int
    delayed: int
    claimed: int
    in_per_s: float = 0.0
    out_per_s: float = 0.0
    oldest_s: float | None = None
    consumers: list[str] = []
    paused: bool = False


class WaitingMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message that waits in a queue, as `umbel queues peek --json` prints it."""

    task_id: str
    task: str
    args: str
    kwargs: str
    retries: int
    priority: int
    starts: int


class DeadLetterRow(msgspec.Struct, frozen=True, kw_only=True):
    """A dead letter, as `umbel dlq ls --json` prints it.

    `buried` is when it became a dead letter, as ISO 8601. `starts` counts the starts since the message was
    sent or requeued, `earlier_starts` the starts before it was requeued.
    """

    id: int | str
    buried: str
    queue: str
    task: str
    task_id: str
    starts: int
    reason: str
    earlier_starts: int = 0


class PeriodicTask(msgspec.Struct, frozen=True, kw_only=True):
    """A periodic task, as `umbel schedule ls --json` prints it; `missed` counts slots without a message."""

    name: str
    task: str
    rule: str
    catch_up: str
    last: str | None
    next: str | None
    paused: bool
    missed: int = 0


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """The periodic tasks of the app, and the node that sends them."""

    leader: str | None
    term: int
    tasks: list[PeriodicTask]
    note: str = ""  # why there is nothing to show


class Candidate(msgspec.Struct, frozen=True):
    """A process that stands in an election, with the Lamport clock of its claim."""

    node: str
    pid: int
    clock: int


class Election(msgspec.Struct, frozen=True, kw_only=True):
    """One election. `protocol` is v1 (decided by clocks) or v2 (decided by the store).

    `violations` lists broken guarantees, and should be empty.
    """

    id: str
    protocol: str
    topic: str
    phase: str
    winner: str
    term: int
    attempt: int
    policy: str
    outcome: str
    candidates: list[Candidate]
    first_at: float
    last_at: float
    duration_s: float
    violations: list[str]


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """A lease of the cluster: its holder, its term, and how long it still lasts."""

    name: str
    holder: str  # the node; "" if the lease is free
    term: int
    left_s: float
    since: float | None = None


class Happening(msgspec.Struct, frozen=True, kw_only=True):
    """A change of membership, leadership or version, for the time slider and the charts."""

    at: float
    kind: Literal["joined", "returned", "suspect", "alive", "lost", "left", "elected", "lease", "version"]
    subject: str  # a node, the id of an election, or the name of a lease
    text: str = ""
    node: str = ""
    term: int = 0


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """A moment that the charts annotate: a mark that a person set, or a worker's new version."""

    at: float
    text: str
    kind: Literal["mark", "version"] = "mark"


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Columns for charts: step i begins at `at[i]` and lasts `step_s`; None where nothing is known."""

    step_s: int
    at: list[float]
    sent: list[int | None]
    done: list[int | None]
    failed: list[int | None]
    retried: list[int | None]
    wait_p50_s: list[float | None]
    wait_p95_s: list[float | None]
    run_p50_s: list[float | None]
    run_p95_s: list[float | None]
    ready: list[int | None]
    oldest_s: list[float | None]
    alive: list[int | None]
    queues: dict[str, list[int | None]]  # ready messages, of the deepest queues
    marks: list[Mark]


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """One node as it describes itself. `silent`: it did not answer, so the other fields are empty."""

    node: Node
    silent: bool
    stats: dict[str, Any]
    children: list[dict[str, Any]]  # {"pid", "task", "task_id", "age_s"}
    active: list[dict[str, Any]]
    reserved: list[dict[str, Any]]
    queues: list[str]
    registered: list[str]
    settings: dict[str, Any]
    failures: list[TaskRecord]


# ---- messages as rows ------------------------------------------------------------------------------


def letter_row(letter: DeadLetter) -> DeadLetterRow:
    """Return the row of a dead letter, with `?` as the task if its headers cannot be read."""
    headers: TaskHeaders | None = None
    with suppress(WireError):
        headers = read_headers(to_v2(letter.message))
    earlier = None if headers is None else headers.umbel_starts
    return DeadLetterRow(
        id=letter.letter_id,
        buried=datetime.fromtimestamp(letter.buried_at, UTC).isoformat(timespec="seconds"),
        queue=letter.queue,
        task="?" if headers is None else str(headers.task),
        task_id=letter.message.correlation_id if headers is None else str(headers.id),
        starts=letter.starts,
        reason=letter.reason,
        earlier_starts=earlier if isinstance(earlier, int) else 0,
    )


def waiting_row(delivery: Delivery, hides: Hides = hides_nothing) -> WaitingMessage:
    """Return the row of a waiting message; `hides` names the tasks whose arguments are masked."""
    task_id, task, args, kwargs, retries = "?", "", "", "", 0
    try:
        headers = read_headers(to_v2(delivery.message))
    except WireError as error:
        task = f"unreadable: {error}"
    else:
        is_hidden = hides(headers.task) and is_open(headers.argsrepr, headers.kwargsrepr)
        args, kwargs = (MASK, MASK) if is_hidden else (headers.argsrepr, headers.kwargsrepr)
        task_id, task, retries = headers.id, headers.task, headers.retries
    return WaitingMessage(
        task_id=task_id,
        task=task,
        args=args,
        kwargs=kwargs,
        retries=retries,
        priority=delivery.message.priority,
        starts=delivery.starts,
    )


# ---- redaction -------------------------------------------------------------------------------------
#
# Mask secrets and cut long texts before a record leaves the monitor.
#
# `protocol/delivery/redaction.py` defines what looks like a secret. Text is searched for secrets; a mapping
# also loses the whole value under a key that names a secret.

LIST_MAX = 500  # characters of a text in a list
DETAIL_MAX = 20_000  # characters of a text on a page about one task
BEYOND = 600  # characters read after the limit: they may show that the text before them is a secret
DEPTH_MAX = 16
CUT = "…"

_TEXTS = ("args", "kwargs", "result", "exception", "traceback")


def redact_text(text: str, limit: int = LIST_MAX) -> str:
    """Return the text with secrets masked, cut to `limit` characters."""
    clean = redact(text[: limit + BEYOND])
    is_whole = len(text) <= limit + BEYOND and len(clean) <= limit
    return clean if is_whole else clean[:limit] + CUT


def redact_data(value: Any, limit: int = DETAIL_MAX, depth: int = 0) -> Any:
    """Return plain data with secrets masked and texts cut; data nested deeper than DEPTH_MAX is masked."""
    if depth > DEPTH_MAX:
        return MASK
    match value:
        case Mapping():
            return {
                str(key): MASK if is_secret(str(key)) and item else redact_data(item, limit, depth + 1)
                for key, item in value.items()
            }
        case list() | tuple():
            return [redact_data(item, limit, depth + 1) for item in value]
        case bool() | int() | float() | None:
            return value
        case _:
            return redact_text(str(value), limit)


def redact_task(task: TaskRecord, limit: int, hides: Hides) -> TaskRecord:
    """Return the task with its texts redacted and cut; `hides` names the tasks whose arguments are masked."""
    if hides(task.name) and is_open(task.args, task.kwargs):
        task = msgspec.structs.replace(task, args=MASK, kwargs=MASK)
    return msgspec.structs.replace(
        task,
        **{name: redact_text(value, limit) for name in _TEXTS if (value := getattr(task, name)) is not None},
        extra=None if task.extra is None else redact_data(task.extra, limit),
    )


def changed_fields(before: TaskRecord, after: TaskRecord) -> list[str]:
    """Return the names of the texts that redaction changed."""
    return [name for name in _TEXTS if getattr(before, name) != getattr(after, name)]
