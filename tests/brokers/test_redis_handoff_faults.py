"""What the server hands over while waits are cut off, leases end and servers refuse: nothing is lost."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.brokers.test_redis_handoff import HANDED, is_blocked, waiting
from tests.brokers.under_test import (
    LONG_S,
    OWNER,
    PEER,
    QUEUE,
    SHORT_LEASE_S,
    BrokerUnderTest,
    eventually,
    outgoing,
    run,
    take,
    texts,
)
from tests.servers.redis import RedisServer, calls
from tests.waiting import wait_until
from umbel.brokers.interface import Ack, BrokerSettings, Claim, Depth, Settled
from umbel.brokers.redis.keys import CAPABILITIES

OTHER = "other"
ROOT = Path(__file__).parents[2]


def test_the_message_that_runs_is_the_one_that_is_adopted(
    on_redis: BrokerUnderTest, redis_server: RedisServer
) -> None:
    """A wait that was given up may have been handed something too."""

    async def scenario() -> None:
        async with on_redis.open() as broker:
            idle = await waiting(broker, redis_server)
            on_redis.producer().publish(outgoing("stray", queue=OTHER))
            redis_server.ask("LMOVE", OTHER, HANDED, "RIGHT", "LEFT")
            on_redis.producer().publish(outgoing("a"))
            (held,) = (await idle).deliveries
            assert held.message.body == b"a"
            assert await broker.settle([Ack(held.tag)]) == Settled(1)
            assert texts((await take(broker)).deliveries) == ["stray"]

    run(scenario())


def test_what_is_handed_to_an_owner_that_was_given_up_is_found(
    on_redis: BrokerUnderTest, redis_server: RedisServer
) -> None:
    """Its connection may still be blocked when its lease has ended, and it may never claim again."""

    async def scenario() -> None:
        async with on_redis.open(lease_s=SHORT_LEASE_S) as peer:
            async with on_redis.open(lease_s=SHORT_LEASE_S) as broker:
                await take(broker)
                idle = asyncio.create_task(broker.wait_ready([QUEUE], LONG_S, owner=OWNER))
                await eventually(lambda: is_blocked(redis_server), what="a blocked connection")

                async def given_up() -> bool:
                    await peer.renew(PEER)
                    await peer.return_lost()
                    return redis_server.ask("ZSCORE", "umbel.owners", OWNER) is None

                await eventually(given_up, what="the end of the lease")
                on_redis.producer().publish(outgoing("a"))
                await idle
                assert redis_server.ask("LLEN", HANDED) == 1

            async def taken() -> Claim | None:
                claim = await take(peer, owner=PEER)
                return claim if claim.deliveries else None

            (held,) = (await eventually(taken, what="the message")).deliveries
            assert (held.message.body, held.redelivered) == (b"a", True)

            assert redis_server.ask("HEXISTS", "umbel.handing", OWNER) == 1
            redis_server.ask("ZADD", "umbel.handing.given_up", 0, OWNER)  # by now it is long ago
            await peer.return_lost()

    run(scenario())
    assert redis_server.ask("EXISTS", "umbel.handing", "umbel.handing.given_up") == 0


def test_nothing_is_handed_over_from_a_queue_that_was_left(
    on_redis: BrokerUnderTest, redis_server: RedisServer
) -> None:
    async def scenario() -> None:
        async with on_redis.open() as broker:
            await take(broker)
            idle = asyncio.create_task(broker.wait_ready([QUEUE], LONG_S, owner=OWNER))
            await eventually(lambda: is_blocked(redis_server), what="a blocked connection")
            on_redis.producer().publish(outgoing("a"))
            await idle
            assert not (await broker.claim(OWNER, [OTHER], 1)).deliveries
            assert await broker.queues() == {QUEUE: Depth(1, 0, 0)}

            await take(broker)
            idle = asyncio.create_task(broker.wait_ready([QUEUE], LONG_S, owner=OWNER))
            await eventually(lambda: is_blocked(redis_server), what="a blocked connection")
            before = calls(redis_server, "client|unblock")
            await broker.leave_queue(OWNER, QUEUE)
            await idle
            assert calls(redis_server, "client|unblock") > before  # its wait was ended, not waited for
            on_redis.producer().publish(outgoing("b"))
            assert redis_server.ask("LLEN", QUEUE) == 1

    run(scenario())


def test_where_a_wait_cannot_be_ended_nothing_is_handed_over(tmp_path: Path) -> None:
    """`CLIENT UNBLOCK` is among the dangerous commands that users are often denied."""
    server = RedisServer(tmp_path)
    server.start()
    try:
        server.ask("ACL", "SETUSER", "worker", "on", ">word", "~*", "&*", "+@all", "-client|unblock")
        settings = BrokerSettings(server.url.replace("//", "//worker:word@"))
        on_redis = BrokerUnderTest(settings, CAPABILITIES)

        async def scenario() -> None:
            async with on_redis.open() as broker:
                idle = asyncio.create_task(broker.wait_ready([QUEUE], LONG_S, owner=OWNER))

                async def tracked() -> bool:
                    found = server.ask("CLIENT", "LIST")
                    assert isinstance(found, bytes)
                    return b"flags=t" in found

                await eventually(tracked, what="a connection that is told of changes")
                on_redis.producer().publish(outgoing("a", priority=3))
                await idle
                assert calls(server, "blmove") == 0
                assert texts((await take(broker)).deliveries) == ["a"]

        run(scenario())
        on_redis.close()
    finally:
        server.stop()


def test_another_server_than_the_one_claimed_from_hands_over_nothing(
    on_redis: BrokerUnderTest, redis_server: RedisServer, tmp_path: Path
) -> None:
    """Of two servers in one address each connection may have found another."""
    first = RedisServer(tmp_path)
    first.start()
    settings = BrokerSettings(f"{first.url};{redis_server.url}", connect_timeout_s=0.5)
    torn = BrokerUnderTest(settings, CAPABILITIES)

    async def scenario() -> None:
        async with torn.open() as broker:
            assert not (await take(broker)).deliveries
            first.pause()  # the connection that claims stays, and none can be made
            on_redis.producer().publish(outgoing("a"))
            await broker.wait_ready([QUEUE], LONG_S, owner=OWNER)
            assert redis_server.ask("LLEN", QUEUE) == 1

    try:
        run(scenario())
    finally:
        first.resume()
        first.stop()


def test_consumers_that_are_killed_at_any_moment_lose_nothing(
    on_redis: BrokerUnderTest, redis_server: RedisServer, tmp_path: Path
) -> None:
    """S1: one message at a time arrives where idle consumers are handed it, and die at any moment."""
    log = tmp_path / "log"
    log.touch()
    sent = [f"m{number}" for number in range(1500 if os.environ.get("UMBEL_SOAK") else 100)]
    command = [sys.executable, "-m", "tests.brokers.dying_consumers", redis_server.url, str(log)]
    consumers = [subprocess.Popen([*command, name, "1.0"], cwd=ROOT) for name in ("ada", "bob", "eve")]

    def runs() -> list[tuple[str, bool]]:
        lines = [line.split() for line in log.read_text().splitlines()]
        return [(text, again == "1") for text, again in lines]

    def is_quiet() -> bool:
        return not asyncio.run(depths())

    async def depths() -> Mapping[str, Depth]:
        async with on_redis.open() as broker:
            return await broker.queues()

    try:
        producer = on_redis.producer()
        for text in sent:
            wait_until(lambda: blocked_on(redis_server) > 0, what="an idle consumer")
            producer.publish(outgoing(text))
        wait_until(lambda: {text for text, _ in runs()} == set(sent), deadline_s=LONG_S, what="every message")
        wait_until(is_quiet, deadline_s=LONG_S, what="the end of every message")
    finally:
        for one in consumers:
            one.terminate()
        for one in consumers:
            one.wait(10)
    first_runs = [text for text, again in runs() if not again]
    assert len(set(first_runs)) == len(first_runs), "a second run says that it is one"
    assert len(runs()) > len(sent), "some died with a message that they had run"
    assert redis_server.ask("KEYS", "umbel.handed.*") == []


def blocked_on(server: RedisServer) -> int:
    found = server.ask("INFO", "clients")
    assert isinstance(found, bytes)
    return int(found.partition(b"blocked_clients:")[2].partition(b"\r")[0])
