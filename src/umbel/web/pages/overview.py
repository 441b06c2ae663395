"""Overview: is the cluster well, how much does it do, what fails."""

from starlette.requests import Request
from starlette.responses import Response

from umbel.web.pages.frame import recent, render
from umbel.web.site import site_of


async def overview(request: Request) -> Response:
    return render(request, "overview.html", view=recent(request, "overview", site_of(request).overview))
