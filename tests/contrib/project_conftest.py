"""What pytest-django does, where it is installed: Django is set up, and its tables are there."""

import os

import django
import pytest
from django.core.management import call_command
from django.db import connection

os.environ["DJANGO_SETTINGS_MODULE"] = "store.settings"
django.setup()


@pytest.fixture(autouse=True, scope="session")
def _tables() -> None:
    call_command("migrate", run_syncdb=True, verbosity=0)
    assert connection.vendor == os.environ["WANTED_VENDOR"]
