"""Shapes: what a monitor answers, as plain records; pages, the web API and `--json` share them.

Times are Unix seconds, durations end in `_s`. Records are what leaves the process: the site has redacted
arguments, results and tracebacks and cut them before it hands one out.
"""

from typing import Annotated, Any, Literal

import msgspec

from umbel.events.view import TaskRecord

Moment = Annotated[float, msgspec.Meta(ge=0, le=100_000_000_000)]  # as far as calendars go, and not NaN
NodeState = Literal["alive", "suspect", "lost", "left"]
Level = Literal["ok", "warning", "bad"]


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A member of the cluster, Umbel's or Celery's, with the opinion of who knows it best.

    `leads`: names of the leases that it holds. `seen_by`: of the nodes that were asked, how many hold it for
    alive, and `differs` those that say something else; both are empty in a cluster of Celery nodes.
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
    messages_per_s: float = 0.0  # heartbeats and gossip that were heard of it
    queues: list[str] = []
    leads: list[str] = []
    seen_by: int = 0
    differs: dict[str, str] = {}


class Health(msgspec.Struct, frozen=True):
    """One sentence in plain words, and how bad it is."""

    level: Level
    sentence: str


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """The last few seconds."""

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
    oldest_s: float | None  # of the tasks known to wait


class Failing(msgspec.Struct, frozen=True):
    """A task name that fails: so many of the last hour, with the newest of them."""

    name: str
    failed: int
    ended: int
    exception: str
    task_id: str


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    health: Health
    now: Figures
    nodes: dict[str, int]  # by state
    tasks: dict[str, int]  # by state, those dropped from memory included
    leader: str  # of the scheduler, else of any lease; "" when nobody leads
    failing: list[Failing]
    clock: int
    tasks_known: int
    tasks_max: int
    heard: int
    unreadable: int
    problem: str  # what keeps the dashboard from hearing the cluster; "" when nothing does


class TaskFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which tasks: each field that is set narrows. The names are those of the query string."""

    state: str = ""  # several joined by commas
    name: str = ""
    queue: str = ""
    worker: str = ""
    text: str = ""  # part of the name, of the arguments or of the error; or the beginning of an id
    root: str = ""
    since: Moment | None = None
    until: Moment | None = None


class TaskPage(msgspec.Struct, frozen=True, kw_only=True):
    """`next` is the cursor of the page behind this one; "" at the end. `total` counts all that match."""

    tasks: list[TaskRecord]
    total: int
    next: str
    partial: bool = False  # older tasks were dropped from memory


class StoryEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One dot of the space-time diagram.

    `process`: the lane it belongs to: `client NAME`, `NODE`. `attempt` is None where the sender did not say.
    `delivery` counts receipts from 1; `repeat` says why a delivery is not the first: redelivered, retried.
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
    """One task. `edges`: pairs of indices into `events`, cause before effect, between processes."""

    task: TaskRecord
    events: list[StoryEvent]
    edges: list[tuple[int, int]]
    attempts: list[Attempt]
    progress: dict[str, Any] | None = None
    can_retry: bool = False
    why_not: str = ""  # why it cannot be sent again
    as_call: str = ""  # `umbel call …`, where the arguments are known whole
    truncated: list[str] = []  # fields that were cut or redacted


class WorkflowTask(msgspec.Struct, frozen=True, kw_only=True):
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
    """All known tasks of one root, causes first; `critical` is the path that decided when it ended."""

    root_id: str
    tasks: list[WorkflowTask]
    edges: list[tuple[str, str]]  # (cause, effect), by id
    critical: list[str]
    duration_s: float | None
    more: int = 0  # tasks beyond the limit


class Queue(msgspec.Struct, frozen=True, kw_only=True):
    """`oldest_s`: how long the oldest task has waited that is known to wait; None if none is."""

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
    """A message that waits, as `umbel queues peek --json` shows it."""

    task_id: str
    task: str
    args: str
    kwargs: str
    retries: int
    priority: int
    starts: int


class DeadLetterRow(msgspec.Struct, frozen=True, kw_only=True):
    """As `umbel dlq ls --json` shows it; `buried` is ISO 8601."""

    id: int | str
    buried: str
    queue: str
    task: str
    task_id: str
    starts: int
    reason: str


class PeriodicTask(msgspec.Struct, frozen=True, kw_only=True):
    """As `umbel schedule ls --json` shows it; `missed`: slots that passed and were not sent."""

    name: str
    task: str
    rule: str
    catch_up: str
    last: str | None
    next: str | None
    paused: bool
    missed: int = 0


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    leader: str | None
    term: int
    tasks: list[PeriodicTask]
    note: str = ""  # why there is nothing to show


class Candidate(msgspec.Struct, frozen=True):
    node: str
    pid: int
    clock: int


class Election(msgspec.Struct, frozen=True, kw_only=True):
    """`protocol`: v1 (decided by clocks) or v2 (by the store). `violations` should be empty."""

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
    name: str
    holder: str  # the node; "" when it is free
    term: int
    left_s: float
    since: float | None = None


class Happening(msgspec.Struct, frozen=True, kw_only=True):
    """Something that changed who is there or who leads, for the time slider and the marks."""

    at: float
    kind: Literal["joined", "returned", "suspect", "alive", "lost", "left", "elected", "lease", "version"]
    subject: str  # the node, the election's id or the lease's name
    text: str = ""
    node: str = ""
    term: int = 0


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """A moment that people care about: a deploy (`umbel mark`), a worker's new version."""

    at: float
    text: str
    kind: Literal["mark", "version"] = "mark"


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Columns for charts: `at[i]` begins a step of `step_s`; None where nothing is known."""

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
    queues: dict[str, list[int | None]]  # depth (ready) by queue; the largest ones
    marks: list[Mark]


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """One node, with what it answered just now; what it did not answer is empty, and `silent` is set."""

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
