"""Status pages: overview, queues, a worker, schedule, elections and audit."""

from collections.abc import Mapping, Sequence
from time import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from umbel.history.charts import Markup, count
from umbel.monitor.records import Queue, Rates
from umbel.web.pages.drawings import heat_map
from umbel.web.pages.frame import missing, render
from umbel.web.pages.labels import clock_time
from umbel.web.site import site_of

# ---- overview --------------------------------------------------------------------------------------
#
# Is the cluster well, how much does it do, what fails.


async def overview(request: Request) -> Response:
    """Answer with the health, the rates and what fails most."""
    return render(request, "overview.html", view=site_of(request).overview())


# ---- queues ----------------------------------------------------------------------------------------
#
# How much waits where, for how long, and who takes it.

COLUMNS = 60
PEEK = 20


async def queues(request: Request) -> Response:
    """Answer with all queues, and their depths over the last hour."""
    site = site_of(request)
    return render(request, "queues.html", queues=site.queues(), heat=_heat(site.rates(step_s=60)))


async def queue(request: Request) -> Response:
    """Answer with one queue and its next messages."""
    site, name = site_of(request), request.path_params["queue"]
    found = [row for row in site.queues() if row.queue == name]
    return render(
        request,
        "queue.html",
        status=200 if found else 404,
        name=name,
        # A queue that was purged while its page is open may no longer exist: it is shown as empty.
        queue=found[0] if found else Queue(queue=name, ready=0, delayed=0, claimed=0),
        is_known=bool(found),
        waiting=await site.peek(name, PEEK) if found else [],
        peek_max=PEEK,
    )


def _heat(rates: Rates) -> Markup | None:
    at = rates.at[-COLUMNS:]
    rows: list[tuple[str, Sequence[float | None]]] = [
        (name, depths[-COLUMNS:]) for name, depths in rates.queues.items()
    ]
    if not rows or not at:
        return None
    return heat_map(
        "Messages waiting, by queue and minute", rows, [clock_time(start)[:5] for start in at], count
    )


# ---- worker ----------------------------------------------------------------------------------------
#
# One node, what its processes do, and what can be changed about it.

LISTED_MAX = 200
FAILURES_MAX = 10


async def worker(request: Request) -> Response:
    """Answer with one node, as it describes itself now."""
    name = request.path_params["node"]
    found = await site_of(request).worker(name)
    if found is None:
        return missing(request, f"No node {name} is known", "No event of it was received in the last hour.")
    return render(
        request,
        "worker.html",
        worker=found,
        failures=found.failures[:FAILURES_MAX],
        node=found.node,
        pool=_pool(found.stats),
        settings=list(found.settings.items())[:LISTED_MAX],
    )


def _pool(stats: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plain values of the pool's stats, which any software may have sent."""
    pool = stats.get("pool")
    if not isinstance(pool, dict):
        return {}
    return {str(key): value for key, value in pool.items() if isinstance(value, int | float | str | list)}


# ---- numbers ---------------------------------------------------------------------------------------
#
# Numbers as a URL has them.

DIGITS_MAX = 15  # as many as every reader of JSON keeps


def number_of(text: str) -> int:
    """Return the number in a URL's parameter; 0 if it is none, or too large."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= DIGITS_MAX else 0


# ---- plain -----------------------------------------------------------------------------------------
#
# Schedule, elections and audit, shown as the site answers them.

AUDIT_PAGE = 100


async def schedule(request: Request) -> Response:
    """Answer with the periodic tasks."""
    return render(request, "schedule.html", schedule=await site_of(request).schedule())


async def elections(request: Request) -> Response:
    """Answer with the elections, the leases and their hand-overs."""
    site = site_of(request)
    found = site.elections()
    happened = [change for change in site.happenings() if change.kind in {"elected", "lease"}]
    return render(
        request,
        "elections.html",
        elections=sorted(found, key=lambda election: -election.last_at)[:200],
        broken=[election for election in found if election.violations],
        leases=site.leases(),
        handovers=happened[::-1][:100],
        now=time(),
    )


async def audit(request: Request) -> Response:
    """Answer with a page of the audit."""
    before = number_of(request.query_params.get("before", ""))
    entries = await site_of(request).audit(limit=AUDIT_PAGE, before=before)
    return render(
        request,
        "audit.html",
        entries=entries,
        before=before or "",
        older=entries[-1].id if len(entries) == AUDIT_PAGE else None,
    )
