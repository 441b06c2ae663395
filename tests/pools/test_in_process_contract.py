"""The contract on the pools that have no children."""

from collections.abc import Mapping
from typing import Any

import pytest

from tests.pools.contract import PoolContract


class TestSolo(PoolContract):
    name = "solo"


class TestThreads(PoolContract):
    name = "threads"


class TestAsyncio(PoolContract):
    name = "asyncio"


@pytest.mark.usefixtures("on_uvloop")
class TestAsyncioOnUvloop(PoolContract):
    name = "asyncio"
    options: Mapping[str, Any] = {"loop": "uvloop"}
