"""Umbel in Flask: an extension whose tasks run in the application context.

    umbel = Umbel()

    @umbel.task
    def pack(order_id: int) -> None: ...

    def create_app() -> Flask:
        app = Flask("shop")
        app.config["UMBEL"] = {"broker": "redis://localhost"}
        umbel.init_app(app)
        return app

The worker needs a module that contains both: `umbel worker -A wsgi`.
"""

from collections.abc import Callable, Mapping
from functools import wraps
from inspect import iscoroutine
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from flask import Flask
from flask.ctx import AppContext

from umbel.app.app import App
from umbel.app.definition import directory_of
from umbel.app.options import Router
from umbel.app.settings import Settings, assemble, with_others
from umbel.app.task import Task
from umbel.errors import ConfigurationError

__all__ = ["FlaskTask", "Umbel"]

P = ParamSpec("P")
R = TypeVar("R")
SOURCE = 'app.config["UMBEL"]'


class FlaskTask(Task[P, R]):
    """A task that runs in the application context. A direct call runs the plain function."""

    def __init__(self, app: "Umbel", *definition: Any) -> None:
        super().__init__(app, *definition)
        self.entry = _in_context(app, self.entry, is_async=self.is_async)


class Umbel(App):
    """The app of a Flask site. `app.config["UMBEL"]` overrides `settings`."""

    Task = FlaskTask

    def __init__(
        self, app: Flask | None = None, *, directory: str | Path | None = None, **settings: Any
    ) -> None:
        super().__init__(app.name if app else "flask", directory=directory, **settings)
        self._directory, self._constructed = directory, settings
        self._own_settings = self.settings
        self._flask: Flask | None = None
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Flask) -> None:
        """Use the settings of this site, and run tasks in its context. A later call replaces the site."""
        given = app.config.get("UMBEL", {})
        if not isinstance(given, Mapping):
            raise ConfigurationError(
                # Not its value, which may hold a password.
                f'{SOURCE} is of type {type(given).__name__}: it must be a dict, such as {{"broker": "redis://..."}}'
            )
        with_others(Settings(), given, source=SOURCE)
        app.extensions["umbel"] = self
        self.name, self._flask = app.name, app
        self._take({**self._constructed, **given})

    def context(self) -> AppContext:
        """The application context for a task; ConfigurationError without an application."""
        if self._flask is None:
            raise ConfigurationError(
                "no Flask application is known here: call umbel.init_app(app) in the module that -A names"
            )
        return self._flask.app_context()

    def before_children(self, node: str, *, forks: bool) -> None:
        """Raise ConfigurationError without an application, so that a worker does not start."""
        self.context()

    def _take(self, given: Mapping[str, Any]) -> None:
        if self.settings is not self._own_settings:
            return  # a test has given the app a temporary broker
        self.close()
        self.settings = self._own_settings = assemble(given, directory=directory_of(self._directory))
        self.router = Router(self.settings.task_routes)


def _in_context(app: Umbel, run: Callable[..., Any], *, is_async: bool) -> Callable[..., Any]:
    async def awaited(coroutine: Any) -> Any:
        with app.context():
            return await coroutine

    @wraps(run)
    def entry(*args: Any, **kwargs: Any) -> Any:
        if is_async:
            return awaited(run(*args, **kwargs))
        with app.context():
            value = run(*args, **kwargs)
        return awaited(value) if iscoroutine(value) else value  # an `async def` behind a decorator

    return entry
