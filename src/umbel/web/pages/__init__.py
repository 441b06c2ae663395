"""The pages of the dashboard: handlers, templates, static files."""

from starlette.routing import BaseRoute, Mount, Route

from umbel.web.pages.cluster import cluster
from umbel.web.pages.doing import confirm, do
from umbel.web.pages.failures import failures
from umbel.web.pages.frame import HERE, shown
from umbel.web.pages.history import history, history_download, history_rates
from umbel.web.pages.overview import overview
from umbel.web.pages.plain import audit, elections, login, schedule
from umbel.web.pages.queues import queue, queues
from umbel.web.pages.static_files import Files
from umbel.web.pages.task import task
from umbel.web.pages.tasks import tasks
from umbel.web.pages.worker import worker


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
        Route("/login", login),
        Mount("/static", Files(HERE / "static")),
    ]
