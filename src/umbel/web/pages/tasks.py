"""Task pages: the list of tasks, one task, and failures.

The filters of the list are in the URL, so that a list can be bookmarked and sent; a saved view is such a URL
with a name. The page of a task shows where it ran, why it waited and how it ended. The page of failures
groups dead letters and failed tasks by task and reason.
"""

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from sqlite3 import Error as FileError
from typing import Any
from urllib.parse import quote, urlencode

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from umbel.errors import BrokerError
from umbel.events.precedence import REJECTED, STATES
from umbel.history.markup import Markup, duration
from umbel.monitor.records import DeadLetterRow, TaskFilter, Workflow, WorkflowTask
from umbel.protocol.delivery.states import FAILURE, READY_STATES
from umbel.web.actions import COLUMNS, NAME_MAX, USUAL, Column, SavedView
from umbel.web.dashboard import Dashboard
from umbel.web.http import dashboard_of, path_to
from umbel.web.pages import drawings as graph
from umbel.web.pages.forms import filter_of
from umbel.web.pages.frame import missing, render
from umbel.web.pages.labels import parse_local
from umbel.web.pages.spacetime import spacetime, story_of

# ---- list ------------------------------------------------------------------------------------------

log = logging.getLogger("umbel.web")

PAGE = 50
SUGGESTED_MAX = 500
VIEWS: Sequence[tuple[str, dict[str, str]]] = (
    ("All", {}),
    ("Running", {"state": "STARTED"}),
    ("Waiting", {"state": "PENDING,RECEIVED"}),
    ("Failed", {"state": "FAILURE"}),
    ("Retrying", {"state": "RETRY"}),
    ("Revoked", {"state": "REVOKED,REJECTED"}),
)
ORDERS = (("clock", "Lamport clock"), ("time", "wall clock"))
LABELS: Mapping[Column, str] = {
    "state": "State",
    "args": "Arguments",
    "error": "Error",
    "queue": "Queue",
    "worker": "Worker",
    "retries": "Retries",
    "wait": "Wait",
    "run": "Run",
    "at": "At",
    "clock": "Clock",
}


async def _saved(dashboard: Dashboard) -> list[SavedView]:
    """Return the saved views; none if the dashboard's file cannot be read, as the list itself is in
    memory.
    """
    try:
        return await dashboard.views()
    except FileError as error:
        log.warning("cannot read the saved views", extra={"why": str(error)})
        return []


async def tasks(request: Request) -> Response:
    """Answer with a page of the list of tasks."""
    dashboard, given = dashboard_of(request), dict(request.query_params)
    cluster, problem, wanted = dashboard.cluster, "", TaskFilter()
    try:
        wanted = filter_of(_with_times(given))
    except (msgspec.ValidationError, ValueError) as error:
        problem = str(error)
    order = given["order"] if given.get("order") in dict(ORDERS) else "clock"
    columns = columns_of(request.query_params.getlist("columns"))
    looks = _looks(order, columns)
    page = cluster.tasks(wanted, limit=PAGE, cursor=given.get("cursor", ""), order=order)
    fields = _set(wanted)
    # Other parts do not show the saved views.
    saved = await _saved(dashboard) if given.get("part", "views") == "views" else []
    return render(
        request,
        "tasks.html",
        problem=problem,
        page=page,
        wanted=wanted,
        fields=fields,
        match=urlencode(fields),
        order=order,
        orders=ORDERS,
        columns=columns,
        looks=looks,
        all_columns=[(column, LABELS[column]) for column in COLUMNS],
        views=[(name, view, _is_current(view, fields)) for name, view in VIEWS],
        saved=[(view, address := address_of(view), address == fields | looks) for view in saved],
        name_max=NAME_MAX,
        states=[*dict.fromkeys((*STATES.values(), REJECTED))],
        cursor=given.get("cursor", ""),
        given=given,
        nodes=[node.node for node in cluster.nodes()][:SUGGESTED_MAX],
        queues=[queue.queue for queue in cluster.queues()][:SUGGESTED_MAX],
    )


def _with_times(given: dict[str, str]) -> dict[str, Any]:
    """Return the fields with times as Unix seconds: a form sends them as dates."""
    return given | {
        name: str(parse_local(given[name])) for name in ("since", "until") if "T" in given.get(name, "")
    }


def columns_of(given: Iterable[str]) -> tuple[Column, ...]:
    """Return the columns to show, by default the usual columns.

    A form sends each column as a parameter, a link joins them by commas.
    """
    named = {column for many in given for column in many.split(",")}
    return tuple(column for column in COLUMNS if column in named) or USUAL


def address_of(view: SavedView) -> dict[str, Any]:
    """Return the query fields of the view's URL."""
    return _set(view.match) | _looks(view.order, columns_of(view.columns))


def _looks(order: str, columns: tuple[Column, ...]) -> dict[str, str]:
    """Return the query fields for order and columns, if they differ from the default."""
    given = {} if order == "clock" else {"order": order}
    return given if columns == USUAL else given | {"columns": ",".join(columns)}


def _set(wanted: TaskFilter) -> dict[str, Any]:
    return {name: value for name, value in msgspec.structs.asdict(wanted).items() if value not in {"", None}}


def _is_current(view: dict[str, str], fields: dict[str, Any]) -> bool:
    return bool(fields.get("state", "") == view.get("state", ""))


# ---- one task --------------------------------------------------------------------------------------


async def task(request: Request) -> Response:
    """Answer with everything known about one task."""
    dashboard, task_id = dashboard_of(request), request.path_params["task_id"]
    cluster, detail = dashboard.cluster, dashboard.task(task_id)
    if detail is None:
        why = (
            "No event of it was received, or it was dropped from memory. "
            "The lake may have it: `umbel task show ID`."
        )
        return missing(request, f"No task {task_id} is known", why)
    ended = detail.task.state in READY_STATES
    if request.query_params.get("part") == "buttons" and not ended:
        return Response(status_code=204)  # the buttons stay, and keep the keyboard focus
    flow = cluster.workflow(task_id)
    flow = flow if flow is not None and len(flow.tasks) > 1 else None
    nodes: dict[str, str] = {node.node: node.state for node in cluster.nodes()}
    story = story_of(detail.events, detail.task.queue or "", nodes, cluster.happenings())
    return render(
        request,
        "task.html",
        detail=detail,
        task=detail.task,
        diagram=spacetime(story) if detail.events else None,
        flow=flow,
        drawn=None if flow is None else _drawn(request, flow, task_id),
        ended=ended,
        as_curl=_as_curl(request, task_id),
    )


def _drawn(request: Request, flow: Workflow, task_id: str) -> Markup:
    causes: dict[str, list[str]] = {}
    for before, after in flow.edges:
        causes.setdefault(after, []).append(before)
    steps = [
        graph.Step(
            task.uuid,
            task.name or task.uuid,
            task.state,
            tuple(causes.get(task.uuid, ())),
            _took(task),
            path_to(request, f"/tasks/{quote(task.uuid, safe='')}"),
        )
        for task in flow.tasks
    ]
    return graph.workflow(steps, flow.critical, task_id)


def _took(task: WorkflowTask) -> str:
    if task.started_at is None or task.ended_at is None:
        return ""
    return duration(max(0.0, task.ended_at - task.started_at))


def _as_curl(request: Request, task_id: str) -> str:
    """Return a curl command that retries the task through the API, with a placeholder for the token."""
    address = f"{request.url.scheme}://{request.url.netloc}{path_to(request, '/api/v1/actions')}"
    body = f'{{"action": "retry", "ids": ["{quote(task_id, safe="-")}"]}}'
    headers = "-H 'Authorization: Bearer TOKEN' -H 'Content-Type: application/json'"
    return f"curl -X POST {address} {headers} -d '{body}'"


# ---- failures --------------------------------------------------------------------------------------

LETTERS_MAX = 500
FAILED_MAX = 1000
GROUPS_MAX = 50  # of failed tasks
REASON_MAX = 120
_NUMBER = re.compile(r"(?<![A-Za-z])\d[\d.]*|\b[0-9a-f]{8}-[0-9a-f-]{27}\b")


@dataclass(slots=True)
class Group:
    """Failures with the same task and reason; `newest` is the id of the newest of them."""

    task: str
    reason: str
    newest: str
    count: int = 0


async def failures(request: Request) -> Response:
    """Answer with the dead letters and the failed tasks, grouped."""
    dashboard = dashboard_of(request)
    wanted_task, wanted_reason = (request.query_params.get(name, "") for name in ("task", "reason"))
    problem, letters = "", list[DeadLetterRow]()
    try:
        letters = await dashboard.dead_letters(LETTERS_MAX)
    except BrokerError as error:
        problem = str(error)
    shown = [
        letter
        for letter in letters
        if wanted_task in ("", letter.task) and wanted_reason in ("", kind_of(letter.reason))
    ]
    failed = dashboard.cluster.tasks(TaskFilter(state=FAILURE), limit=FAILED_MAX).tasks
    return render(
        request,
        "failures.html",
        problem=problem,
        letters=shown,
        every=len(letters),
        groups=groups_of((letter.task, letter.reason, letter.task_id) for letter in letters),
        failed=groups_of((task.name or "?", task.exception or "?", task.uuid) for task in failed)[
            :GROUPS_MAX
        ],
        wanted_task=wanted_task,
        wanted_reason=wanted_reason,
    )


def kind_of(reason: str) -> str:
    """Return the first line of a reason with its numbers replaced, which similar errors share."""
    return _NUMBER.sub("#", reason.split("\n", 1)[0])[:REASON_MAX]


def groups_of(failures: Iterable[tuple[str, str, str]]) -> list[Group]:
    """Return failures (task, reason, id), the newest first, grouped by task and reason, the largest group
    first.
    """
    groups: dict[tuple[str, str], Group] = {}
    for task, reason, task_id in failures:
        kind = kind_of(reason)
        groups.setdefault((task, kind), Group(task, kind, task_id)).count += 1
    return sorted(groups.values(), key=lambda group: -group.count)
