"""What of Umbel pytest has loaded before any test asked for it."""

import sys

import pytest

LOADED_AT_START = sorted(name for name in sys.modules if name.partition(".")[0] == "umbel")


@pytest.fixture
def loaded_at_start() -> list[str]:
    return LOADED_AT_START
