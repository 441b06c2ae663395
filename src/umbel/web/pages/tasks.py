"""Tasks: the list, with its filters in the URL, so that a view can be kept, sent and come back to.

A saved view is such a URL with a name: it opens as a link, and is the current one where it shows the same.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from sqlite3 import Error as FileError
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
from umbel.web.saved_views import COLUMNS, NAME_MAX, USUAL, Column, SavedView
from umbel.web.site import Site, site_of

log = logging.getLogger("umbel.web")

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


async def _saved(site: Site) -> list[SavedView]:
    """None where the dashboard's file cannot be read: the list of tasks is in memory."""
    try:
        return await site.views()
    except FileError as error:
        log.warning("cannot read the saved views", extra={"why": str(error)})
        return []


async def tasks(request: Request) -> Response:
    site, given = site_of(request), dict(request.query_params)
    problem, wanted = "", TaskFilter()
    try:
        wanted = filter_of(_with_times(given))
    except (msgspec.ValidationError, ValueError) as error:
        problem = str(error)
    order = given.get("order") if given.get("order") in dict(ORDERS) else "clock"
    columns = columns_of(request.query_params.getlist("columns"))
    looks = _looks(str(order), columns)
    page = site.tasks(wanted, limit=PAGE, cursor=given.get("cursor", ""), order=str(order))
    fields = _set(wanted)
    saved = await _saved(site) if given.get("part", "views") == "views" else []  # other parts show none
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
        all_columns=[(one, LABELS[one]) for one in COLUMNS],
        views=[(name, view, _is_current(view, fields)) for name, view in VIEWS],
        saved=[(one, address := address_of(one), address == fields | looks) for one in saved],
        name_max=NAME_MAX,
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


def columns_of(given: Iterable[str]) -> tuple[Column, ...]:
    """A form sends them one by one, a link joined by commas; without any they are the usual ones."""
    named = {one for many in given for one in many.split(",")}
    return tuple(one for one in COLUMNS if one in named) or USUAL


def address_of(view: SavedView) -> dict[str, Any]:
    """What the URL of the view has in its query string."""
    return _set(view.match) | _looks(view.order, columns_of(view.columns))


def _looks(order: str, columns: tuple[Column, ...]) -> dict[str, str]:
    """How the list is shown, where that is not as usual."""
    given = {} if order == "clock" else {"order": order}
    return given if columns == USUAL else given | {"columns": ",".join(columns)}


def _set(wanted: TaskFilter) -> dict[str, Any]:
    return {name: value for name, value in msgspec.structs.asdict(wanted).items() if value not in {"", None}}


def _is_current(view: dict[str, str], fields: dict[str, Any]) -> bool:
    return bool(fields.get("state", "") == view.get("state", ""))
