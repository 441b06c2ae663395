"""Flower's paths, in Flower's shapes, for the exporters and scripts that read them.

`/api/workers`, `/api/tasks`, `/api/task/info/ID`, `/api/queues/length`. They only read; what they change in
Flower is `POST /api/v1/actions` here.
"""

import asyncio
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from time import time
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from umbel.events.state import Tracked
from umbel.events.view import TaskRecord
from umbel.monitor.shapes import TaskFilter
from umbel.web.problems import Refused, as_json
from umbel.web.redaction import DETAIL_MAX, LIST_MAX, redact_data, redact_task
from umbel.web.site import PAGE_MAX

if TYPE_CHECKING:
    from umbel.web.dashboard import Dashboard

ASK_S = 2.0
QUESTIONS = ("stats", "active_queues", "registered", "conf")
OF_ONE = ("active", "scheduled", "reserved", "revoked")
SORT_KEYS: Mapping[str, Callable[[Tracked], Any]] = {
    "name": lambda task: task.name,
    "state": lambda task: task.counted,
    "received": lambda task: None if task.received is None else task.received.at_us,
    "started": lambda task: None if task.started is None else task.started.at_us,
}
SAME = (
    *(
        "uuid",
        "name",
        "state",
        "args",
        "kwargs",
        "eta",
        "expires",
        "retries",
        "worker",
        "result",
        "exception",
    ),
    *("runtime", "traceback", "exchange", "routing_key", "clock", "client", "root_id", "parent_id"),
)
TIMES = ("sent", "received", "started", "rejected", "succeeded", "failed", "retried", "revoked")


def routes(dashboard: "Dashboard") -> list[BaseRoute]:
    async def workers(request: Request) -> Response:
        name = request.query_params.get("workername")
        known = {one.node: one.state == "alive" for one in dashboard.nodes()}
        if request.query_params.get("status"):
            return as_json(known)
        if name and name not in known:
            raise Refused(404, "Not Found", f"Unknown worker '{name[:200]}'")
        return as_json(await _workers(dashboard, name))

    async def tasks(request: Request) -> Response:
        found = _tasks(dashboard, request)
        return as_json({one.uuid: as_flower(redact_task(one, LIST_MAX, dashboard.hides)) for one in found})

    async def task(request: Request) -> Response:
        found = dashboard.cluster.model.state.task(request.path_params["task_id"])
        if found is None:
            raise Refused(404, "Not Found", f"Unknown task '{request.path_params['task_id'][:200]}'")
        return as_json(as_flower(redact_task(found, DETAIL_MAX, dashboard.hides)))

    async def lengths(_request: Request) -> Response:
        rows = [{"name": one.queue, "messages": one.ready} for one in dashboard.queues()]
        return as_json({"active_queues": rows})

    return [
        Route("/api/workers", workers, methods=["GET"]),
        Route("/api/tasks", tasks, methods=["GET"]),
        Route("/api/task/info/{task_id}", task, methods=["GET"]),
        Route("/api/queues/length", lengths, methods=["GET"]),
    ]


def as_flower(task: TaskRecord) -> dict[str, Any]:
    """A task with the fields of Celery's event state, which Flower shows."""
    shown = {name: getattr(task, name) for name in SAME} | {
        name: getattr(task, f"{name}_at") for name in TIMES
    }
    return shown | {
        "timestamp": task.state_at,
        "root": task.root_id,
        "parent": task.parent_id,
        "children": [],
    }


async def _workers(dashboard: "Dashboard", name: str | None) -> dict[str, Any]:
    questions = (*QUESTIONS, *OF_ONE) if name else QUESTIONS
    asked = [dashboard.feed.ask(one, {}, name, timeout_s=ASK_S) for one in questions]
    answers = await asyncio.gather(*asked)
    found: dict[str, Any] = {}
    for question, answer in zip(questions, answers, strict=True):
        for node, reply in answer.replies.items():
            found.setdefault(node, {"timestamp": time()})[question] = redact_data(reply, LIST_MAX)
    return found


def _tasks(dashboard: "Dashboard", request: Request) -> list[TaskRecord]:
    given = request.query_params
    limit, offset = _number(given, "limit", PAGE_MAX), _number(given, "offset", 0)
    wanted = TaskFilter(
        name=_chosen(given.get("taskname")),
        worker=_chosen(given.get("workername")),
        state=_chosen(given.get("state")),
        text=given.get("search", ""),
        since=_moment(given, "received_start"),
        until=_moment(given, "received_end"),
    )
    by = given.get("sort_by", "")
    value = SORT_KEYS.get(by.lstrip("-"))
    if by and value is None:
        known = ", ".join(SORT_KEYS)
        raise Refused(400, "Bad Request", f"Invalid sort_by '{by[:50]}', expected one of {known}")
    return dashboard.cluster.part(
        wanted,
        offset,
        min(limit, PAGE_MAX),
        key=_newest if value is None else lambda task: _sortable(value(task)),
        reverse=value is None or by.startswith("-"),
    )


def _newest(task: Tracked) -> Any:
    return task.key


def _sortable(value: Any) -> tuple[bool, Any]:
    """What is not known is lowest, as Flower has it."""
    return value is not None, value


def _chosen(value: str | None) -> str:
    return "" if value in (None, "All") else str(value)


def _number(given: Mapping[str, str], name: str, otherwise: int) -> int:
    text = given.get(name, "")
    if text == "":
        return otherwise
    if not text.isdecimal() or len(text) > 9:
        raise Refused(400, "Bad Request", f"{name} is {text[:50]!r}; it must be a whole number")
    return int(text)


def _moment(given: Mapping[str, str], name: str) -> float | None:
    text = given.get(name, "")
    if not text:
        return None
    try:
        return datetime.strptime(text, "%Y-%m-%d %H:%M").replace(tzinfo=UTC).timestamp()
    except ValueError:
        detail = f"{name} is {text[:50]!r}, which is not a time; write it like 2026-01-31 18:00"
        raise Refused(400, "Bad Request", detail) from None
