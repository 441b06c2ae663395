"""What a worker on Redis knows of its lease, of what it settles, and of the signatures it has used."""

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import pytest

from tests.brokers.redis_claims import (
    INFLIGHT,
    LEASE_S,
    MARK,
    STRICT,
    claims_of,
    costs,
    cut,
    end_lease,
    hold,
    interrupted,
)
from tests.brokers.under_test import (
    OWNER,
    PEER,
    QUEUE,
    BrokerUnderTest,
    eventually,
    outgoing,
    result,
    run,
    take,
    texts,
)
from tests.servers.redis import RedisServer, calls
from umbel.brokers.interface import Ack, Broker, Delivery, Depth, Replaced, Return, Settled, Spend, Started
from umbel.errors import BrokerRefused, BrokerUnavailable
from umbel.protocol.delivery.trust import Doubt

# -- the lease of an owner ---------------------------------------------------------------------------


def test_claims_are_compared_with_the_data_once_for_each_connection(
    patient: BrokerUnderTest, redis_server: RedisServer
) -> None:
    async def scenario() -> None:
        async with patient.open() as broker, patient.open() as other:
            await take(broker)
            for count in (1, 0):  # the second needs no script
                with costs(redis_server, count):
                    await broker.renew(OWNER)
            cut(broker)
            for count in (2, 0):
                with costs(redis_server, count):
                    await broker.renew(OWNER)
            end_lease(redis_server, OWNER)
            await other.return_lost()
            cut(broker)
            for count, stands in ((1, False), (0, True)):  # others have what it held: nothing is compared
                with costs(redis_server, count):
                    assert await broker.renew(OWNER) is stands
            assert not (await take(broker)).lease_ended  # it knows

    run(scenario())


def test_a_first_renewal_on_a_second_connection_compares(
    patient: BrokerUnderTest, redis_server: RedisServer
) -> None:
    async def scenario() -> None:
        told: list[Replaced] = []
        async with patient.open() as broker:
            broker.on_replaced(told.append)
            (held,) = await hold(broker, "a")
            cut(broker)
            redis_server.ask("HDEL", INFLIGHT, held.tag)
            await broker.renew(OWNER)
            assert [one.unknown for one in told] == [1]

    run(scenario())


def test_a_comparison_that_was_refused_is_made_again(
    patient: BrokerUnderTest, redis_server: RedisServer
) -> None:
    async def scenario() -> None:
        told: list[Replaced] = []
        async with patient.open() as broker:
            broker.on_replaced(told.append)
            await broker.renew(OWNER)
            (held,) = await hold(broker, "a")
            redis_server.ask("FLUSHALL")
            redis_server.ask("SET", INFLIGHT, "not ours")
            with pytest.raises(BrokerRefused, match="not a hash"):
                await broker.renew(OWNER)
            redis_server.ask("DEL", INFLIGHT)
            assert await broker.renew(OWNER)
            assert [one.unknown for one in told] == [1]
            assert await broker.settle([Ack(held.tag)]) == Settled(0, unknown=frozenset({held.tag}))

    run(scenario())


def test_a_conflict_hides_no_lease_that_has_ended(
    patient: BrokerUnderTest, redis_server: RedisServer
) -> None:
    async def scenario() -> None:
        told: list[Replaced] = []
        async with patient.open() as broker, patient.open() as other:
            broker.on_replaced(told.append)
            await broker.renew(OWNER)
            (held,) = await hold(broker, "a")
            end_lease(redis_server, OWNER)
            assert await other.return_lost() == 1
            assert [(await take(broker, 0)).lease_ended for _ in range(2)] == [True, False]
            assert await broker.ended([held.tag]) == {held.tag}
            assert await broker.settle([Ack(held.tag)]) == Settled(0, frozenset({held.tag}))
            assert [await broker.renew(OWNER) for _ in range(2)] == [False, True]
            assert told == []

    run(scenario())


def test_who_asks_whether_claims_have_ended_finds_replaced_data(
    patient: BrokerUnderTest, redis_server: RedisServer
) -> None:
    async def scenario() -> None:
        told: list[Replaced] = []
        async with patient.open() as broker:
            broker.on_replaced(told.append)
            await broker.renew(OWNER)
            held = await hold(broker, "a", "b")
            with costs(redis_server, 0):
                assert await broker.ended([one.tag for one in held]) == frozenset()
            redis_server.ask("FLUSHALL")
            assert await broker.ended([held[0].tag]) == frozenset()  # unknown
            assert [one.unknown for one in told] == [2]

    run(scenario())


def test_a_renewal_soon_after_another_prolongs_the_lease_in_two_commands(
    patient: BrokerUnderTest, redis_server: RedisServer
) -> None:
    async def scenario() -> None:
        async with patient.open() as broker:
            await broker.renew(OWNER)
            redis_server.ask("ZADD", "umbel.owners", str(time.time() + LEASE_S / 2), OWNER)
            before = calls(redis_server, "time")
            assert await broker.renew(OWNER)
            assert calls(redis_server, "time") == before  # no script
            assert redis_server.ask("HGET", "umbel.renewals", OWNER) == b"2"
            ends = redis_server.ask("ZSCORE", "umbel.owners", OWNER)
            assert isinstance(ends, bytes)
            assert float(ends) == pytest.approx(time.time() + LEASE_S, abs=10)

    run(scenario())


def test_a_renewal_without_a_script_notices_that_the_lease_has_ended(
    patient: BrokerUnderTest, redis_server: RedisServer
) -> None:
    async def scenario() -> None:
        told: list[Replaced] = []
        async with patient.open() as broker, patient.open() as other:
            broker.on_replaced(told.append)
            assert not await broker.renew(OWNER)
            assert await broker.renew(OWNER)
            end_lease(redis_server, OWNER)
            await other.return_lost()
            assert [await broker.renew(OWNER) for _ in range(3)] == [False, True, True]
            assert told == []

    run(scenario())


@pytest.mark.parametrize("restored", ["nothing", "a backup"])
def test_a_renewal_without_a_script_notices_replaced_data(
    patient: BrokerUnderTest, redis_server: RedisServer, restored: str
) -> None:
    async def scenario() -> None:
        told: list[Replaced] = []
        async with patient.open() as broker:
            broker.on_replaced(told.append)
            for _ in range(3):
                await broker.renew(OWNER)
            await hold(broker, "a")
            if restored == "a backup":  # made one renewal earlier
                redis_server.ask("HSET", "umbel.renewals", OWNER, 2)
                redis_server.ask("DEL", INFLIGHT)
            else:
                redis_server.ask("FLUSHALL")
            assert await broker.renew(OWNER)
            assert [one.unknown for one in told] == [1]
            assert await broker.renew(OWNER)
            assert len(told) == 1

    run(scenario())


def test_a_full_server_renews_leases(patient: BrokerUnderTest, redis_server: RedisServer) -> None:
    async def scenario() -> None:
        told: list[Replaced] = []
        async with patient.open() as broker:
            broker.on_replaced(told.append)
            await broker.renew(OWNER)
            redis_server.ask("CONFIG", "SET", "maxmemory", 1)
            try:
                assert [await broker.renew(OWNER) for _ in range(2)] == [True, True]
            finally:
                redis_server.ask("CONFIG", "SET", "maxmemory", 0)
            assert await broker.renew(OWNER)
            assert told == []

    run(scenario())


def test_one_worker_tidies_up_for_all_and_each_returns_what_has_ended(
    patient: BrokerUnderTest, redis_server: RedisServer
) -> None:
    async def scenario() -> None:
        async with patient.open() as broker, patient.open() as other:
            await hold(broker, "a", "b", owner=PEER)
            for one in (broker, broker, other, other):
                await one.return_lost(by_turn=True)
            with costs(redis_server, 0):
                for one in (broker, other):
                    assert await one.return_lost(by_turn=True) == 0
            end_lease(redis_server, PEER)
            assert await other.return_lost(by_turn=True) == 2

    run(scenario())


def test_a_claim_tells_what_it_returned_and_looks_again_within_the_lease(
    patient: BrokerUnderTest, redis_server: RedisServer
) -> None:
    async def scenario() -> None:
        async with patient.open() as dead, patient.open() as broker:
            await hold(dead, "a", "b", "c", owner=PEER)
            end_lease(redis_server, PEER)
            redis_server.ask("DEL", "umbel.queues")
            assert [(await take(broker, 1)).returned for _ in range(2)] == [3, 0]
            assert redis_server.ask("SMEMBERS", "umbel.queues") == [QUEUE.encode()]
            assert texts((await take(dead, owner=PEER)).deliveries) == ["c"]
            end_lease(redis_server, PEER)
            assert (await take(broker)).returned == 0
            claims_of(broker)._lost_checked_at -= LEASE_S / 2
            assert (await take(broker)).returned == 1

    run(scenario())


def test_an_owner_that_was_forgotten_begins_anew(patient: BrokerUnderTest, redis_server: RedisServer) -> None:
    async def scenario() -> None:
        async with patient.open() as broker:
            await hold(broker, "a")
            with costs(redis_server, 2):  # nothing is parked: that is asked once
                assert await broker.forget_owner(OWNER) == 1
            claim = await take(broker)
            assert (texts(claim.deliveries), claim.lease_ended) == (["a"], False)
            assert await broker.renew(OWNER)  # of data that it has no reason to doubt
            await broker.forget_owner(OWNER)
            assert not await broker.renew(OWNER)

    run(scenario())


def test_what_is_parked_stays_when_stopping_has_taken_its_time(
    patient: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("umbel.brokers.redis.claims.UNPARK_MAX_S", -1.0)

    async def scenario() -> None:
        async with patient.open() as broker:
            names = [str(number) for number in range(1001)]
            patient.producer().publish(outgoing(*names, not_before=time.time() + 3600))

            async def parked() -> bool:
                await take(broker)
                return dict(await broker.queues())[QUEUE].delayed == len(names)

            await eventually(parked, what="all to be parked")
            await broker.forget_owner(OWNER)
            assert dict(await broker.queues()) == {QUEUE: Depth(1000, 1, 0)}

    run(scenario())


# -- verdicts ----------------------------------------------------------------------------------------


def test_what_is_being_settled_does_not_go_back_when_claims_are_compared(
    patient: BrokerUnderTest, redis_server: RedisServer
) -> None:
    """Verdicts in doubt go one by one, so that the last is not sent when the data is asked."""

    async def scenario() -> None:
        told: list[Replaced] = []
        async with patient.open() as broker:
            broker.on_replaced(told.append)
            *doubtful, other, last = await hold(broker, *(f"m{number}" for number in range(10)))
            with interrupted("settle"), pytest.raises(BrokerUnavailable):
                await broker.settle([Ack(one.tag) for one in doubtful])
            await take(broker, 0)  # over a new connection
            first, second, _ = await asyncio.gather(
                broker.settle([Ack(one.tag) for one in (*doubtful, last)]),
                broker.settle([Ack(other.tag)]),
                broker.renew(OWNER),
            )
            assert (first, second) == (Settled(9), Settled(1))
            assert (told, await broker.queues()) == ([], {})

    run(scenario())


def test_a_verdict_counts_although_the_data_has_lost_the_claim(
    patient: BrokerUnderTest, redis_server: RedisServer
) -> None:
    """Nobody has settled it, so what it brings is sent, and the others are not held up."""

    async def scenario() -> None:
        async with patient.open() as broker:
            lost, other = await hold(broker, "a", "b")
            redis_server.ask("HDEL", INFLIGHT, lost.tag)
            follow_ups = outgoing("n", queue="next")
            assert await broker.settle([Ack(lost.tag, [result("r")], follow_ups), Ack(other.tag)]) == Settled(
                2
            )
            assert redis_server.ask("EXISTS", "next", "celery-task-meta-r") == 2
            assert redis_server.ask("HLEN", INFLIGHT) == 1

    run(scenario())


# -- signatures that held messages have used ---------------------------------------------------------


async def spend(broker: Broker, *held: Delivery) -> Mapping[Any, Doubt]:
    marks = [Spend(one.tag, MARK[:-1] + one.message.body.decode(), time.time() + 600) for one in held]
    return await broker.spend(marks)


async def copies_among(broker: Broker, *names: str) -> set[str]:
    """Which of these were used by messages that have ended."""
    copies = await hold(broker, *names, owner=PEER)
    refused = await spend(broker, *copies)
    return {one.message.body.decode() for one in copies if one.tag in refused}


def test_a_message_that_was_started_has_used_its_signature_when_it_ends(patient: BrokerUnderTest) -> None:
    async def scenario() -> None:
        async with patient.open(**STRICT) as broker:
            a, b, _ = held = await hold(broker, "a", "b", "c")
            await spend(broker, *held)
            await broker.settle([Started(a.tag), Return(b.tag)])
            assert set(claims_of(broker)._marks) == {held[0].tag, held[2].tag}
            assert texts((await take(broker)).deliveries) == ["b"]
            await broker.settle([Ack(a.tag)])
            assert set(claims_of(broker)._marks) == {held[2].tag}
            assert await copies_among(broker, "a", "b", "c") == {"a", "c"}  # that of c is in use

    run(scenario())


def test_an_owner_that_is_forgotten_takes_no_signatures_of_another_along(patient: BrokerUnderTest) -> None:
    async def scenario() -> None:
        async with patient.open(**STRICT) as broker:
            (a,) = await hold(broker, "a")
            (b,) = await hold(broker, "b", owner="third")
            await spend(broker, a, b)
            await broker.forget_owner(OWNER)
            assert set(claims_of(broker)._marks) == {b.tag}
            assert texts((await take(broker)).deliveries) == ["a"]
            await broker.settle([Ack(b.tag)])
            assert await copies_among(broker, "a", "b") == {"b"}

    run(scenario())


def test_no_signature_is_kept_of_a_claim_that_has_ended(
    patient: BrokerUnderTest, redis_server: RedisServer
) -> None:
    async def scenario() -> None:
        async with patient.open(**STRICT) as broker, patient.open() as other:
            (held,) = await hold(broker, "a")
            await spend(broker, held)
            end_lease(redis_server, OWNER)
            await other.return_lost()
            assert await broker.settle([Ack(held.tag)]) == Settled(0, frozenset({held.tag}))
            assert claims_of(broker)._marks == {}

    run(scenario())
