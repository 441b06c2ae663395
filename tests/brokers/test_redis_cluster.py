"""A Redis Cluster is refused in one line that says why (three nodes, as a small one has)."""

from collections.abc import Iterator

import pytest

from tests.brokers.under_test import run
from tests.servers.ports import free_port
from tests.servers.redis import RedisServer
from tests.waiting import wait_until
from umbel import App
from umbel.brokers.interface import BrokerSettings
from umbel.brokers.redis.broker import RedisBroker
from umbel.errors import AccessRefused

SLOTS = ((0, 5460), (5461, 10922), (10923, 16383))
OPTIONS = {"cluster-enabled": "yes"}
REFUSED = r"is a node of a Redis Cluster, .*; use one server"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    buses = [free_port() for _ in SLOTS]
    nodes = [
        RedisServer(
            tmp_path_factory.mktemp("node"), options={"cluster-enabled": "yes", "cluster-port": str(bus)}
        )
        for bus in buses
    ]
    try:
        for one, (first, last) in zip(nodes, SLOTS, strict=True):
            one.start()
            one.ask("CLUSTER", "ADDSLOTSRANGE", first, last)
        for one in nodes[1:]:
            one.ask("CLUSTER", "MEET", "127.0.0.1", nodes[0].port, buses[0])
        wait_until(lambda: all(b"cluster_state:ok" in _info(one) for one in nodes), what="the cluster")
        yield nodes[0]
    finally:
        for one in nodes:
            one.stop()


def _info(node: RedisServer) -> bytes:
    told = node.ask("CLUSTER", "INFO")
    assert isinstance(told, bytes)
    return told


def test_a_send_to_a_cluster_says_what_to_use(node: RedisServer) -> None:
    with App("x", broker=node.url) as app, pytest.raises(AccessRefused, match=REFUSED):
        app.send_task("t")


def test_a_worker_of_a_cluster_says_what_to_use(node: RedisServer) -> None:
    async def scenario() -> None:
        broker = RedisBroker(BrokerSettings(node.url))
        try:
            with pytest.raises(AccessRefused, match=REFUSED):
                await broker.open()
        finally:
            await broker.close()

    run(scenario())
