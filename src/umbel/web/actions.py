"""Actions: everything that the dashboard can change, each as one record; pages and the API share them.

A record says what is wanted and nothing about who wants it. `POST /api/v1/actions` takes one as JSON,
with its name in `action`; `Site.act` takes the record itself. `ROLES` says who may.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

import msgspec

from umbel.monitor.shapes import TaskFilter
from umbel.web.roles import Role
from umbel.web.saved_views import COLUMNS, Column, Order, ViewName

IDS_MAX = 10_000
DEPTH_MAX = 64
Text = Annotated[str, msgspec.Meta(min_length=1, max_length=1000)]
Count = Annotated[int, msgspec.Meta(ge=1, le=1000)]


class Action(msgspec.Struct, frozen=True, kw_only=True, tag_field="action", forbid_unknown_fields=True):
    """`nodes`: which nodes are asked, where a command is sent; empty: all."""

    nodes: list[Text] = []


class OnTasks(Action, frozen=True, kw_only=True):
    """Tasks by their ids, or all that match a filter.

    `expected`: how many the user was told would match. Where more match now, nothing is done.
    """

    ids: Annotated[list[Text], msgspec.Meta(max_length=IDS_MAX)] = []
    match: TaskFilter | None = None
    expected: int | None = None


class Revoke(OnTasks, frozen=True, kw_only=True, tag="revoke"):
    pass


class Terminate(OnTasks, frozen=True, kw_only=True, tag="terminate"):
    signal: Literal["SIGTERM", "SIGKILL", "SIGQUIT", "SIGINT", "SIGUSR1"] = "SIGTERM"


class Retry(OnTasks, frozen=True, kw_only=True, tag="retry"):
    """Send again what ended, as a new message with the same arguments."""


class Purge(Action, frozen=True, kw_only=True, tag="purge"):
    queue: Text


class PauseQueue(Action, frozen=True, kw_only=True, tag="pause_queue"):
    """No worker takes messages from the queue until it is resumed."""

    queue: Text


class ResumeQueue(Action, frozen=True, kw_only=True, tag="resume_queue"):
    queue: Text


class MoveMessages(Action, frozen=True, kw_only=True, tag="move_messages"):
    """Move what waits in `queue`, due or not, to the queue `target`; `limit`: at most so many."""

    queue: Text
    target: Text
    limit: Annotated[int, msgspec.Meta(ge=1)] | None = None


class RequeueDead(Action, frozen=True, kw_only=True, tag="requeue_dead"):
    """Dead letters by their ids; `every`: all of them."""

    letters: list[Text] = []
    every: bool = False


class DropDead(Action, frozen=True, kw_only=True, tag="drop_dead"):
    letters: list[Text] = []
    every: bool = False


class Grow(Action, frozen=True, kw_only=True, tag="grow"):
    n: Count = 1


class Shrink(Action, frozen=True, kw_only=True, tag="shrink"):
    n: Count = 1


class Autoscale(Action, frozen=True, kw_only=True, tag="autoscale"):
    max: Count
    min: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 1


class AddQueue(Action, frozen=True, kw_only=True, tag="add_queue"):
    queue: Text


class CancelQueue(Action, frozen=True, kw_only=True, tag="cancel_queue"):
    queue: Text


class RateLimit(Action, frozen=True, kw_only=True, tag="rate_limit"):
    """`rate`: as in `100/m`; 0 for none."""

    task: Text
    rate: Text


class TimeLimit(Action, frozen=True, kw_only=True, tag="time_limit"):
    task: Text
    soft: Annotated[float, msgspec.Meta(gt=0)] | None = None
    hard: Annotated[float, msgspec.Meta(gt=0)] | None = None


class RestartPool(Action, frozen=True, kw_only=True, tag="restart_pool"):
    """Replace the child processes as they become idle."""


class Stop(Action, frozen=True, kw_only=True, tag="stop"):
    """Warm shutdown of `nodes`, which must be named: running tasks end first."""


class RunPeriodic(Action, frozen=True, kw_only=True, tag="run_periodic"):
    name: Text


class PausePeriodic(Action, frozen=True, kw_only=True, tag="pause_periodic"):
    name: Text


class ResumePeriodic(Action, frozen=True, kw_only=True, tag="resume_periodic"):
    name: Text


class MarkMoment(Action, frozen=True, kw_only=True, tag="mark"):
    """A mark on the charts: a deploy, an incident."""

    text: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]


class StartElection(Action, frozen=True, kw_only=True, tag="start_election"):
    id: Text
    topic: Text
    argument: Any = None

    def __post_init__(self) -> None:
        if _is_deep(self.argument):
            raise ValueError(f"`argument` is nested deeper than {DEPTH_MAX}")


class SaveView(Action, frozen=True, kw_only=True, tag="save_view"):
    """Keep a filter of tasks under the name `view`; one that has the name is replaced."""

    view: ViewName
    match: TaskFilter = TaskFilter()
    order: Order = "clock"
    columns: Annotated[list[Column], msgspec.Meta(max_length=len(COLUMNS))] = []


class DeleteView(Action, frozen=True, kw_only=True, tag="delete_view"):
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
}


class ActionResult(msgspec.Struct, frozen=True, kw_only=True):
    """What came of an action.

    `done`: nothing refused it and nobody who should answer was silent. `count`: how many tasks, messages or
    letters it concerned. `replies`: what each node said. `refused`: by id or name, why not.
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
    """Who did what from where. `status` is `sent` from before the action until its `result` is known."""

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
        level = [one for many in level if isinstance(many, list | dict) for one in _inside(many)]
    return bool(level)


def _inside(many: list[Any] | dict[str, Any]) -> Iterable[Any]:
    return many.values() if isinstance(many, dict) else many
