"""Worker: one node, what its processes do, and what can be changed about it."""

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from umbel.web.pages.frame import missing, render
from umbel.web.site import site_of

LISTED_MAX = 200
FAILURES_MAX = 10


async def worker(request: Request) -> Response:
    name = request.path_params["node"]
    found = await site_of(request).worker(name)
    if found is None:
        return missing(request, f"No node {name} is known", "It was not heard in the last hour.")
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
    """What the node says of its pool: plain values only, whatever its software is."""
    pool = stats.get("pool")
    if not isinstance(pool, dict):
        return {}
    return {str(key): value for key, value in pool.items() if isinstance(value, int | float | str | list)}
