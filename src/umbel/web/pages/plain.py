"""The pages that show what the site has as it is: schedule, elections, audit, login."""

from time import time

from starlette.requests import Request
from starlette.responses import Response

from umbel.web.pages.frame import render, render_login
from umbel.web.pages.numbers import number_of
from umbel.web.site import site_of

AUDIT_PAGE = 100


async def schedule(request: Request) -> Response:
    return render(request, "schedule.html", schedule=await site_of(request).schedule())


async def elections(request: Request) -> Response:
    site = site_of(request)
    found = site.elections()
    happened = [one for one in site.happenings() if one.kind in {"elected", "lease"}]
    return render(
        request,
        "elections.html",
        elections=sorted(found, key=lambda one: -one.last_at)[:200],
        broken=[one for one in found if one.violations],
        leases=site.leases(),
        handovers=happened[::-1][:100],
        now=time(),
    )


async def audit(request: Request) -> Response:
    before = number_of(request.query_params.get("before", ""))
    entries = await site_of(request).audit(limit=AUDIT_PAGE, before=before)
    return render(
        request,
        "audit.html",
        entries=entries,
        before=before or "",
        older=entries[-1].id if len(entries) == AUDIT_PAGE else None,
    )


async def login(request: Request) -> Response:
    return render_login(request, failed="failed" in request.query_params)
