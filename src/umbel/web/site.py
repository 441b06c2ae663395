"""Site: what a page handler gets. Pages ask it, change things through it, and know nothing below it.

A page is a Starlette endpoint. `umbel.web.pages.routes()` returns the list of routes; the application adds
them behind its own (`/api`, `/metrics`, `/healthcheck`, `/session`). In an endpoint:

    async def tasks(request: Request) -> Response:
        site, visitor = site_of(request), visitor_of(request)
        page = site.tasks(TaskFilter(state="FAILURE"), limit=50)

What is promised to pages:
- Everything that `Site` returns is redacted, and cut by size. It is text, and must be escaped like any text.
- A request that reaches a page is authenticated, except for `/login` and below `/static`, which need no
  visitor. Without a session a browser is sent to `/login`, whose form posts `token` to `/session`; the
  one-time URL is `/session?token=…`. `POST /session/end` logs out.
- The application checks each request that is not GET or HEAD: the Origin, and the header `X-CSRF-Token`,
  which must be `visitor.csrf` (`hx-headers`). So a page may have POST endpoints of its own; it passes
  the visitor to `act`, which judges the role.
- Headers: `Content-Security-Policy: default-src 'self'` (no inline script, style or event handler),
  no framing. They are added to every response.
- The application may be mounted below a path: links are made with `path_to(request, "/tasks")`.
- Live data: `EventSource(path_to(request, "/api/v1/stream"))`, at most ten pushes a second. Each event's
  name is a topic (`nodes`, `tasks`, `queues`, `elections`, `rates`, `audit`, `health`); its data is JSON:
  `tasks`: {"count": n, "ids": [the newest, at most 100]}; `nodes`, `queues`, `elections`: {"names": […]};
  `rates`: the newest `Figures`; `health`: `Health`; `audit`: {"ids": […]}. `reset`: too much was
  missed; reload. `?topics=tasks,rates` narrows. `Last-Event-ID` resumes.
"""

import asyncio
from collections.abc import Sequence
from typing import Protocol

import msgspec
from starlette.requests import Request

from umbel.monitor.shapes import (
    DeadLetterRow,
    Election,
    Happening,
    Health,
    Lease,
    Node,
    Overview,
    Queue,
    Rates,
    Schedule,
    TaskDetail,
    TaskFilter,
    TaskPage,
    WaitingMessage,
    Worker,
    Workflow,
)
from umbel.stores.interface import Where
from umbel.web.actions import ActionResult, AnyAction, AuditEntry
from umbel.web.recorded import Recollection
from umbel.web.roles import Role
from umbel.web.saved_views import SavedView

PAGE_MAX = 1000


class Visitor(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks. `csrf` is what each change must carry in the header `X-CSRF-Token`."""

    name: str
    role: Role
    csrf: str
    address: str


class Site(Protocol):
    """What a page asks and changes. Methods that are async ask the broker, the nodes or a file.

    They raise BrokerError when the broker does not answer; the application turns that into a 503.
    """

    @property
    def title(self) -> str: ...  # the app's name
    @property
    def badge(self) -> str: ...  # the environment: production, staging; "" when none was given
    @property
    def broker(self) -> str: ...  # its address, without the password
    @property
    def problem(self) -> str: ...  # what keeps it from hearing the cluster; ""
    @property
    def lake(self) -> Where: ...  # where the history is recorded, if it is
    @property
    def looking_back(self) -> asyncio.Semaphore: ...  # how many may ask the history at once
    @property
    def recollection(self) -> Recollection: ...  # what was read of it for the time slider
    @property
    def task_names(self) -> Sequence[str]: ...  # of the app and of what was heard, for suggestions

    def health(self) -> Health: ...
    def overview(self) -> Overview: ...
    def nodes(self) -> list[Node]: ...
    def node(self, name: str) -> Node | None: ...
    async def worker(self, name: str) -> Worker | None: ...
    def happenings(self, *, since: float = 0.0) -> list[Happening]: ...  # oldest first, of the last hour

    def tasks(
        self, wanted: TaskFilter, *, limit: int = 50, cursor: str = "", order: str = "clock"
    ) -> TaskPage: ...  # order: `clock` (Lamport) or `time`; newest first

    def count(self, wanted: TaskFilter) -> int: ...
    def task(self, task_id: str) -> TaskDetail | None: ...
    def workflow(self, task_id: str) -> Workflow | None: ...

    def queues(self) -> list[Queue]: ...
    async def peek(self, queue: str, limit: int = 20) -> list[WaitingMessage]: ...
    async def dead_letters(self, limit: int = 100) -> list[DeadLetterRow]: ...
    async def schedule(self) -> Schedule: ...
    def elections(self) -> list[Election]: ...
    def leases(self) -> list[Lease]: ...
    def rates(self, *, last_s: float = 3600.0, step_s: int = 0) -> Rates: ...  # 0: some 360 points
    async def views(self) -> list[SavedView]: ...  # of the list of tasks, by name
    async def audit(self, *, limit: int = 100, before: int = 0) -> list[AuditEntry]: ...  # newest first

    async def act(self, visitor: Visitor, action: AnyAction) -> ActionResult:
        """Write it to the audit, do it, write what came of it. Raises `Forbidden` for a role that may not."""
        ...


def site_of(request: Request) -> Site:
    site: Site = request.app.state.site
    return site


def visitor_of(request: Request) -> Visitor:
    """Who asks; only behind authentication."""
    visitor: Visitor = request.scope["umbel.visitor"]
    return visitor


def path_to(request: Request, path: str) -> str:
    """A path of the dashboard, wherever it is mounted."""
    return f"{request.scope.get('root_path', '')}{path}"
