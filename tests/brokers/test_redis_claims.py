"""What a worker on Redis knows of its claims: whatever is lost on the way, and in whichever order it asks."""

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.brokers.test_redis_handing import HANDED, waiting
from tests.brokers.under_test import (
    LONG_S,
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
from umbel.brokers.redis.broker import RedisBroker
from umbel.brokers.redis.claims import Claims
from umbel.brokers.redis.link import Link
from umbel.brokers.redis.scripts import Script
from umbel.errors import BrokerRefused, BrokerUnavailable
from umbel.protocol.outage import LinkChange, LinkLost, LinkRestored
from umbel.wire.revoke import Revoke

LEASE_S = 1000.0
INFLIGHT = f"umbel.inflight.{OWNER}"
MARK = "0123456789abcdef" * 2
STRICT = {"remembers_signatures": True}


@pytest.fixture
def patient(on_redis: BrokerUnderTest) -> BrokerUnderTest:
    """No lease ends by itself, however slow the machine is."""
    return BrokerUnderTest(
        type(on_redis.settings)(on_redis.settings.url, lease_s=LEASE_S),
        on_redis.capabilities,
        on_redis._opened,
    )


def claims_of(broker: Broker) -> Claims:
    assert isinstance(broker, RedisBroker)
    return broker._claims


def cut(broker: Broker) -> None:
    """The connection of the claims is lost."""
    claims_of(broker)._link.close()


@contextmanager
def interrupted(script_name: str, *, keeps_link: bool = False) -> Iterator[None]:
    """Calls of this script are carried out, and nobody learns of it."""
    run_script = Link.run

    async def run_and_forget(link: Link, script: Script, *args: Any) -> Any:
        reply = await run_script(link, script, *args)
        if script.name != script_name:
            return reply
        if keeps_link:
            raise asyncio.CancelledError
        link.close()
        raise BrokerUnavailable("cut")

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Link, "run", run_and_forget)
        yield


@contextmanager
def costs(server: RedisServer, count: int) -> Iterator[None]:
    """So many calls of scripts."""
    before = calls(server, "evalsha")
    yield
    assert calls(server, "evalsha") - before == count


async def hold(broker: Broker, *names: str, owner: str = OWNER) -> list[Delivery]:
    await broker.publish(outgoing(*names))
    return list((await take(broker, owner=owner)).deliveries)


def end_lease(server: RedisServer, owner: str) -> None:
    server.ask("ZADD", "umbel.owners", "XX", 0, owner)


# -- claims whose replies are lost -------------------------------------------------------------------


def test_what_a_claim_took_whose_reply_was_lost_comes_with_the_next(
    patient: BrokerUnderTest, redis_server: RedisServer
) -> None:
    async def scenario() -> None:
        async with patient.open() as broker:
            await broker.publish(outgoing("a", "b"))
            with interrupted("claim"), pytest.raises(BrokerUnavailable, match="cut"):
                await take(broker)
            assert redis_server.ask("LLEN", QUEUE) == 0
            held = (await take(broker)).deliveries
            assert texts(held) == ["a", "b"] and not any(one.redelivered for one in held)
            assert redis_server.ask("HLEN", INFLIGHT) == 3  # with the epoch
            with costs(redis_server, 1):  # given back once
                await take(broker)

    run(scenario())


def test_what_a_claim_took_whose_reply_was_lost_goes_back_with_a_renewal(
    patient: BrokerUnderTest, redis_server: RedisServer
) -> None:
    """And is not mistaken for what a backup brought back."""

    async def scenario() -> None:
        told: list[Replaced] = []
        async with patient.open() as broker, patient.open() as peer:
            broker.on_replaced = told.append
            await broker.publish(outgoing("a"))
            with interrupted("claim"), pytest.raises(BrokerUnavailable):
                await take(broker)
            await broker.renew(OWNER)
            (again,) = (await take(peer, owner=PEER)).deliveries
            assert (again.redelivered, told) == (False, [])

    run(scenario())


def test_what_a_cancelled_claim_took_goes_back_at_once(
    patient: BrokerUnderTest, redis_server: RedisServer
) -> None:
    async def scenario() -> None:
        async with patient.open() as broker, patient.open() as peer:
            await broker.publish(outgoing("a"))
            with interrupted("claim", keeps_link=True), pytest.raises(asyncio.CancelledError):
                await take(broker)
            await broker.queues()  # answered after what was sent before
            (again,) = (await take(peer, owner=PEER)).deliveries
            assert not again.redelivered
            await take(broker, 0)
            with costs(redis_server, 1):
                await take(broker, 0)

    run(scenario())


# -- what the server handed over, and is not adopted yet ---------------------------------------------


async def be_handed(broker: Broker, under_test: BrokerUnderTest, *names: str) -> None:
    """An owner that has claimed is handed the first of these; nobody has had a turn on the loop since."""
    await take(broker)
    under_test.producer().publish(outgoing(*names))
    await broker.wait_ready([QUEUE], LONG_S, owner=OWNER)


def test_what_is_handed_over_runs_without_a_call_if_there_is_room_for_it(
    patient: BrokerUnderTest, redis_server: RedisServer
) -> None:
    async def scenario() -> None:
        async with patient.open() as broker:
            await be_handed(broker, patient, "a")
            assert redis_server.ask("LLEN", HANDED) == 1
            assert (await take(broker, 0)).deliveries == []
            assert (redis_server.ask("LLEN", HANDED), redis_server.ask("LLEN", QUEUE)) == (0, 1)
            await broker.wait_ready([QUEUE], LONG_S, owner=OWNER)
            with costs(redis_server, 0):
                assert texts((await take(broker, 1)).deliveries) == ["a"]

    run(scenario())


def test_a_claim_right_after_it_takes_only_what_is_next(
    patient: BrokerUnderTest, redis_server: RedisServer
) -> None:
    async def scenario() -> None:
        async with patient.open() as broker:
            await be_handed(broker, patient, "a", "b")
            assert [texts((await take(broker)).deliveries) for _ in range(2)] == [["a"], ["b"]]
            assert redis_server.ask("HLEN", INFLIGHT) == 3

    run(scenario())


def test_a_settle_right_after_it_leaves_nothing_behind(
    patient: BrokerUnderTest, redis_server: RedisServer
) -> None:
    async def scenario() -> None:
        async with patient.open() as broker:
            await be_handed(broker, patient, "a")
            (held,) = (await take(broker)).deliveries
            assert await broker.settle([Ack(held.tag)]) == Settled(1)
            assert await broker.queues() == {}
            assert (redis_server.ask("EXISTS", HANDED), redis_server.ask("HLEN", INFLIGHT)) == (0, 1)

    run(scenario())


def test_who_forgets_its_owner_right_after_it_has_run_it(
    patient: BrokerUnderTest, redis_server: RedisServer
) -> None:
    async def scenario() -> None:
        async with patient.open() as broker, patient.open() as peer:
            await be_handed(broker, patient, "a")
            await take(broker)
            assert await broker.forget_owner(OWNER) == 1
            (again,) = (await take(peer, owner=PEER)).deliveries
            assert again.redelivered

    run(scenario())


def test_a_message_that_is_gone_before_it_was_adopted_has_ended_and_uses_no_signature(
    patient: BrokerUnderTest, redis_server: RedisServer
) -> None:
    async def scenario() -> None:
        async with patient.open(**STRICT) as broker:
            await be_handed(broker, patient, "a")
            (first,) = (await take(broker)).deliveries
            redis_server.ask("DEL", HANDED)
            assert await broker.ended([first.tag]) == {first.tag}
            await be_handed(broker, patient, "b")
            (second,) = (await take(broker)).deliveries
            redis_server.ask("DEL", HANDED)
            assert await broker.spend([Spend(second.tag, MARK, time.time() + 600)]) == frozenset()
            assert redis_server.ask("EXISTS", f"umbel.signature.{MARK}") == 0

    run(scenario())


def test_what_runs_stays_when_what_was_handed_over_after_it_goes_back(
    patient: BrokerUnderTest, redis_server: RedisServer
) -> None:
    async def scenario() -> None:
        told: list[Replaced] = []
        async with patient.open() as broker:
            broker.on_replaced = told.append
            await be_handed(broker, patient, "a", "b")
            (held,) = (await take(broker)).deliveries
            cut(broker)  # before it could be adopted
            await broker.wait_ready([QUEUE], LONG_S, owner=OWNER)
            assert redis_server.ask("LLEN", HANDED) == 2
            await broker.renew(OWNER)
            assert (redis_server.ask("LLEN", HANDED), redis_server.ask("LLEN", QUEUE)) == (0, 1)
            assert (await broker.settle([Ack(held.tag)]), told) == (Settled(1), [])

    run(scenario())


def test_who_forgets_its_owner_ends_its_wait_first_over_a_new_connection_too(
    patient: BrokerUnderTest, redis_server: RedisServer
) -> None:
    async def scenario() -> None:
        async with patient.open() as broker:
            idle = await waiting(broker, redis_server)
            cut(broker)
            before = calls(redis_server, "client|unblock")
            await broker.forget_owner(OWNER)
            assert calls(redis_server, "client|unblock") == before + 1
            await broker.leave_queue(OWNER, QUEUE)
            async with asyncio.timeout(LONG_S / 3):
                assert not (await idle).deliveries

    run(scenario())


def test_a_wait_is_ended_by_its_number_where_there_is_a_connection_for_it(
    patient: BrokerUnderTest, redis_server: RedisServer
) -> None:
    async def scenario() -> None:
        async with patient.open() as broker:
            claims = claims_of(broker)
            before = calls(redis_server, "client|unblock")
            assert claims._unblock(0) is None
            sent = claims._unblock(10**9)
            assert sent is not None and await sent == [0]  # nobody has this number
            assert calls(redis_server, "client|unblock") == before + 1
            cut(broker)
            assert claims._unblock(10**9) is None

    run(scenario())


# -- the lease of an owner ---------------------------------------------------------------------------


def test_claims_are_compared_with_the_data_once_for_each_connection(
    patient: BrokerUnderTest, redis_server: RedisServer
) -> None:
    async def scenario() -> None:
        async with patient.open() as broker, patient.open() as other:
            await take(broker)
            for count in (1, 1):
                with costs(redis_server, count):
                    await broker.renew(OWNER)
            cut(broker)
            for count in (2, 1):
                with costs(redis_server, count):
                    await broker.renew(OWNER)
            end_lease(redis_server, OWNER)
            await other.return_lost()
            cut(broker)
            for stands in (False, True):  # others have what it held: there is nothing to compare
                with costs(redis_server, 1):
                    assert await broker.renew(OWNER) is stands
            assert not (await take(broker)).lease_ended  # it knows

    run(scenario())


def test_a_first_renewal_on_a_second_connection_compares(
    patient: BrokerUnderTest, redis_server: RedisServer
) -> None:
    async def scenario() -> None:
        told: list[Replaced] = []
        async with patient.open() as broker:
            broker.on_replaced = told.append
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
            broker.on_replaced = told.append
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
            broker.on_replaced = told.append
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
            broker.on_replaced = told.append
            await broker.renew(OWNER)
            held = await hold(broker, "a", "b")
            with costs(redis_server, 0):
                assert await broker.ended([one.tag for one in held]) == frozenset()
            redis_server.ask("FLUSHALL")
            assert await broker.ended([held[0].tag]) == frozenset()  # unknown
            assert [one.unknown for one in told] == [2]

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
            broker.on_replaced = told.append
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


async def spend(broker: Broker, *held: Delivery) -> frozenset[Any]:
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


# -- queues, revokes, connections --------------------------------------------------------------------


def test_the_queue_after_the_last_one_taken_from_has_the_next_turn(patient: BrokerUnderTest) -> None:
    async def scenario() -> None:
        async with patient.open() as broker:
            names = ("a", "b", "c")
            for name in names:
                await broker.publish(outgoing(*(f"{name}{number}" for number in range(4)), queue=name))
            taken = [
                texts((await take(broker, limit, queues=names)).deliveries) for limit in (1, 1, 2, 1, 0, 2)
            ]
            assert taken == [["a0"], ["b0"], ["c0", "a1"], ["b1"], [], ["c1", "a2"]]
            assert texts((await take(broker, 1, queues=("c", "b"))).deliveries) == ["c2"]
            assert texts((await take(broker, 1, queues=("c", "b", "c"))).deliveries) == ["b2"]

    run(scenario())


def test_it_is_said_why_a_queue_cannot_be_taken_from(
    patient: BrokerUnderTest, redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with patient.open() as broker:
            redis_server.ask("SET", "bad", "not a list")
            redis_server.ask("SET", "umbel.delayed.wörse", "not a zset")
            for _ in range(2):
                await take(broker, queues=["bad", "wörse"])
            claims_of(broker)._note_passed_over([b"worst", b"no text: \xff"])

    with caplog.at_level(logging.ERROR):
        run(scenario())
    said = {
        vars(one)["queue"]: vars(one)["why"] for one in caplog.records if one.name == "umbel.brokers.redis"
    }
    assert said == {
        "bad": "the key 'bad' holds a string, not a list: delete or rename it",
        "wörse": "the key 'umbel.delayed.wörse' holds a string, not a zset: delete or rename it",
        "worst": "no text: \ufffd",
    }


def test_a_revoke_that_is_over_is_no_news_unless_it_takes_one_back(patient: BrokerUnderTest) -> None:
    async def scenario() -> None:
        async with patient.open() as broker:
            now = time.time()
            await broker.revoke(
                [Revoke("new", now, now + 600), Revoke("over", now - 2, now - 1), Revoke("back", now, now)]
            )
            claim = await take(broker)
            assert {one.task_id for one in claim.revokes} == {"new", "back"}

    run(scenario())


def test_the_connection_that_waits_is_restored_and_closed_with_the_others(
    patient: BrokerUnderTest, redis_server: RedisServer
) -> None:
    async def scenario() -> None:
        told: list[LinkChange] = []
        async with patient.open() as broker:
            broker.on_link = told.append
            await broker.wait_ready([QUEUE], 0.0)
            redis_server.ask("CLIENT", "KILL", "TYPE", "normal")

            async def knows() -> bool:
                return any(isinstance(one, LinkLost) and one.link == "waiting" for one in told)

            await eventually(knows, what="the connection to be lost")
            await broker.reconnect()
            assert LinkRestored("waiting") in told

    run(scenario())

    async def alone() -> bool:
        found = redis_server.ask("CLIENT", "LIST", "TYPE", "normal")
        assert isinstance(found, bytes)
        return len(found.splitlines()) == 1  # who asks

    run(eventually(alone, what="all connections to be closed"))
