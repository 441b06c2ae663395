"""What pytest-django does, where it is installed: the settings, and a database for the tests."""

import os
from collections.abc import Iterator

import django
import pytest
from django.test.utils import setup_databases, teardown_databases

os.environ["DJANGO_SETTINGS_MODULE"] = "shop.settings"
django.setup()


@pytest.fixture(scope="session", autouse=True)
def _database() -> Iterator[None]:
    made = setup_databases(verbosity=0, interactive=False)
    yield
    teardown_databases(made, verbosity=0)
