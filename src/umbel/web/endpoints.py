"""Endpoints: the API as a table. Each row has a path, the types of parameters and answer, and a function.

The routes and the OpenAPI document are both made from `ENDPOINTS` (`api.py`), so the document is complete. To
add an endpoint, add a row; a new kind of answer is a struct in `monitor/records.py`.
"""

from collections.abc import Awaitable, Callable
from functools import partial
from time import time
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from starlette.requests import Request

from umbel.errors import ConfigurationError, HistoryError
from umbel.history.query import Tables
from umbel.monitor import records
from umbel.monitor.cluster import PAGE_MAX, KnownCluster
from umbel.monitor.records import TaskFilter
from umbel.web.actions import ActionResult, AnyAction, AuditEntry, SavedView
from umbel.web.dashboard import Dashboard
from umbel.web.history import ROWS_MAX, query_lake, read_lake, recorded_between
from umbel.web.http import Refused, Visitor, dashboard_of, visitor_of
from umbel.web.lake import AttemptFilter, Past, Recorded, past, rates

T = TypeVar("T")
DAY_S = 86_400.0
Limit = Annotated[int, msgspec.Meta(ge=1, le=PAGE_MAX)]
Moment = Annotated[float, msgspec.Meta(ge=0, le=253_402_300_799)]  # the year 9999

# ---- parameters ------------------------------------------------------------------------------------


class NoQuery(msgspec.Struct, frozen=True):
    """The query string of an endpoint without parameters."""


class TaskQuery(TaskFilter, frozen=True, kw_only=True):
    """Which tasks, in which order, and from which page on."""

    limit: Limit = 50
    cursor: Annotated[str, msgspec.Meta(max_length=2000)] = ""
    order: Literal["clock", "time"] = "clock"


class LimitQuery(msgspec.Struct, frozen=True):
    """How many items."""

    limit: Limit = 100


class PeekQuery(msgspec.Struct, frozen=True):
    """How many messages."""

    limit: Limit = 20


class AuditQuery(msgspec.Struct, frozen=True):
    """How many entries; `before`: the number of the last entry of the previous page."""

    limit: Limit = 100
    before: Annotated[int, msgspec.Meta(ge=0, le=2**53)] = 0


class RatesQuery(msgspec.Struct, frozen=True):
    """How many seconds back, in steps of how many seconds; 0 chooses a length that fits."""

    last_s: Annotated[float, msgspec.Meta(ge=5, le=3600)] = 3600.0
    step_s: Annotated[int, msgspec.Meta(ge=0, le=3600)] = 0


class SinceQuery(msgspec.Struct, frozen=True):
    """From when on, in seconds since 1970."""

    since: Annotated[float, msgspec.Meta(ge=0)] = 0.0


class HistoryFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which attempts; times in seconds since 1970."""

    name: str = ""
    queue: str = ""
    worker: str = ""
    since: Moment | None = None
    until: Moment | None = None

    @property
    def wanted(self) -> AttemptFilter:
        """The same filter for the lake's tables."""
        return AttemptFilter(self.name, self.queue, self.worker, self.since, self.until)


class HistoryQuery(HistoryFilter, frozen=True, kw_only=True):
    """Which attempts, grouped by what, and compared before and after `mark`."""

    by: Literal["name", "queue", "worker"] = "name"
    mark: Moment | None = None


class PeriodQuery(msgspec.Struct, frozen=True, kw_only=True):
    """A period in seconds since 1970; without `until` it ends now, without `since` it lasts one day."""

    since: Moment | None = None
    until: Moment | None = None


class Question(msgspec.Struct, frozen=True):
    """One SELECT over the tables of history, and how many rows to return."""

    sql: Annotated[str, msgspec.Meta(min_length=1, max_length=10_000)]
    limit: Annotated[int, msgspec.Meta(ge=1, le=ROWS_MAX)] = 100


# ---- answers ---------------------------------------------------------------------------------------


class Rows(msgspec.Struct, frozen=True):
    """The rows of a query; `more`: there are rows beyond the limit."""

    columns: list[str]
    types: list[str]
    rows: list[list[Any]]
    more: bool


class Counted(msgspec.Struct, frozen=True):
    """How many tasks match."""

    count: int


class Me(msgspec.Struct, frozen=True):
    """The authenticated visitor, with the token that each change must carry."""

    name: str
    role: str
    csrf: str


# ---- calls -----------------------------------------------------------------------------------------


class ApiCall(msgspec.Struct, frozen=True):
    """One request of the API; `query` and `body` have the types of the endpoint."""

    request: Request
    query: Any
    body: Any

    @property
    def dashboard(self) -> Dashboard:
        """The dashboard that serves the request: it asks the broker and the nodes, and performs actions."""
        return dashboard_of(self.request)

    @property
    def cluster(self) -> KnownCluster:
        """What is known of the cluster."""
        return self.dashboard.cluster

    @property
    def visitor(self) -> Visitor:
        """The authenticated visitor."""
        return visitor_of(self.request)

    def named(self, name: str) -> str:
        """Return a parameter of the path."""
        value: str = self.request.path_params[name]
        return value


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One path of the API: its parameters, its answer, and the function that computes the answer."""

    method: Literal["GET", "POST"] = "GET"
    path: str  # in Starlette's syntax
    summary: str
    answer: Any
    ask: Callable[[ApiCall], Any]  # returns the answer or an awaitable of it
    query: type[msgspec.Struct] = NoQuery
    body: Any = None


async def _worker(call: ApiCall) -> records.Worker:
    return _found(await call.dashboard.worker(call.named("node")), "node", call.named("node"))


def _tasks(call: ApiCall) -> records.TaskPage:
    query = call.query
    wanted = TaskFilter(**{name: getattr(query, name) for name in TaskFilter.__struct_fields__})
    return call.cluster.tasks(wanted, limit=query.limit, cursor=query.cursor, order=query.order)


def _task(call: ApiCall) -> records.TaskDetail:
    return _found(call.dashboard.task(call.named("task_id")), "task", call.named("task_id"))


def _workflow(call: ApiCall) -> records.Workflow:
    return _found(call.cluster.workflow(call.named("task_id")), "task", call.named("task_id"))


def _found(value: T | None, kind: str, name: str) -> T:
    if value is None:
        detail = f"there is no {kind} {name[:200]!r}, or the dashboard has dropped it from its memory"
        raise Refused(404, "Not Found", detail)
    return value


async def _history(call: ApiCall) -> Past:
    query = call.query
    return await _read(call, partial(past, wanted=query.wanted, by=query.by, mark=query.mark), Past)


async def _history_rates(call: ApiCall) -> records.Rates:
    return await _read(call, partial(rates, wanted=call.query.wanted), records.Rates)


async def _history_happenings(call: ApiCall) -> Recorded:
    until = time() if call.query.until is None else call.query.until
    since = max(0.0, until - DAY_S) if call.query.since is None else call.query.since
    if since >= until:
        raise Refused(400, "Bad Request", "`since` must be before `until`")
    return await _answered(recorded_between(call.request, since, until))


async def _history_sql(call: ApiCall) -> Rows:
    found = await _answered(query_lake(call.request, call.body.sql, call.body.limit))
    return Rows(list(found.columns), list(found.types), [list(row) for row in found.rows], found.more)


async def _read(call: ApiCall, work: Callable[[Tables], Any], kind: type[T]) -> T:
    return await _answered(read_lake(call.request, work, kind))


async def _answered(reading: Awaitable[T]) -> T:
    try:
        return await reading
    except (HistoryError, ConfigurationError) as error:
        raise Refused(422, "History cannot answer", str(error)) from None


ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint(
        path="/overview",
        summary="The cluster at a glance.",
        answer=records.Overview,
        ask=lambda call: call.cluster.overview(),
    ),
    Endpoint(
        path="/nodes",
        summary="The nodes of the cluster.",
        answer=list[records.Node],
        ask=lambda call: call.cluster.nodes(),
    ),
    Endpoint(
        path="/nodes/{node}",
        summary="One worker, as it describes itself now.",
        answer=records.Worker,
        ask=_worker,
    ),
    Endpoint(
        path="/happenings",
        summary="Changes of membership, elections and leases in the last hour.",
        answer=list[records.Happening],
        ask=lambda call: call.cluster.happenings(since=call.query.since),
        query=SinceQuery,
    ),
    Endpoint(
        path="/tasks", summary="Tasks, newest first.", answer=records.TaskPage, ask=_tasks, query=TaskQuery
    ),
    Endpoint(
        path="/tasks/count",
        summary="How many tasks match.",
        answer=Counted,
        ask=lambda call: Counted(call.cluster.count(call.query)),
        query=TaskFilter,
    ),
    Endpoint(
        path="/views",
        summary="The saved views of the list of tasks.",
        answer=list[SavedView],
        ask=lambda call: call.dashboard.views(),
    ),
    Endpoint(path="/tasks/{task_id}", summary="One task.", answer=records.TaskDetail, ask=_task),
    Endpoint(
        path="/tasks/{task_id}/timeline",
        summary="The events of a task.",
        answer=records.TaskDetail,
        ask=_task,
    ),
    Endpoint(
        path="/tasks/{task_id}/workflow",
        summary="The tasks of its workflow, and the critical path.",
        answer=records.Workflow,
        ask=_workflow,
    ),
    Endpoint(
        path="/queues",
        summary="The queues.",
        answer=list[records.Queue],
        ask=lambda call: call.cluster.queues(),
    ),
    Endpoint(
        path="/queues/{queue:path}/messages",
        summary="The next messages of a queue.",
        answer=list[records.WaitingMessage],
        ask=lambda call: call.dashboard.peek(call.named("queue"), call.query.limit),
        query=PeekQuery,
    ),
    Endpoint(
        path="/dead-letters",
        summary="The dead letters, newest first.",
        answer=list[records.DeadLetterRow],
        ask=lambda call: call.dashboard.dead_letters(call.query.limit),
        query=LimitQuery,
    ),
    Endpoint(
        path="/schedule",
        summary="The periodic tasks.",
        answer=records.Schedule,
        ask=lambda call: call.dashboard.schedule(),
    ),
    Endpoint(
        path="/elections",
        summary="The elections, newest first.",
        answer=list[records.Election],
        ask=lambda call: call.cluster.elections(),
    ),
    Endpoint(
        path="/leases",
        summary="Who holds which lease.",
        answer=list[records.Lease],
        ask=lambda call: call.cluster.leases(),
    ),
    Endpoint(
        path="/rates",
        summary="The last hour in steps.",
        answer=records.Rates,
        ask=lambda call: call.cluster.rates(last_s=call.query.last_s, step_s=call.query.step_s),
        query=RatesQuery,
    ),
    Endpoint(
        path="/history",
        summary="Figures of recorded attempts: in total, by task, queue or worker, before and after a mark.",
        answer=Past,
        ask=_history,
        query=HistoryQuery,
    ),
    Endpoint(
        path="/history/rates",
        summary="Rates of recorded attempts, in steps of time.",
        answer=records.Rates,
        ask=_history_rates,
        query=HistoryFilter,
    ),
    Endpoint(
        path="/history/happenings",
        summary="Recorded changes of membership, elections and leases, after the state at the beginning.",
        answer=Recorded,
        ask=_history_happenings,
        query=PeriodQuery,
    ),
    Endpoint(
        method="POST",
        path="/history/sql",
        summary="The rows of one SELECT over the tables of history.",
        answer=Rows,
        ask=_history_sql,
        body=Question,
    ),
    Endpoint(
        path="/audit",
        summary="Who did what, newest first.",
        answer=list[AuditEntry],
        ask=lambda call: call.dashboard.audit.entries(limit=call.query.limit, before=call.query.before),
        query=AuditQuery,
    ),
    Endpoint(
        path="/me",
        summary="The authenticated visitor and its role.",
        answer=Me,
        ask=lambda call: Me(call.visitor.name, call.visitor.role.value, call.visitor.csrf),
    ),
    Endpoint(
        method="POST",
        path="/actions",
        summary="Change something; audited.",
        answer=ActionResult,
        ask=lambda call: call.dashboard.act(call.visitor, call.body),
        body=AnyAction,
    ),
)
