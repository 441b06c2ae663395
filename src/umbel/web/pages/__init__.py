"""The pages of the dashboard: handlers, templates, static files."""

from starlette.routing import BaseRoute


def routes() -> list[BaseRoute]:
    """All pages, with the paths below which they are served."""
    return []
