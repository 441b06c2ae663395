"""It asks the database while Django is set up, as careless apps do."""

import warnings

from django.apps import AppConfig
from django.db import connection


def backend_pid() -> int:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        return int(cursor.fetchone()[0])


class ProbeConfig(AppConfig):
    name = "probe"
    at_setup = 0

    def ready(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Django's, that this is careless
            type(self).at_setup = backend_pid()
