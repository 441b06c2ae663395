"""Configuration: a Celery app's settings, as far as they are about the worker, as ours."""

from typing import Any

from umbel.app.app import App
from umbel.app.configuration.settings import Settings
from umbel.celery.settings_table import TABLE
from umbel.urls import without_password

FOR_EVER_S = 10 * 365 * 86_400.0  # that a stopping worker waits for its running tasks, as Celery's does


def settings_of(app: Any) -> Settings:
    return app_for(app).settings


def app_for(app: Any) -> App:
    """An `umbel.App` that stands for the Celery app in commands: same broker, results and names."""
    known = getattr(app, "umbel_app", None)
    if isinstance(known, App):
        return known
    given = {row.ours: row.value(app) for row in TABLE.values() if row.ours}
    given["worker_grace_s"] = FOR_EVER_S  # a task that is acknowledged would be lost if it were cut off
    made = App(app.main or "celery", **{name: value for name, value in given.items() if value is not None})
    app.umbel_app = made
    return made


def shown_backend(app: Any) -> str:
    return without_password(str(app.conf.result_backend or "disabled://"))
