import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from msgspec.structs import replace

from tests.backends.contract import BackendContract, Stores, closing
from tests.backends.contract_chords import ChordContract
from tests.brokers.under_test import result, run
from tests.servers.redis import RedisServer, redis_server, redis_url
from tests.waiting import wait_until
from umbel.backends.interface import Backend
from umbel.backends.registry import open_backend
from umbel.brokers.interface import BrokerSettings

__all__ = ["redis_server", "redis_url"]  # fixtures


@pytest.fixture
def stores(redis_url: str) -> Iterator[Stores]:
    opened: list[Backend] = []
    yield closing(
        opened, lambda **changes: open_backend(redis_url, replace(BrokerSettings(redis_url), **changes))
    )
    for backend in opened:
        backend.close()


class TestRedis(BackendContract, ChordContract):
    """Redis keeps every promise."""

    def test_waiting_for_many_subscribes_and_reads_once_however_many_there_are(
        self, stores: Stores, redis_server: RedisServer
    ) -> None:
        """Each ends by itself: to subscribe to the rest whenever one comes would be quadratic."""
        waiter, worker = stores(), stores()
        names = [str(number) for number in range(60)]

        async def scenario() -> None:
            await waiter.wait_async(names, None, lambda _: False)

        def judge(wait: Callable[[], object]) -> None:
            worker.forget(names)
            before = calls(redis_server)
            with ThreadPoolExecutor(1) as threads:
                waiting = threads.submit(wait)
                wait_until(lambda: calls(redis_server) - before >= 2, what="the waiter to look")
                for name in names:
                    worker.store([result(name)])
                waiting.result(60)
            assert calls(redis_server) - before <= 6

        judge(lambda: waiter.wait(names, None, lambda _: False))
        judge(lambda: run(scenario()))


def calls(server: RedisServer) -> int:
    """How many subscriptions and reads of results the server has seen."""
    answer = server.ask("INFO", "commandstats")
    assert isinstance(answer, bytes)
    found = re.findall(rb"cmdstat_(?:subscribe|mget):calls=([0-9]+)", answer)
    return sum(map(int, found))
