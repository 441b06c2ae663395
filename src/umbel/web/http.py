"""What all handlers share: the dashboard and the visitor of a request, JSON answers, and problem documents.

A handler is a Starlette endpoint. It may rely on this:

- The request is authenticated, except at the paths in `PUBLIC` of `application.py`. A request that changes
  something has a valid Origin and CSRF token. The change is an action (`Dashboard.act`), which checks the
  role.
- The application may be mounted below a path, so links are made with `path_to(request, "/tasks")`.
- Every response gets `Content-Security-Policy: default-src 'self'`, which forbids inline scripts, styles and
  event handlers.
- `Refused`, `BrokerError` and `ConfigurationError` may pass through. They become problem documents; a page
  shows the problem as a page.
"""

from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from umbel.web.settings import Role

if TYPE_CHECKING:
    from umbel.web.dashboard import Dashboard

PROBLEM_TYPE = "application/problem+json"


class Visitor(msgspec.Struct, frozen=True, kw_only=True):
    """An authenticated visitor. `csrf` is the token that each change must carry in the header
    `X-CSRF-Token`.
    """

    name: str
    role: Role
    csrf: str
    address: str


def dashboard_of(request: Request) -> "Dashboard":
    """Return the dashboard that serves the request."""
    dashboard: Dashboard = request.app.state.dashboard
    return dashboard


def visitor_of(request: Request) -> Visitor:
    """Return the visitor of an authenticated request."""
    visitor: Visitor = request.scope["umbel.visitor"]
    return visitor


def path_to(request: Request, path: str) -> str:
    """Return the address of a path of the dashboard, wherever the dashboard is mounted."""
    return f"{request.scope.get('root_path', '')}{path}"


def as_json(value: Any) -> Response:
    """Return a response with the value as JSON."""
    return Response(msgspec.json.encode(value, enc_hook=str), media_type="application/json")


class Problem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A problem document (RFC 9457); `type` is `about:blank` if the status says everything."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str = ""


class Refused(Exception):
    """A request that is answered with a problem document."""

    def __init__(self, status: int, title: str, detail: str = "", **headers: str) -> None:
        super().__init__(detail or title)
        self.problem = Problem(title=title, status=status, detail=detail)
        self._headers = {name.replace("_", "-"): value for name, value in headers.items()}

    def response(self) -> Response:
        """Return the problem document as a response."""
        body = msgspec.json.encode(self.problem)
        return Response(body, self.problem.status, self._headers, media_type=PROBLEM_TYPE)


class Forbidden(Refused):
    """A request that the visitor's role or origin does not allow; status 403."""

    def __init__(self, detail: str) -> None:
        super().__init__(403, "Forbidden", detail)
