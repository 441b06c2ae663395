"""Tasks: the list, with its filters in the URL, so that a view can be kept, sent and come back to."""

from collections.abc import Sequence
from typing import Any
from urllib.parse import urlencode

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from umbel.events.precedence import REJECTED, STATES
from umbel.monitor.shapes import TaskFilter
from umbel.web.pages.doing import filter_of
from umbel.web.pages.frame import render
from umbel.web.pages.times import parse_local
from umbel.web.site import site_of

PAGE = 50
VIEWS: Sequence[tuple[str, dict[str, str]]] = (
    ("All", {}),
    ("Running", {"state": "STARTED"}),
    ("Waiting", {"state": "PENDING,RECEIVED"}),
    ("Failed", {"state": "FAILURE"}),
    ("Retrying", {"state": "RETRY"}),
    ("Revoked", {"state": "REVOKED,REJECTED"}),
)
ORDERS = (("clock", "Lamport clock"), ("time", "wall clock"))


async def tasks(request: Request) -> Response:
    site, given = site_of(request), dict(request.query_params)
    problem, wanted = "", TaskFilter()
    try:
        wanted = filter_of(_with_times(given))
    except (msgspec.ValidationError, ValueError) as error:
        problem = str(error)
    order = given.get("order") if given.get("order") in dict(ORDERS) else "clock"
    page = site.tasks(wanted, limit=PAGE, cursor=given.get("cursor", ""), order=str(order))
    fields = _set(wanted)
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
        views=[(name, view, _is_current(view, fields)) for name, view in VIEWS],
        states=[*dict.fromkeys((*STATES.values(), REJECTED))],
        cursor=given.get("cursor", ""),
        given=given,
        nodes=[node.node for node in site.nodes()][:500],
        queues=[queue.queue for queue in site.queues()][:500],
    )


def _with_times(given: dict[str, str]) -> dict[str, Any]:
    """A form sends times as people write them, a link as Unix seconds."""
    return given | {
        name: str(parse_local(given[name])) for name in ("since", "until") if "T" in given.get(name, "")
    }


def _set(wanted: TaskFilter) -> dict[str, Any]:
    return {name: value for name, value in msgspec.structs.asdict(wanted).items() if value not in {"", None}}


def _is_current(view: dict[str, str], fields: dict[str, Any]) -> bool:
    return bool(fields.get("state", "") == view.get("state", ""))
