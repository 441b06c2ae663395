"""Status pages: overview, queues, a worker, schedule, elections and audit."""

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from umbel.history.markup import Markup, count
from umbel.monitor.records import Queue, Rates
from umbel.web.http import dashboard_of
from umbel.web.pages.drawings import heat_map
from umbel.web.pages.frame import missing, render
from umbel.web.pages.labels import clock_time

COLUMNS = 60  # minutes of the heat map
PEEK = 20  # messages of a queue
SETTINGS_MAX = 200
FAILURES_MAX = 10
ELECTIONS_MAX = 200
HANDOVERS_MAX = 100
AUDIT_PAGE = 100
DIGITS_MAX = 15  # every reader of JSON stores numbers of so many digits


async def overview(request: Request) -> Response:
    """Answer with the health, the rates and the tasks that fail most."""
    return render(request, "overview.html", view=dashboard_of(request).cluster.overview())


async def queues(request: Request) -> Response:
    """Answer with all queues, and their depths over the last hour."""
    cluster = dashboard_of(request).cluster
    heat = _heat(cluster.rates(step_s=60))
    return render(request, "queues.html", queues=cluster.queues(), heat=heat)


async def queue(request: Request) -> Response:
    """Answer with one queue and its next messages."""
    dashboard, name = dashboard_of(request), request.path_params["queue"]
    found = [row for row in dashboard.cluster.queues() if row.queue == name]
    return render(
        request,
        "queue.html",
        status=200 if found else 404,
        name=name,
        # A queue that was purged while its page is open may no longer exist: it is shown as empty.
        queue=found[0] if found else Queue(queue=name, ready=0, delayed=0, claimed=0),
        is_known=bool(found),
        waiting=await dashboard.peek(name, PEEK) if found else [],
        peek_max=PEEK,
    )


def _heat(rates: Rates) -> Markup | None:
    at = rates.at[-COLUMNS:]
    rows: list[tuple[str, Sequence[float | None]]] = [
        (name, depths[-COLUMNS:]) for name, depths in rates.queues.items()
    ]
    if not rows or not at:
        return None
    minutes = [clock_time(start)[:5] for start in at]
    return heat_map("Messages waiting, by queue and minute", rows, minutes, count)


async def worker(request: Request) -> Response:
    """Answer with one node, as it describes itself now."""
    name = request.path_params["node"]
    found = await dashboard_of(request).worker(name)
    if found is None:
        return missing(request, f"No node {name} is known", "No event of it was received in the last hour.")
    return render(
        request,
        "worker.html",
        worker=found,
        failures=found.failures[:FAILURES_MAX],
        node=found.node,
        pool=_pool(found.stats),
        settings=list(found.settings.items())[:SETTINGS_MAX],
    )


def _pool(stats: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plain values of the pool's stats, which any software may have sent."""
    pool = stats.get("pool")
    if not isinstance(pool, dict):
        return {}
    return {str(key): value for key, value in pool.items() if isinstance(value, int | float | str | list)}


async def schedule(request: Request) -> Response:
    """Answer with the periodic tasks."""
    return render(request, "schedule.html", schedule=await dashboard_of(request).schedule())


async def elections(request: Request) -> Response:
    """Answer with the elections, the leases and the changes of their holders."""
    cluster = dashboard_of(request).cluster
    found = cluster.elections()
    handovers = [change for change in cluster.happenings() if change.kind in {"elected", "lease"}]
    return render(
        request,
        "elections.html",
        elections=found[:ELECTIONS_MAX],
        broken=[election for election in found if election.violations],
        leases=cluster.leases(),
        handovers=handovers[::-1][:HANDOVERS_MAX],
    )


async def audit(request: Request) -> Response:
    """Answer with a page of the audit."""
    before = _number(request.query_params.get("before", ""))
    entries = await dashboard_of(request).audit.entries(limit=AUDIT_PAGE, before=before)
    return render(
        request,
        "audit.html",
        entries=entries,
        before=before or "",
        older=entries[-1].id if len(entries) == AUDIT_PAGE else None,
    )


def _number(text: str) -> int:
    """Return the number in a parameter of the URL; 0 if it is not a number, or too large."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= DIGITS_MAX else 0
