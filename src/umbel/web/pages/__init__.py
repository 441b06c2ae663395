"""The pages of the dashboard: handlers, templates, static files."""

from starlette.routing import BaseRoute, Mount, Route

from umbel.web.pages.cluster import cluster
from umbel.web.pages.doing import confirm, do
from umbel.web.pages.failures import failures
from umbel.web.pages.frame import HERE
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
    return [
        Route("/", overview),
        Route("/cluster", cluster),
        Route("/workers/{node:path}", worker),
        Route("/tasks", tasks),
        Route("/tasks/{task_id:path}", task),
        Route("/queues", queues),
        Route("/queues/{queue:path}", queue),
        Route("/failures", failures),
        Route("/schedule", schedule),
        Route("/elections", elections),
        Route("/history", history),
        Route("/history/rates", history_rates),
        Route("/history/download", history_download),
        Route("/audit", audit),
        Route("/confirm", confirm),
        Route("/do", do, methods=["POST"]),
        Route("/login", login),
        Mount("/static", Files(HERE / "static")),
    ]
