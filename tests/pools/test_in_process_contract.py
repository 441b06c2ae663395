"""The contract on the pools that have no children."""

from tests.pools.contract import PoolContract


class TestSolo(PoolContract):
    name = "solo"


class TestThreads(PoolContract):
    name = "threads"


class TestAsyncio(PoolContract):
    name = "asyncio"
