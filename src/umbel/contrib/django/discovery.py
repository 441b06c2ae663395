"""Finding the tasks of a Django project: the module `tasks` of each installed app, once Django is set up."""

import logging
from collections.abc import Iterable

import django
from django.apps import apps

from umbel.app.discovery import Discovery
from umbel.contrib.django.connections import close_opened_since, open_now


class DjangoDiscovery(Discovery):
    def __init__(self) -> None:
        super().__init__()
        self.add(_installed, "tasks")

    def run(self) -> None:
        """What an import opened is closed again: a worker's children are forked from here."""
        before = open_now()
        super().run()
        close_opened_since(before)


def _installed() -> Iterable[str]:
    if not apps.ready:  # `umbel worker -A umbel.contrib.django`; manage.py has done it
        django.setup()
    _enable_log()
    return [config.name for config in apps.get_app_configs()]


def _enable_log() -> None:
    """LOGGING of a project turns off the loggers it does not name, if they are there before it."""
    for name in list(logging.root.manager.loggerDict):
        if name.partition(".")[0] == "umbel":
            logging.getLogger(name).disabled = False
