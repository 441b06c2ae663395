"""Endpoints: the API as a table: each with its path, its parameters, its answer, and what it asks the site.

Routes and the OpenAPI document are both made from `ENDPOINTS`, so neither knows what the other does not.
"""

from collections.abc import Awaitable, Callable
from functools import partial
from time import time
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from umbel.errors import ConfigurationError, HistoryError
from umbel.history.query import Tables
from umbel.monitor.records import (
    DeadLetterRow,
    Election,
    Happening,
    Lease,
    Node,
    Overview,
    Queue,
    Rates,
    Schedule,
    TaskDetail,
    TaskFilter,
    TaskPage,
    WaitingMessage,
    Worker,
    Workflow,
)
from umbel.web.actions import ActionResult, AnyAction, AuditEntry, SavedView
from umbel.web.lake import AttemptFilter, Past, Recorded, past, rates
from umbel.web.problems import Refused
from umbel.web.site import PAGE_MAX, ROWS_MAX, Caller, Site, Visitor, query_lake, read_lake, recorded_between

T = TypeVar("T")
DAY_S = 86_400.0
Limit = Annotated[int, msgspec.Meta(ge=1, le=PAGE_MAX)]
Moment = Annotated[float, msgspec.Meta(ge=0, le=253_402_300_799)]  # the year 9999


class ApiCall(msgspec.Struct, frozen=True):
    """One request of the API; `query` and `body` have the types of the endpoint."""

    caller: Caller
    path: dict[str, str]
    query: Any
    body: Any

    @property
    def site(self) -> Site:
        """The site that the request is for."""
        return self.caller.site

    @property
    def visitor(self) -> Visitor:
        """The authenticated visitor."""
        return self.caller.visitor


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
    """How many entries; `before`: the number of the last one of the previous page."""

    limit: Limit = 100
    before: Annotated[int, msgspec.Meta(ge=0, le=2**53)] = 0


class RatesQuery(msgspec.Struct, frozen=True):
    """How many seconds back, in steps of how many; 0 chooses a length that fits."""

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


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One path of the API: its parameters, its answer, and the function that computes it."""

    method: Literal["GET", "POST"] = "GET"
    path: str  # in Starlette's syntax
    summary: str
    answer: Any
    ask: Callable[[ApiCall], Awaitable[Any]]
    query: type[msgspec.Struct] = NoQuery
    body: Any = None


async def _overview(call: ApiCall) -> Overview:
    return call.site.overview()


async def _nodes(call: ApiCall) -> list[Node]:
    return call.site.nodes()


async def _worker(call: ApiCall) -> Worker:
    return _found(await call.site.worker(call.path["node"]), "node", call.path["node"])


async def _happenings(call: ApiCall) -> list[Happening]:
    return call.site.happenings(since=call.query.since)


async def _tasks(call: ApiCall) -> TaskPage:
    query = call.query
    return call.site.tasks(_filter(query), limit=query.limit, cursor=query.cursor, order=query.order)


async def _count(call: ApiCall) -> Counted:
    return Counted(call.site.count(call.query))


async def _task(call: ApiCall) -> TaskDetail:
    return _found(call.site.task(call.path["task_id"]), "task", call.path["task_id"])


async def _workflow(call: ApiCall) -> Workflow:
    return _found(call.site.workflow(call.path["task_id"]), "task", call.path["task_id"])


async def _queues(call: ApiCall) -> list[Queue]:
    return call.site.queues()


async def _peek(call: ApiCall) -> list[WaitingMessage]:
    return await call.site.peek(call.path["queue"], call.query.limit)


async def _letters(call: ApiCall) -> list[DeadLetterRow]:
    return await call.site.dead_letters(call.query.limit)


async def _schedule(call: ApiCall) -> Schedule:
    return await call.site.schedule()


async def _elections(call: ApiCall) -> list[Election]:
    return call.site.elections()


async def _leases(call: ApiCall) -> list[Lease]:
    return call.site.leases()


async def _rates(call: ApiCall) -> Rates:
    return call.site.rates(last_s=call.query.last_s, step_s=call.query.step_s)


async def _history(call: ApiCall) -> Past:
    asked = call.query
    return await _looked_back(call, partial(past, wanted=asked.wanted, by=asked.by, mark=asked.mark), Past)


async def _history_rates(call: ApiCall) -> Rates:
    return await _looked_back(call, partial(rates, wanted=call.query.wanted), Rates)


async def _history_happenings(call: ApiCall) -> Recorded:
    until = time() if call.query.until is None else call.query.until
    since = max(0.0, until - DAY_S) if call.query.since is None else call.query.since
    if since >= until:
        raise Refused(400, "Bad Request", "`since` must be before `until`")
    return await _answered(recorded_between(call.caller, since, until))


async def _history_sql(call: ApiCall) -> Rows:
    asked = call.body
    found = await _answered(query_lake(call.caller, asked.sql, asked.limit))
    return Rows(list(found.columns), list(found.types), [list(row) for row in found.rows], found.more)


async def _views(call: ApiCall) -> list[SavedView]:
    return await call.site.views()


async def _audit(call: ApiCall) -> list[AuditEntry]:
    return await call.site.audit(limit=call.query.limit, before=call.query.before)


async def _me(call: ApiCall) -> Me:
    return Me(call.visitor.name, call.visitor.role.value, call.visitor.csrf)


async def _act(call: ApiCall) -> ActionResult:
    return await call.site.act(call.visitor, call.body)


ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint(path="/overview", summary="The cluster at a glance.", answer=Overview, ask=_overview),
    Endpoint(path="/nodes", summary="The nodes of the cluster.", answer=list[Node], ask=_nodes),
    Endpoint(
        path="/nodes/{node}", summary="One worker, as it describes itself now.", answer=Worker, ask=_worker
    ),
    Endpoint(
        path="/happenings",
        summary="Changes of membership, elections and leases in the last hour.",
        answer=list[Happening],
        ask=_happenings,
        query=SinceQuery,
    ),
    Endpoint(path="/tasks", summary="Tasks, newest first.", answer=TaskPage, ask=_tasks, query=TaskQuery),
    Endpoint(
        path="/tasks/count", summary="How many tasks match.", answer=Counted, ask=_count, query=TaskFilter
    ),
    Endpoint(
        path="/views", summary="The saved views of the list of tasks.", answer=list[SavedView], ask=_views
    ),
    Endpoint(path="/tasks/{task_id}", summary="One task.", answer=TaskDetail, ask=_task),
    Endpoint(path="/tasks/{task_id}/timeline", summary="The events of a task.", answer=TaskDetail, ask=_task),
    Endpoint(
        path="/tasks/{task_id}/workflow",
        summary="The tasks of its workflow, and the critical path.",
        answer=Workflow,
        ask=_workflow,
    ),
    Endpoint(path="/queues", summary="The queues.", answer=list[Queue], ask=_queues),
    Endpoint(
        path="/queues/{queue:path}/messages",
        summary="The next messages of a queue.",
        answer=list[WaitingMessage],
        ask=_peek,
        query=PeekQuery,
    ),
    Endpoint(
        path="/dead-letters",
        summary="The dead letters, newest first.",
        answer=list[DeadLetterRow],
        ask=_letters,
        query=LimitQuery,
    ),
    Endpoint(path="/schedule", summary="The periodic tasks.", answer=Schedule, ask=_schedule),
    Endpoint(
        path="/elections", summary="The elections, newest first.", answer=list[Election], ask=_elections
    ),
    Endpoint(path="/leases", summary="Who holds which lease.", answer=list[Lease], ask=_leases),
    Endpoint(path="/rates", summary="The last hour in steps.", answer=Rates, ask=_rates, query=RatesQuery),
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
        answer=Rates,
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
        ask=_audit,
        query=AuditQuery,
    ),
    Endpoint(path="/me", summary="The authenticated visitor and its role.", answer=Me, ask=_me),
    Endpoint(
        method="POST",
        path="/actions",
        summary="Change something; audited.",
        answer=ActionResult,
        ask=_act,
        body=AnyAction,
    ),
)


async def _looked_back(call: ApiCall, work: Callable[[Tables], Any], kind: type[T]) -> T:
    return await _answered(read_lake(call.caller, work, kind))


async def _answered(asked: Awaitable[T]) -> T:
    try:
        return await asked
    except (HistoryError, ConfigurationError) as error:
        raise Refused(422, "History cannot answer", str(error)) from None


def _found(value: T | None, kind: str, name: str) -> T:
    if value is None:
        detail = f"there is no {kind} {name[:200]!r}, or the dashboard has dropped it from its memory"
        raise Refused(404, "Not Found", detail)
    return value


def _filter(query: TaskQuery) -> TaskFilter:
    fields = TaskFilter.__struct_fields__
    return TaskFilter(**{name: getattr(query, name) for name in fields})
