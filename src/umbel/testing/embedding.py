"""embedded(): an app that works on an embedded broker in a folder, for as long as a test takes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from umbel.app.app import App
from umbel.app.configuration.settings import EMBEDDED_FILE, with_others
from umbel.app.sending.routing import Router

SOURCE = "umbel_settings"


@contextmanager
def embedded(app: App, directory: Path, **settings: Any) -> Iterator[App]:
    """Inside this block messages and results of the app are in a file in `directory`.

    `settings` change others of them meanwhile. Afterwards the app is as it was; its connections are closed
    before and after.
    """
    before = app.settings, app.router
    url = f"sqlite:///{directory.resolve() / EMBEDDED_FILE}"
    place = {"broker": url, "backend": url, "task_always_eager": False}
    changed = with_others(before[0], {**settings, **place}, source=SOURCE)
    app.close()
    app.settings = changed
    app.router = Router(app.settings.task_routes)
    try:
        yield app
    finally:
        app.close()
        app.settings, app.router = before
