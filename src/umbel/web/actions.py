"""Actions: everything that the dashboard can change, each as one record; pages and the API share them.

A record says what to do and nothing about the caller. `POST /api/v1/actions` takes one as JSON, with its name
in `action`; `Site.act` takes the record itself. `ROLES` says which role each action needs. Saved views are
named filters of the list of tasks, shared by all users of the dashboard; saving under an existing name
replaces that view.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, get_args

import msgspec

from umbel.monitor.records import TaskFilter
from umbel.web.settings import Role

# ---- saved views -----------------------------------------------------------------------------------
#
# Named filters of the list of tasks, with the order and the columns that it is shown in.
#
# They belong to the dashboard and are shared by all who look at it. There are at most VIEWS_MAX of them,
# each of at most VIEW_BYTES_MAX; who saves one under a name that is taken replaces it. Who did so is in the
# audit.

VIEWS_MAX = 100
VIEW_BYTES_MAX = 4000
NAME_MAX = 60
Column = Literal["state", "args", "error", "queue", "worker", "retries", "wait", "run", "at", "clock"]
Order = Literal["clock", "time"]
ViewName = Annotated[str, msgspec.Meta(min_length=1, max_length=NAME_MAX)]
COLUMNS: tuple[Column, ...] = get_args(Column)
"""In the order of the list; the task's name is always shown."""
USUAL: tuple[Column, ...] = ("state", "args", "worker", "wait", "run", "at", "clock")


class SavedView(msgspec.Struct, frozen=True, kw_only=True):
    """A named view of the list of tasks. `columns`: those next to the task's name; empty: the usual ones.

    Views are shared by all users of the dashboard; the audit says who saved one.
    """

    name: ViewName
    match: TaskFilter = TaskFilter()
    order: Order = "clock"
    columns: list[Column] = []
    saved_at: float = 0.0


# ---- actions ---------------------------------------------------------------------------------------
#
# Everything that the dashboard can change, each as one record; pages and the API share them.
#
# A record says what is wanted and nothing about who wants it. `POST /api/v1/actions` takes one as JSON,
# with its name in `action`; `Site.act` takes the record itself. `ROLES` says who may.

IDS_MAX = 10_000
DEPTH_MAX = 64
Text = Annotated[str, msgspec.Meta(min_length=1, max_length=1000)]
Count = Annotated[int, msgspec.Meta(ge=1, le=1000)]


class Action(msgspec.Struct, frozen=True, kw_only=True, tag_field="action", forbid_unknown_fields=True):
    """Base of all actions. `nodes`: the nodes that a command is sent to; empty means all."""

    nodes: list[Text] = []


class OnTasks(Action, frozen=True, kw_only=True):
    """Tasks by their ids, or all that match a filter.

    `expected`: how many matches the user confirmed. If more match now, nothing is done.
    """

    ids: Annotated[list[Text], msgspec.Meta(max_length=IDS_MAX)] = []
    match: TaskFilter | None = None
    expected: int | None = None


class Revoke(OnTasks, frozen=True, kw_only=True, tag="revoke"):
    """Revoke tasks: those that wait never start, those that run are not touched."""


class Terminate(OnTasks, frozen=True, kw_only=True, tag="terminate"):
    """Revoke tasks, and end those that run with a signal."""

    signal: Literal["SIGTERM", "SIGKILL", "SIGQUIT", "SIGINT", "SIGUSR1"] = "SIGTERM"


class Retry(OnTasks, frozen=True, kw_only=True, tag="retry"):
    """Send ended tasks again, as new messages with the same arguments."""


class Purge(Action, frozen=True, kw_only=True, tag="purge"):
    """Remove every waiting message of the queue."""

    queue: Text


class PauseQueue(Action, frozen=True, kw_only=True, tag="pause_queue"):
    """No worker takes messages from the queue until it is resumed."""

    queue: Text


class ResumeQueue(Action, frozen=True, kw_only=True, tag="resume_queue"):
    """Workers take messages from the queue again."""

    queue: Text


class MoveMessages(Action, frozen=True, kw_only=True, tag="move_messages"):
    """Move the waiting messages of `queue`, due or not, to the queue `target`; at most `limit` of them."""

    queue: Text
    target: Text
    limit: Annotated[int, msgspec.Meta(ge=1)] | None = None


class RequeueDead(Action, frozen=True, kw_only=True, tag="requeue_dead"):
    """Return dead letters to their queues, by their ids; `every`: all of them."""

    letters: list[Text] = []
    every: bool = False


class DropDead(Action, frozen=True, kw_only=True, tag="drop_dead"):
    """Remove dead letters by their ids; `every`: all of them."""

    letters: list[Text] = []
    every: bool = False


class Grow(Action, frozen=True, kw_only=True, tag="grow"):
    """Add `n` processes to the pool."""

    n: Count = 1


class Shrink(Action, frozen=True, kw_only=True, tag="shrink"):
    """Remove `n` processes from the pool."""

    n: Count = 1


class Autoscale(Action, frozen=True, kw_only=True, tag="autoscale"):
    """Let the pool grow and shrink between `min` and `max` processes."""

    max: Count
    min: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 1


class AddQueue(Action, frozen=True, kw_only=True, tag="add_queue"):
    """Consume the queue as well."""

    queue: Text


class CancelQueue(Action, frozen=True, kw_only=True, tag="cancel_queue"):
    """Stop consuming the queue."""

    queue: Text


class RateLimit(Action, frozen=True, kw_only=True, tag="rate_limit"):
    """Limit how often workers start the task. `rate`: as in `100/m`; 0 removes the limit."""

    task: Text
    rate: Text


class TimeLimit(Action, frozen=True, kw_only=True, tag="time_limit"):
    """Limit how long the task may run; `soft` and `hard` in seconds."""

    task: Text
    soft: Annotated[float, msgspec.Meta(gt=0)] | None = None
    hard: Annotated[float, msgspec.Meta(gt=0)] | None = None


class RestartPool(Action, frozen=True, kw_only=True, tag="restart_pool"):
    """Replace the child processes as they become idle."""


class Stop(Action, frozen=True, kw_only=True, tag="stop"):
    """Warm shutdown of `nodes`, which must be named: running tasks finish first."""


class RunPeriodic(Action, frozen=True, kw_only=True, tag="run_periodic"):
    """Send a periodic task now."""

    name: Text


class PausePeriodic(Action, frozen=True, kw_only=True, tag="pause_periodic"):
    """Stop sending a periodic task until it is resumed."""

    name: Text


class ResumePeriodic(Action, frozen=True, kw_only=True, tag="resume_periodic"):
    """Send a paused periodic task by its rule again."""

    name: Text


class MarkMoment(Action, frozen=True, kw_only=True, tag="mark"):
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
    """Log out all browser sessions under this name."""

    name: Text


class SaveView(Action, frozen=True, kw_only=True, tag="save_view"):
    """Save a filter of tasks under the name `view`; a view of that name is replaced."""

    view: ViewName
    match: TaskFilter = TaskFilter()
    order: Order = "clock"
    columns: Annotated[list[Column], msgspec.Meta(max_length=len(COLUMNS))] = []


class DeleteView(Action, frozen=True, kw_only=True, tag="delete_view"):
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

ROLES: Mapping[type[Action], Role] = {
    Revoke: Role.OPERATOR,
    Terminate: Role.OPERATOR,
    Retry: Role.OPERATOR,
    PauseQueue: Role.OPERATOR,
    ResumeQueue: Role.OPERATOR,
    MoveMessages: Role.OPERATOR,
    RequeueDead: Role.OPERATOR,
    Grow: Role.OPERATOR,
    Shrink: Role.OPERATOR,
    Autoscale: Role.OPERATOR,
    AddQueue: Role.OPERATOR,
    CancelQueue: Role.OPERATOR,
    RateLimit: Role.OPERATOR,
    TimeLimit: Role.OPERATOR,
    RunPeriodic: Role.OPERATOR,
    PausePeriodic: Role.OPERATOR,
    ResumePeriodic: Role.OPERATOR,
    MarkMoment: Role.OPERATOR,
    SaveView: Role.OPERATOR,
    DeleteView: Role.OPERATOR,
    RestartPool: Role.ADMIN,
    Purge: Role.ADMIN,
    DropDead: Role.ADMIN,
    Stop: Role.ADMIN,
    StartElection: Role.ADMIN,
    EndSessions: Role.ADMIN,
}


class ActionResult(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of an action.

    `done`: no node refused it, and every node that should answer did. `count`: how many tasks, messages or
    letters it concerned. `replies`: by node. `refused`: by id or name, the reason.
    """

    audit_id: int
    done: bool
    count: int = 0
    replies: dict[str, Any] = {}
    silent: list[str] = []
    refused: dict[str, str] = {}
    sent: list[str] = []  # ids of tasks that were sent
    problem: str = ""


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Who did what and from where. `status` is `sent` until the `result` of the action is known."""

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
        level = [item for many in level if isinstance(many, list | dict) for item in _inside(many)]
    return bool(level)


def _inside(many: list[Any] | dict[str, Any]) -> Iterable[Any]:
    return many.values() if isinstance(many, dict) else many
