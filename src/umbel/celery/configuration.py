"""Configuration: a Celery app's settings, as far as they are about the worker, as ours."""

from typing import Any

from umbel.app.app import App
from umbel.app.configuration.settings import Settings
from umbel.brokers.interface import BrokerSettings
from umbel.celery.queues import broker_settings
from umbel.celery.settings_table import TABLE
from umbel.urls import without_password

FOR_EVER_S = 10 * 365 * 86_400.0  # that a stopping worker waits for its running tasks, as Celery's does


class StandsForCelery(App):
    """In commands, for a Celery app: same broker, results and names, opened with its options."""

    def __init__(self, celery: Any, **settings: Any) -> None:
        super().__init__(celery.main or "celery", **settings)
        self._celery = celery

    def broker_settings(self) -> BrokerSettings:
        return broker_settings(self._celery, self.settings)


def settings_of(app: Any) -> Settings:
    return app_for(app).settings


def app_for(app: Any) -> App:
    known = getattr(app, "umbel_app", None)
    if isinstance(known, App):
        return known
    given = {row.ours: row.value(app) for row in TABLE.values() if row.ours}
    given["worker_grace_s"] = FOR_EVER_S  # a task that is acknowledged would be lost if it were cut off
    made = StandsForCelery(app, **{name: value for name, value in given.items() if value is not None})
    app.umbel_app = made
    return made


def shown_backend(app: Any) -> str:
    return without_password(str(app.conf.result_backend or "disabled://"))
