"""Queues: how much waits where, for how long, and who takes it."""

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from umbel.history.markup import Markup
from umbel.history.scales import count
from umbel.monitor.shapes import Queue, Rates
from umbel.web.pages.drawing.heat import heat_map
from umbel.web.pages.frame import render
from umbel.web.pages.times import clock_time
from umbel.web.site import site_of

COLUMNS = 60
PEEK = 20


async def queues(request: Request) -> Response:
    site = site_of(request)
    return render(request, "queues.html", queues=site.queues(), heat=_heat(site.rates(step_s=60)))


async def queue(request: Request) -> Response:
    site, name = site_of(request), request.path_params["queue"]
    found = [one for one in site.queues() if one.queue == name]
    return render(
        request,
        "queue.html",
        status=200 if found else 404,
        name=name,
        # One that was purged while its page is open may be gone: it is shown as empty.
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
    return heat_map("Messages waiting, by queue and minute", rows, [clock_time(one)[:5] for one in at], count)
