"""Actions: everything that the dashboard can change, each as one record that pages and the API share.

A record says what to do, and nothing about the visitor. `POST /api/v1/actions` takes it as JSON, with its
name in the field `action`; `Dashboard.act` takes the record itself. The attribute `role` is the role that the
visitor needs.
"""

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal, get_args

import msgspec

from umbel.monitor.records import TaskFilter
from umbel.web.settings import Role

# ---- saved views -----------------------------------------------------------------------------------

VIEWS_MAX = 100
VIEW_BYTES_MAX = 4000
NAME_MAX = 60
Column = Literal["state", "args", "error", "queue", "worker", "retries", "wait", "run", "at", "clock"]
Order = Literal["clock", "time"]
ViewName = Annotated[str, msgspec.Meta(min_length=1, max_length=NAME_MAX)]
COLUMNS: tuple[Column, ...] = get_args(Column)
"""All columns, in the order of the list; the task's name is always shown."""
USUAL: tuple[Column, ...] = ("state", "args", "worker", "wait", "run", "at", "clock")


class SavedView(msgspec.Struct, frozen=True, kw_only=True):
    """A named filter of the list of tasks, with the order and the columns of the list.

    Without `columns` the list has the usual columns. All users of the dashboard share its views; the audit
    says who saved a view.
    """

    name: ViewName
    match: TaskFilter = TaskFilter()
    order: Order = "clock"
    columns: list[Column] = []
    saved_at: float = 0.0


# ---- actions ---------------------------------------------------------------------------------------

IDS_MAX = 10_000
DEPTH_MAX = 64
Text = Annotated[str, msgspec.Meta(min_length=1, max_length=1000)]
Count = Annotated[int, msgspec.Meta(ge=1, le=1000)]


class Action(msgspec.Struct, frozen=True, kw_only=True, tag_field="action", forbid_unknown_fields=True):
    """Base of all actions; those that derive from it directly need the role admin.

    `nodes`: the nodes that a command is sent to; empty for all nodes.
    """

    role: ClassVar[Role] = Role.ADMIN
    nodes: list[Text] = []


class OperatorAction(Action, frozen=True, kw_only=True):
    """Base of the actions that operators may perform too."""

    role: ClassVar[Role] = Role.OPERATOR


class OnTasks(OperatorAction, frozen=True, kw_only=True):
    """Base of actions on tasks, which are given by their ids or by a filter.

    `expected` is the number of matches that the user confirmed. If more tasks match, nothing is done.
    """

    ids: Annotated[list[Text], msgspec.Meta(max_length=IDS_MAX)] = []
    match: TaskFilter | None = None
    expected: int | None = None


class Revoke(OnTasks, frozen=True, kw_only=True, tag="revoke"):
    """Revoke tasks: waiting tasks never start, running tasks go on."""


class Terminate(OnTasks, frozen=True, kw_only=True, tag="terminate"):
    """Revoke tasks, and end running tasks with a signal."""

    signal: Literal["SIGTERM", "SIGKILL", "SIGQUIT", "SIGINT", "SIGUSR1"] = "SIGTERM"


class Retry(OnTasks, frozen=True, kw_only=True, tag="retry"):
    """Send ended tasks again, as new messages with the same arguments."""


class Purge(Action, frozen=True, kw_only=True, tag="purge"):
    """Remove every waiting message of the queue."""

    queue: Text


class PauseQueue(OperatorAction, frozen=True, kw_only=True, tag="pause_queue"):
    """No worker takes messages from the queue until it is resumed."""

    queue: Text


class ResumeQueue(OperatorAction, frozen=True, kw_only=True, tag="resume_queue"):
    """Workers take messages from the queue again."""

    queue: Text


class MoveMessages(OperatorAction, frozen=True, kw_only=True, tag="move_messages"):
    """Move at most `limit` waiting messages, due or not, from `queue` to the queue `target`."""

    queue: Text
    target: Text
    limit: Annotated[int, msgspec.Meta(ge=1)] | None = None


class RequeueDead(OperatorAction, frozen=True, kw_only=True, tag="requeue_dead"):
    """Return dead letters to their queues: the letters with these ids, or `every` letter."""

    letters: list[Text] = []
    every: bool = False


class DropDead(Action, frozen=True, kw_only=True, tag="drop_dead"):
    """Remove dead letters: the letters with these ids, or `every` letter."""

    letters: list[Text] = []
    every: bool = False


class Grow(OperatorAction, frozen=True, kw_only=True, tag="grow"):
    """Add `n` processes to the pool."""

    n: Count = 1


class Shrink(OperatorAction, frozen=True, kw_only=True, tag="shrink"):
    """Remove `n` processes from the pool."""

    n: Count = 1


class Autoscale(OperatorAction, frozen=True, kw_only=True, tag="autoscale"):
    """Let the pool grow and shrink between `min` and `max` processes."""

    max: Count
    min: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 1


class AddQueue(OperatorAction, frozen=True, kw_only=True, tag="add_queue"):
    """Consume the queue as well."""

    queue: Text


class CancelQueue(OperatorAction, frozen=True, kw_only=True, tag="cancel_queue"):
    """Stop consuming the queue."""

    queue: Text


class RateLimit(OperatorAction, frozen=True, kw_only=True, tag="rate_limit"):
    """Limit how often workers start the task. `rate`: as in `100/m`; 0 removes the limit."""

    task: Text
    rate: Text


class TimeLimit(OperatorAction, frozen=True, kw_only=True, tag="time_limit"):
    """Limit how long the task may run; `soft` and `hard` in seconds."""

    task: Text
    soft: Annotated[float, msgspec.Meta(gt=0)] | None = None
    hard: Annotated[float, msgspec.Meta(gt=0)] | None = None


class RestartPool(Action, frozen=True, kw_only=True, tag="restart_pool"):
    """Replace the child processes as they become idle."""


class Stop(Action, frozen=True, kw_only=True, tag="stop"):
    """Shut down the named `nodes`; running tasks finish first."""


class RunPeriodic(OperatorAction, frozen=True, kw_only=True, tag="run_periodic"):
    """Send a periodic task now."""

    name: Text


class PausePeriodic(OperatorAction, frozen=True, kw_only=True, tag="pause_periodic"):
    """Stop sending a periodic task until it is resumed."""

    name: Text


class ResumePeriodic(OperatorAction, frozen=True, kw_only=True, tag="resume_periodic"):
    """Send a paused periodic task again as its rule says."""

    name: Text


class MarkMoment(OperatorAction, frozen=True, kw_only=True, tag="mark"):
    """Annotate the charts at this moment: a deploy, an incident."""

    text: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]


class StartElection(Action, frozen=True, kw_only=True, tag="start_election"):
    """Start an election among the nodes that handle the topic; the winner's handler gets `argument`."""

    id: Text
    topic: Text
    argument: Any = None

    def __post_init__(self) -> None:
        if _is_deep(self.argument):
            raise ValueError(f"`argument` is nested deeper than {DEPTH_MAX}")


class EndSessions(Action, frozen=True, kw_only=True, tag="end_sessions"):
    """End all browser sessions of users with this name."""

    name: Text


class SaveView(OperatorAction, frozen=True, kw_only=True, tag="save_view"):
    """Save a filter of tasks as the view of this name; an existing view of that name is replaced."""

    view: ViewName
    match: TaskFilter = TaskFilter()
    order: Order = "clock"
    columns: Annotated[list[Column], msgspec.Meta(max_length=len(COLUMNS))] = []


class DeleteView(OperatorAction, frozen=True, kw_only=True, tag="delete_view"):
    """Delete a saved view."""

    view: ViewName


AnyAction = (
    Revoke
    | Terminate
    | Retry
    | Purge
    | PauseQueue
    | ResumeQueue
    | MoveMessages
    | RequeueDead
    | DropDead
    | Grow
    | Shrink
    | Autoscale
    | AddQueue
    | CancelQueue
    | RateLimit
    | TimeLimit
    | RestartPool
    | Stop
    | RunPeriodic
    | PausePeriodic
    | ResumePeriodic
    | MarkMoment
    | StartElection
    | EndSessions
    | SaveView
    | DeleteView
)


class ActionResult(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of an action.

    `done`: no node refused it, and every node replied. `count` is the number of tasks, messages or letters
    that it concerned. `replies` are by node; `refused` has reasons by the id or name that they concern.
    """

    audit_id: int
    done: bool
    count: int = 0
    replies: dict[str, Any] = {}
    silent: list[str] = []
    refused: dict[str, str] = {}
    sent: list[str] = []  # the ids of the tasks that were sent
    problem: str = ""


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Who did what from where. `status` is `sent` until the `result` of the action is known."""

    id: int
    at: float
    who: str
    role: str
    address: str
    action: str
    target: str
    arguments: dict[str, Any]
    status: Literal["sent", "done", "failed", "refused"]
    result: dict[str, Any] | None = None


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(DEPTH_MAX):
        level = [item for many in level for item in _items(many)]
    return bool(level)


def _items(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
