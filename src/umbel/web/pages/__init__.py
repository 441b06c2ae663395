"""The pages of the dashboard. To add a page, add a row to `PAGES` and a template.

A page is a function from a request to a response, in the file of its subject. It gets what it shows from
`Dashboard.cluster` or `Dashboard`, and renders a template (`frame.render`).
"""

import gzip
from mimetypes import guess_type
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from umbel.web.http import Refused
from umbel.web.pages.cluster import cluster
from umbel.web.pages.forms import confirm, do
from umbel.web.pages.frame import HERE, TEMPLATES, Handler, shown
from umbel.web.pages.history import history, history_download
from umbel.web.pages.status import audit, elections, overview, queue, queues, schedule, worker
from umbel.web.pages.tasks import failures, task, tasks


class Page(NamedTuple):
    """A page: its path, the function that answers, and its label and icon if it is in the menu."""

    path: str
    handler: Handler
    label: str = ""
    icon: str = ""


PAGES = (
    Page("/", overview, "Overview", "pulse"),
    Page("/cluster", cluster, "Cluster", "ring"),
    Page("/workers/{node:path}", worker),
    Page("/tasks", tasks, "Tasks", "list"),
    Page("/tasks/{task_id:path}", task),
    Page("/queues", queues, "Queues", "layers"),
    Page("/queues/{queue:path}", queue),
    Page("/failures", failures, "Failures", "alert"),
    Page("/schedule", schedule, "Schedule", "calendar"),
    Page("/elections", elections, "Elections", "crown"),
    Page("/history", history, "History", "history"),
    Page("/audit", audit, "Audit", "book"),
)
MENU = tuple(page for page in PAGES if page.label)
TEMPLATES.globals["menu"] = MENU


def routes() -> list[BaseRoute]:
    """Return the routes of the pages, of what they load, and of their forms."""
    return [
        *(Route(page.path, shown(page.handler)) for page in PAGES),
        Route("/history/download", history_download),
        Route("/confirm", confirm),
        Route("/do", do, methods=["POST"]),
        Route("/static/{name:path}", static),
    ]


# ---- static files ----------------------------------------------------------------------------------

STATIC = HERE / "static"
TYPES = {".js": "text/javascript", ".LICENSE": "text/plain"}
DAY = "public, max-age=86400"  # pages name the files with the version, so browsers may cache them
FILES = {
    path.relative_to(STATIC).as_posix(): (path.read_bytes(), gzip.compress(path.read_bytes(), mtime=0))
    for path in STATIC.rglob("*")
    if path.is_file()
}
"""The files, plain and compressed. They are in memory, because anyone can request them without a login."""


async def static(request: Request) -> Response:
    """Answer with a static file."""
    name = request.path_params["name"]
    if name not in FILES:
        raise Refused(404, "Not Found", "no such file")
    is_packed = "gzip" in request.headers.get("accept-encoding", "")
    headers = {"Cache-Control": DAY, "Vary": "Accept-Encoding"}
    return Response(
        FILES[name][is_packed],
        media_type=TYPES.get(f".{name.rpartition('.')[2]}") or guess_type(name)[0],
        headers=headers | ({"Content-Encoding": "gzip"} if is_packed else {}),
    )
