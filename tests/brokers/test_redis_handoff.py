"""Messages that the server hands to an idle worker: nothing lost, nothing early, nothing revoked run."""

import asyncio
import time
from collections.abc import Sequence
from typing import cast

import pytest

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
from umbel.brokers.interface import Ack, Broker, Claim, Depth, Settled
from umbel.errors import BrokerError
from umbel.wire.records import Revoke

HANDED = f"umbel.handed.{OWNER}"


async def waiting(
    broker: Broker, server: RedisServer, *, queues: Sequence[str] = (QUEUE,), after: int = 0
) -> "asyncio.Task[Claim]":
    """An idle worker: it has claimed, waits until the server has it blocked, and claims again."""
    assert not (await broker.claim(OWNER, queues, 1, revoked_after=after)).deliveries
    task = asyncio.create_task(wait_and_claim(broker, queues=queues, after=after))
    await eventually(lambda: is_blocked(server), what="a blocked connection")
    return task


async def wait_and_claim(broker: Broker, *, queues: Sequence[str] = (QUEUE,), after: int = 0) -> Claim:
    await broker.wait_ready(queues, LONG_S, owner=OWNER)
    return await broker.claim(OWNER, queues, 10, revoked_after=after)


async def is_blocked(server: RedisServer) -> bool:
    found = server.ask("INFO", "clients")
    assert isinstance(found, bytes)
    return b"blocked_clients:1\r\n" in found


def test_an_idle_worker_is_handed_its_message_and_settles_it(
    on_redis: BrokerUnderTest, redis_server: RedisServer
) -> None:
    async def scenario() -> None:
        async with on_redis.open() as broker:
            for text in ("a", "b", "c"):
                idle = await waiting(broker, redis_server)
                on_redis.producer().publish(outgoing(text))
                (held,) = (await idle).deliveries
                assert (held.message.body, held.redelivered) == (text.encode(), False)
                assert await broker.settle([Ack(held.tag)]) == Settled(1)
                assert await broker.settle([Ack(held.tag)]) == Settled(0, frozenset({held.tag}))
                assert await broker.queues() == {}

    run(scenario())
    assert redis_server.ask("EXISTS", HANDED, QUEUE) == 0


def test_what_is_handed_over_is_claimed_like_anything_else(
    on_redis: BrokerUnderTest, redis_server: RedisServer
) -> None:
    async def scenario() -> None:
        async with on_redis.open() as broker, on_redis.open() as peer:
            idle = await waiting(broker, redis_server)
            on_redis.producer().publish(outgoing("a", "b"))
            (held,) = (await idle).deliveries
            assert texts((await take(broker)).deliveries) == ["b"]
            assert await peer.queues() == {QUEUE: Depth(0, 0, 2)}
            assert not (await take(peer, owner=PEER)).deliveries
            assert await broker.forget_owner(OWNER) == 2
            again = (await take(peer, owner=PEER)).deliveries
            assert texts(again) == ["a", "b"] and all(one.redelivered for one in again)
            assert (await broker.settle([Ack(held.tag)])).conflicts == {held.tag}

    run(scenario())


def test_a_task_of_an_idle_worker_costs_two_scripts_of_few_commands(
    on_redis: BrokerUnderTest, redis_server: RedisServer
) -> None:
    """Nothing waits behind its message: a claim would find nothing, and the next one is handed over too."""

    async def scenario() -> None:
        async with on_redis.open() as broker:
            await broker.renew(OWNER)
            idle = await waiting(broker, redis_server)
            for text in ("a", "b", "c"):
                redis_server.ask("CONFIG", "RESETSTAT")
                on_redis.producer().publish(outgoing(text))
                (held,) = (await idle).deliveries
                assert not (await take(broker)).deliveries
                assert await broker.settle([Ack(held.tag)]) == Settled(1)
                if text != "a":  # from then on the server knows the scripts
                    counts = [
                        calls(redis_server, name) for name in ("evalsha", "lpop", "hset", "hdel", "rpop")
                    ]
                    assert counts == [2, 1, 1, 1, 0]
                idle = asyncio.create_task(wait_and_claim(broker))
                await eventually(lambda: is_blocked(redis_server), what="a blocked connection")
            idle.cancel()

    run(scenario())


def test_what_is_handed_to_a_wait_that_was_given_up_goes_back_with_the_next_renewal(
    on_redis: BrokerUnderTest, redis_server: RedisServer
) -> None:
    """A worker that stops claims no more, and may run tasks for long."""

    async def scenario() -> None:
        async with on_redis.open() as broker:
            idle = await waiting(broker, redis_server)
            idle.cancel()
            await asyncio.wait([idle])
            redis_server.ask("LPUSH", HANDED, b"{}")  # as if it had come first
            await broker.renew(OWNER)
            assert (redis_server.ask("LLEN", HANDED), redis_server.ask("LLEN", QUEUE)) == (0, 1)

    run(scenario())


def test_what_is_handed_over_after_the_server_was_emptied_goes_back_to_its_queue(
    on_redis: BrokerUnderTest, redis_server: RedisServer
) -> None:
    """N2: the note of whose it is was lost with everything else."""
    emptied = "redis.call('FLUSHALL') return redis.call('LPUSH', KEYS[1], ARGV[1])"

    async def scenario() -> None:
        async with on_redis.open() as broker:
            on_redis.producer().publish(outgoing("a"))
            envelope = cast("bytes", redis_server.ask("RPOP", QUEUE))
            idle = await waiting(broker, redis_server)
            redis_server.ask("EVAL", emptied, "1", QUEUE, envelope)
            assert texts((await idle).deliveries) == ["a"]

    run(scenario())


def test_what_is_handed_over_is_adopted_although_nobody_asks(
    on_redis: BrokerUnderTest, redis_server: RedisServer
) -> None:
    async def scenario() -> None:
        async with on_redis.open() as broker:
            idle = await waiting(broker, redis_server)
            redis_server.ask("SCRIPT", "FLUSH")
            on_redis.producer().publish(outgoing("a"))
            await idle

            async def adopted() -> bool:
                return redis_server.ask("HLEN", f"umbel.inflight.{OWNER}") == 2

            await eventually(adopted, what="a message that is held")

    run(scenario())


def test_a_claim_and_a_settle_that_wait_for_the_adoption_ask_for_it_once(
    on_redis: BrokerUnderTest, redis_server: RedisServer
) -> None:
    """A task that is acknowledged when a child takes it is settled while the next claim is on its way."""

    async def scenario() -> None:
        async with on_redis.open() as broker:
            idle = await waiting(broker, redis_server)
            redis_server.ask("CONFIG", "RESETSTAT")
            on_redis.producer().publish(outgoing("a"))
            (held,) = (await idle).deliveries
            claim, settled = await asyncio.gather(take(broker), broker.settle([Ack(held.tag)]))
            assert not claim.deliveries and settled == Settled(1)

    run(scenario())
    assert b"cmdstat_hmget:calls=1," in cast("bytes", redis_server.ask("INFO", "commandstats"))


def test_a_revoke_that_was_recorded_first_is_told_first(
    on_redis: BrokerUnderTest, redis_server: RedisServer
) -> None:
    """S3, for messages that are not claimed by a script."""

    async def scenario() -> None:
        async with on_redis.open() as broker:
            producer, cursor = on_redis.producer(), 0
            for number in range(30):
                name = str(number)
                idle = await waiting(broker, redis_server, after=cursor)
                now = time.time()
                producer.revoke([Revoke(name, now, now + 3600)])
                producer.publish(outgoing(name))
                claim = await idle
                assert [one.task_id for one in claim.revokes] == [name]
                cursor = claim.revoked_cursor
                held = list(claim.deliveries)
                while not held:
                    await broker.wait_ready([QUEUE], LONG_S, owner=OWNER)
                    held = list((await broker.claim(OWNER, [QUEUE], 1, revoked_after=cursor)).deliveries)
                assert texts(held) == [name]
                await broker.settle([Ack(held[0].tag)])

    run(scenario())


def test_a_message_that_is_not_due_is_not_handed_out(
    on_redis: BrokerUnderTest, redis_server: RedisServer
) -> None:
    async def scenario() -> None:
        async with on_redis.open() as broker:
            idle = await waiting(broker, redis_server)
            on_redis.producer().publish(outgoing("later", not_before=time.time() + 3600))
            assert not (await idle).deliveries
            assert await broker.queues() == {QUEUE: Depth(0, 1, 0)}

    run(scenario())


@pytest.mark.parametrize("priority", [3, 6, 9])
def test_other_priorities_end_the_wait(
    on_redis: BrokerUnderTest, redis_server: RedisServer, priority: int
) -> None:
    async def scenario() -> None:
        async with on_redis.open() as broker:
            idle = await waiting(broker, redis_server)
            on_redis.producer().publish(outgoing("a", priority=priority))
            assert texts((await idle).deliveries) == ["a"]

    run(scenario())


def test_what_nobody_claims_goes_back_first_in_line(
    on_redis: BrokerUnderTest, redis_server: RedisServer
) -> None:
    async def scenario() -> None:
        async with on_redis.open() as broker:
            await take(broker)
            on_redis.producer().publish(outgoing("a", "b"))
            await broker.wait_ready([QUEUE], LONG_S, owner=OWNER)
            assert redis_server.ask("LLEN", HANDED) == 1
            await broker.wait_ready([QUEUE], 0.01)  # it has forgotten what it was handed
            claim = await take(broker)
            assert texts(claim.deliveries) == ["a", "b"]
            assert not any(one.redelivered for one in claim.deliveries)
            await broker.forget_owner(OWNER)

            await take(broker, 0)
            await broker.wait_ready([QUEUE], LONG_S, owner=OWNER)
            assert redis_server.ask("LLEN", HANDED) == 1
            assert await broker.renew(OWNER)  # as a worker does that has no room, or no queue any more
            assert redis_server.ask("LLEN", HANDED) == 0
            claim = await take(broker)
            assert texts(claim.deliveries) == ["a", "b"]

    run(scenario())


@pytest.mark.parametrize("is_orderly", [True, False])
def test_what_is_handed_to_a_worker_that_ends_goes_to_another(
    on_redis: BrokerUnderTest, redis_server: RedisServer, is_orderly: bool
) -> None:
    async def scenario() -> None:
        async with on_redis.open(lease_s=SHORT_LEASE_S) as peer:
            async with on_redis.open(lease_s=SHORT_LEASE_S) as broker:
                await take(broker)
                on_redis.producer().publish(outgoing("a"))
                await broker.wait_ready([QUEUE], LONG_S, owner=OWNER)
                if is_orderly:
                    assert await broker.forget_owner(OWNER) == 1

            async def taken() -> Claim | None:
                claim = await take(peer, owner=PEER)
                return claim if claim.deliveries else None

            (held,) = (await eventually(taken, what="the message")).deliveries
            assert (held.message.body, held.redelivered) == (b"a", not is_orderly)

    run(scenario())
    assert redis_server.ask("EXISTS", HANDED) == 0


def test_a_cancelled_wait_takes_nothing_with_it(on_redis: BrokerUnderTest, redis_server: RedisServer) -> None:
    async def scenario() -> None:
        async with on_redis.open() as broker:
            for text in ("a", "b", "c"):
                idle = await waiting(broker, redis_server)
                idle.cancel()
                on_redis.producer().publish(outgoing(text))
                await asyncio.wait([idle])
                (held,) = (await take(broker)).deliveries
                assert held.message.body == text.encode()
                await broker.settle([Ack(held.tag)])
            idle = await waiting(broker, redis_server)
            before = calls(redis_server, "client|unblock")
            idle.cancel()
            await asyncio.wait([idle])
            await take(broker)  # on the connection that ended the wait
            assert calls(redis_server, "client|unblock") > before

    run(scenario())


def test_a_lost_link_loses_nothing_that_was_handed_over(
    on_redis: BrokerUnderTest, redis_server: RedisServer
) -> None:
    async def scenario() -> None:
        async with on_redis.open() as broker:
            idle = await waiting(broker, redis_server)
            on_redis.producer().publish(outgoing("a"))
            (held,) = (await idle).deliveries
            redis_server.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

            async def settled() -> Settled | None:
                try:
                    return await broker.settle([Ack(held.tag)])
                except BrokerError:
                    return None

            assert await eventually(settled, what="a settle over a new link") == Settled(1)
            assert await broker.queues() == {}

    run(scenario())


def test_a_server_that_cannot_hand_over_is_asked_in_the_ordinary_way(
    on_redis: BrokerUnderTest, redis_server: RedisServer
) -> None:
    async def scenario() -> None:
        async with on_redis.open() as broker:
            await take(broker)
            redis_server.ask("SET", HANDED, "no list")
            on_redis.producer().publish(outgoing("a"))
            await broker.wait_ready([QUEUE], LONG_S, owner=OWNER)
            redis_server.ask("DEL", HANDED)
            (held,) = (await take(broker)).deliveries
            await broker.settle([Ack(held.tag)])
            idle = asyncio.create_task(broker.wait_ready([QUEUE], LONG_S, owner=OWNER))
            on_redis.producer().publish(outgoing("b"))
            await idle
            assert redis_server.ask("LLEN", QUEUE) == 1

    run(scenario())


@pytest.mark.parametrize("queues", [(QUEUE,), (QUEUE, "other")])
def test_who_waits_on_asks_for_the_lists_again_only_when_something_changed(
    on_redis: BrokerUnderTest, redis_server: RedisServer, queues: Sequence[str]
) -> None:
    async def scenario() -> None:
        async with on_redis.open() as broker:
            assert not (await take(broker, queues=queues)).deliveries
            assert not await broker.wait_ready(queues, 0.01, owner=OWNER)
            before = calls(redis_server, "llen")
            for _ in range(3):
                assert not await broker.wait_ready(queues, 0.01, owner=OWNER)
            assert calls(redis_server, "llen") == before
            await broker.publish(outgoing("a", queue=queues[-1]))
            assert await broker.wait_ready(queues, LONG_S, owner=OWNER)
            assert texts((await take(broker, queues=queues)).deliveries) == ["a"]
            await broker.revoke([Revoke("b", 1.0, time.time() + 60)])
            assert await broker.wait_ready(queues, LONG_S, owner=OWNER)  # it is worth a claim

    run(scenario())
