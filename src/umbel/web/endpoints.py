"""Endpoints: the API as a table: each with its path, its parameters, its answer, and what it asks the site.

Routes and the OpenAPI document are both made from `ENDPOINTS`, so neither knows what the other does not.
"""

from collections.abc import Awaitable, Callable
from time import time
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from umbel.errors import ConfigurationError, HistoryError
from umbel.history.export import plain
from umbel.history.query import Tables
from umbel.monitor.shapes import (
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
from umbel.web.actions import ActionResult, AnyAction, AuditEntry
from umbel.web.looking_back import ROWS_MAX, look_back, may_query, query, recorded_between
from umbel.web.past import Past, Wanted, past, rates
from umbel.web.problems import Forbidden, Refused
from umbel.web.recorded import Recorded
from umbel.web.saved_views import SavedView
from umbel.web.site import PAGE_MAX, Site, Visitor

T = TypeVar("T")
DAY_S = 86_400.0
Limit = Annotated[int, msgspec.Meta(ge=1, le=PAGE_MAX)]
Moment = Annotated[float, msgspec.Meta(ge=0, le=253_402_300_799)]  # the year 9999


class Call(msgspec.Struct, frozen=True):
    """One request: who asks, and what for. `query` and `body` have the types of the endpoint."""

    site: Site
    visitor: Visitor
    path: dict[str, str]
    query: Any
    body: Any


class NoQuery(msgspec.Struct, frozen=True):
    pass


class TaskQuery(TaskFilter, frozen=True, kw_only=True):
    limit: Limit = 50
    cursor: Annotated[str, msgspec.Meta(max_length=2000)] = ""
    order: Literal["clock", "time"] = "clock"


class LimitQuery(msgspec.Struct, frozen=True):
    limit: Limit = 100


class PeekQuery(msgspec.Struct, frozen=True):
    limit: Limit = 20


class AuditQuery(msgspec.Struct, frozen=True):
    limit: Limit = 100
    before: Annotated[int, msgspec.Meta(ge=0, le=2**53)] = 0


class RatesQuery(msgspec.Struct, frozen=True):
    last_s: Annotated[float, msgspec.Meta(ge=5, le=3600)] = 3600.0
    step_s: Annotated[int, msgspec.Meta(ge=0, le=3600)] = 0


class SinceQuery(msgspec.Struct, frozen=True):
    since: Annotated[float, msgspec.Meta(ge=0)] = 0.0


class HistoryFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which attempts; times in seconds since 1970."""

    name: str = ""
    queue: str = ""
    worker: str = ""
    since: Moment | None = None
    until: Moment | None = None

    @property
    def wanted(self) -> Wanted:
        return Wanted(self.name, self.queue, self.worker, self.since, self.until)


class HistoryQuery(HistoryFilter, frozen=True, kw_only=True):
    by: Literal["name", "queue", "worker"] = "name"
    mark: Moment | None = None


class PeriodQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds since 1970; without `until` it ends now, without `since` it has one day."""

    since: Moment | None = None
    until: Moment | None = None


class Question(msgspec.Struct, frozen=True):
    sql: Annotated[str, msgspec.Meta(min_length=1, max_length=10_000)]
    limit: Annotated[int, msgspec.Meta(ge=1, le=ROWS_MAX)] = 100


class Rows(msgspec.Struct, frozen=True):
    """`more`: there were rows beyond the limit."""

    columns: list[str]
    types: list[str]
    rows: list[list[Any]]
    more: bool


class Counted(msgspec.Struct, frozen=True):
    count: int


class Me(msgspec.Struct, frozen=True):
    name: str
    role: str
    csrf: str


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    method: Literal["GET", "POST"] = "GET"
    path: str  # as Starlette writes it
    summary: str
    answer: Any
    ask: Callable[[Call], Awaitable[Any]]
    query: type[msgspec.Struct] = NoQuery
    body: Any = None


async def _overview(call: Call) -> Overview:
    return call.site.overview()


async def _nodes(call: Call) -> list[Node]:
    return call.site.nodes()


async def _worker(call: Call) -> Worker:
    return _found(await call.site.worker(call.path["node"]), "node", call.path["node"])


async def _happenings(call: Call) -> list[Happening]:
    return call.site.happenings(since=call.query.since)


async def _tasks(call: Call) -> TaskPage:
    query = call.query
    return call.site.tasks(_filter(query), limit=query.limit, cursor=query.cursor, order=query.order)


async def _count(call: Call) -> Counted:
    return Counted(call.site.count(call.query))


async def _task(call: Call) -> TaskDetail:
    return _found(call.site.task(call.path["task_id"]), "task", call.path["task_id"])


async def _workflow(call: Call) -> Workflow:
    return _found(call.site.workflow(call.path["task_id"]), "task", call.path["task_id"])


async def _queues(call: Call) -> list[Queue]:
    return call.site.queues()


async def _peek(call: Call) -> list[WaitingMessage]:
    return await call.site.peek(call.path["queue"], call.query.limit)


async def _letters(call: Call) -> list[DeadLetterRow]:
    return await call.site.dead_letters(call.query.limit)


async def _schedule(call: Call) -> Schedule:
    return await call.site.schedule()


async def _elections(call: Call) -> list[Election]:
    return call.site.elections()


async def _leases(call: Call) -> list[Lease]:
    return call.site.leases()


async def _rates(call: Call) -> Rates:
    return call.site.rates(last_s=call.query.last_s, step_s=call.query.step_s)


async def _history(call: Call) -> Past:
    asked = call.query
    return await _looked_back(call, lambda tables: past(tables, asked.wanted, asked.by, asked.mark))


async def _history_rates(call: Call) -> Rates:
    wanted = call.query.wanted
    return await _looked_back(call, lambda tables: rates(tables, wanted))


async def _history_happenings(call: Call) -> Recorded:
    until = time() if call.query.until is None else call.query.until
    since = max(0.0, until - DAY_S) if call.query.since is None else call.query.since
    if since >= until:
        raise Refused(400, "Bad Request", "`since` is not before `until`; name a time that has a length")
    return await _answered(recorded_between(call.site, since, until))


async def _history_sql(call: Call) -> Rows:
    if not may_query(call.visitor):
        raise Forbidden("queries need the role operator")
    asked = call.body
    found = await _looked_back(call, lambda tables: query(tables, asked.sql, asked.limit))
    rows = [[plain(value) for value in row] for row in found.rows]
    return Rows(list(found.columns), list(found.types), rows, found.more)


async def _views(call: Call) -> list[SavedView]:
    return await call.site.views()


async def _audit(call: Call) -> list[AuditEntry]:
    return await call.site.audit(limit=call.query.limit, before=call.query.before)


async def _me(call: Call) -> Me:
    return Me(call.visitor.name, call.visitor.role.value, call.visitor.csrf)


async def _act(call: Call) -> ActionResult:
    return await call.site.act(call.visitor, call.body)


ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint(path="/overview", summary="The cluster at a glance.", answer=Overview, ask=_overview),
    Endpoint(path="/nodes", summary="The nodes of the cluster.", answer=list[Node], ask=_nodes),
    Endpoint(path="/nodes/{node}", summary="One worker, asked just now.", answer=Worker, ask=_worker),
    Endpoint(
        path="/happenings",
        summary="Who came and went, who was elected, and who leads since, in the last hour.",
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
        summary="Figures of what is recorded: in total, by task, queue or worker, before and after a mark.",
        answer=Past,
        ask=_history,
        query=HistoryQuery,
    ),
    Endpoint(
        path="/history/rates",
        summary="What is recorded, in steps of time.",
        answer=Rates,
        ask=_history_rates,
        query=HistoryFilter,
    ),
    Endpoint(
        path="/history/happenings",
        summary="Who came and went, and who was elected, as it is recorded; before that, who was there.",
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
    Endpoint(path="/me", summary="Who asks, in which role.", answer=Me, ask=_me),
    Endpoint(
        method="POST",
        path="/actions",
        summary="Change something; audited.",
        answer=ActionResult,
        ask=_act,
        body=AnyAction,
    ),
)


async def _looked_back(call: Call, work: Callable[[Tables], T]) -> T:
    return await _answered(look_back(call.site, work))


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
