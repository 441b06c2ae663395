from collections.abc import Mapping
from typing import Any

import pytest

from tests.pools.contract import PoolContract


class TestPrefork(PoolContract):
    name = "prefork"


class TestPreforkAfresh(PoolContract):
    """The same with children that import the app for themselves."""

    name = "prefork"
    options: Mapping[str, Any] = {"child_start": "spawn"}


@pytest.mark.usefixtures("on_uvloop")
class TestPreforkOnUvloop(PoolContract):
    name = "prefork"
