"""The pages of the dashboard: handlers, templates, static files."""

from starlette.routing import BaseRoute, Mount, Route

from umbel.web.pages.cluster import cluster
from umbel.web.pages.forms import confirm, do
from umbel.web.pages.frame import HERE, Files, shown
from umbel.web.pages.history import history, history_download, history_rates
from umbel.web.pages.status import audit, elections, overview, queue, queues, schedule, worker
from umbel.web.pages.tasks import failures, task, tasks


def routes() -> list[BaseRoute]:
    """All pages, with the paths below which they are served."""
    pages = {
        "/": overview,
        "/cluster": cluster,
        "/workers/{node:path}": worker,
        "/tasks": tasks,
        "/tasks/{task_id:path}": task,
        "/queues": queues,
        "/queues/{queue:path}": queue,
        "/failures": failures,
        "/schedule": schedule,
        "/elections": elections,
        "/history": history,
        "/audit": audit,
    }
    return [
        *(Route(path, shown(page)) for path, page in pages.items()),
        Route("/history/rates", history_rates),
        Route("/history/download", history_download),
        Route("/confirm", confirm),
        Route("/do", do, methods=["POST"]),
        Mount("/static", Files(HERE / "static")),
    ]
