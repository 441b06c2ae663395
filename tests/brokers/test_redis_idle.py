"""What workers without work cost the server: few commands each, and no more of them in a large cluster."""

import re
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.brokers.redis_claims import LEASE_S
from tests.brokers.under_test import QUEUE, BrokerUnderTest, run
from tests.cluster import Cluster
from tests.servers.redis import RedisServer, calls
from tests.waiting import wait_until
from umbel.brokers.interface import Broker

TASKS_FILE = Path(__file__).parents[1] / "scenarios" / "pool_tasks.py"
BEATS = 6  # every two seconds
COMMANDS_PER_BEAT_MAX = 13  # 10 to 11, and what is asked every half minute may be among them
OURS = re.compile(r"cmdstat_(?!info|config|select)[^:]+:calls=(\d+)")


def commands(server: RedisServer) -> int:
    """As many as the server has carried out, those within scripts among them."""
    stats = server.ask("INFO", "commandstats")
    assert isinstance(stats, bytes)
    return sum(int(count) for count in OURS.findall(stats.decode()))


@pytest.mark.scenario
@pytest.mark.timeout(120)
def test_an_idle_worker_asks_five_or_six_commands_a_second(
    redis_server: RedisServer, redis_url: str, tmp_path: Path
) -> None:
    """By its own heartbeats, so that a slow machine does not count."""
    with Cluster(tmp_path, TASKS_FILE, broker=redis_url) as cluster:
        cluster.start_worker("idle")

        def beats() -> int:
            return calls(redis_server, "publish")

        first = beats() + 6  # it has started, and has said so
        wait_until(lambda: beats() >= first, what="heartbeats")
        before, begun = commands(redis_server), beats()
        wait_until(lambda: beats() >= begun + BEATS, what="more heartbeats")
        spent = commands(redis_server) - before
        assert spent <= COMMANDS_PER_BEAT_MAX * BEATS, spent


async def cost_of_a_round(under_test: BrokerUnderTest, server: RedisServer, workers: int) -> float:
    """What each of so many workers asks while it keeps its lease, looks after the others, and watches."""
    names = [f"worker {number} of {workers}" for number in range(workers)]
    async with AsyncExitStack() as stack:
        brokers: list[Broker] = [await stack.enter_async_context(under_test.open()) for _ in names]

        async def round_of_all() -> None:
            for name, broker in zip(names, brokers, strict=True):
                await broker.renew(name)
                await broker.return_lost(by_turn=True)
                await broker.queues([QUEUE])

        await round_of_all()  # the first renewal is a longer one, and somebody tidies up
        before = commands(server)
        await round_of_all()
        cost = (commands(server) - before) / workers
        for name, broker in zip(names, brokers, strict=True):
            await broker.forget_owner(name)
        return cost


def test_what_a_worker_asks_does_not_grow_with_the_number_of_workers(
    patient: BrokerUnderTest, redis_server: RedisServer
) -> None:
    async def scenario() -> None:
        assert LEASE_S > 100.0, "nobody's turn comes again meanwhile"
        alone = await cost_of_a_round(patient, redis_server, 1)
        assert await cost_of_a_round(patient, redis_server, 32) == alone <= 8

    run(scenario())
