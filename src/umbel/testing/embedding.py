"""embedded(): an app that works on an embedded broker in a folder, for as long as a test takes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from umbel.app.app import App
from umbel.app.configuration.settings import EMBEDDED_FILE, with_others
from umbel.app.naming import home_of
from umbel.app.sending.routing import Router
from umbel.app.task import Task

SOURCE = "umbel_settings"


@contextmanager
def embedded(app: App, directory: Path, **settings: Any) -> Iterator[App]:
    """Inside this block messages and results of the app are in a file in `directory`.

    `settings` are changed meanwhile. Afterwards the app is as it was: its connections are closed, and tasks
    that a test has defined in a function are gone.
    """
    before, known = (app.settings, app.router), frozenset(app.tasks)
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
        for name in [one for one, task in app.tasks.items() if one not in known and _is_local(task)]:
            del app.tasks[name]


def _is_local(task: Task[Any, Any]) -> bool:
    """A module that was imported meanwhile keeps its tasks: nobody will import it again."""
    return "<locals>" in home_of(task.run)[1]
