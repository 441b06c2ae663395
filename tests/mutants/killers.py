"""Killers: a pytest plugin. Tests that killed a mutant of the subject before run first on its next one.

Which tests those are stands in a file, one line for each kill; a test that fails adds its own.
"""

import os
from collections import Counter
from pathlib import Path

import pytest

VARIABLE = "MUTANTS_KILLERS"  # the file


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    kills = Counter(_file().read_text().splitlines())
    items.sort(key=lambda item: -kills[item.nodeid])


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        with _file().open("a") as file:
            file.write(f"{report.nodeid}\n")


def _file() -> Path:
    return Path(os.environ[VARIABLE])
