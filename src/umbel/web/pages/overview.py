"""Overview: is the cluster well, how much does it do, what fails."""

from starlette.requests import Request
from starlette.responses import Response

from umbel.web.pages.frame import render
from umbel.web.site import site_of


async def overview(request: Request) -> Response:
    return render(request, "overview.html", view=site_of(request).overview())
