"""Claims on Redis whose replies are lost, or that are not adopted yet: whatever comes next, none is lost."""

import asyncio
import logging
import time
from pathlib import Path

import pytest

from tests.brokers.redis_claims import (
    INFLIGHT,
    MARK,
    STRICT,
    claims_of,
    costs,
    cut,
    interrupted,
)
from tests.brokers.test_redis_handoff import HANDED, waiting
from tests.brokers.under_test import (
    LONG_S,
    OWNER,
    PEER,
    QUEUE,
    BrokerUnderTest,
    eventually,
    outgoing,
    run,
    take,
    texts,
)
from tests.servers.redis import RedisServer, calls
from umbel.brokers.interface import Ack, Broker, Replaced, Settled, Spend
from umbel.brokers.redis import scripts
from umbel.errors import BrokerUnavailable
from umbel.protocol.shutdown import LinkChange, LinkLost, LinkRestored
from umbel.wire.records import Revoke

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
            broker.on_replaced(told.append)
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
            assert await broker.spend([Spend(second.tag, MARK, time.time() + 600)]) == {}
            assert redis_server.ask("EXISTS", f"umbel.signature.{MARK}") == 0

    run(scenario())


def test_what_runs_stays_when_what_was_handed_over_after_it_goes_back(
    patient: BrokerUnderTest, redis_server: RedisServer
) -> None:
    async def scenario() -> None:
        told: list[Replaced] = []
        async with patient.open() as broker:
            broker.on_replaced(told.append)
            await be_handed(broker, patient, "a", "b")
            (held,) = (await take(broker)).deliveries
            cut(broker)  # before it could be adopted
            await broker.wait_ready([QUEUE], LONG_S, owner=OWNER)
            assert redis_server.ask("LLEN", HANDED) == 2
            await broker.renew(OWNER)
            assert (redis_server.ask("LLEN", HANDED), redis_server.ask("LLEN", QUEUE)) == (0, 1)
            assert (await broker.settle([Ack(held.tag)]), told) == (Settled(1), [])
            (after,) = (await take(broker)).deliveries  # claimed: nothing is handed over any more
            assert await broker.settle([Ack(after.tag)]) == Settled(1)

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
            broker.on_link(told.append)
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


def test_a_server_that_has_forgotten_the_scripts_gets_each_of_them_once_more(
    patient: BrokerUnderTest, redis_server: RedisServer
) -> None:
    async def scenario() -> None:
        async with patient.open() as broker:
            for flushed in range(2):
                redis_server.ask("SCRIPT", "FLUSH")
                for step in (0, 1):  # the second time the server knows them
                    before = calls(redis_server, "eval")
                    await broker.publish(outgoing("a"))
                    patient.producer().hold_unique(f"key{flushed}{step}", "id", ttl_s=60.0)
                    (claimed,) = (await take(broker)).deliveries
                    assert await broker.settle([Ack(claimed.tag)]) == Settled(1, frozenset())
                    texts_sent = calls(redis_server, "eval") - before
                    assert texts_sent == 0 if step else texts_sent >= 3

    run(scenario())


def test_every_heading_in_a_file_of_scripts_is_read() -> None:
    files = list(Path(scripts.__file__).parent.glob("*.lua"))
    headings = sum(file.read_text().count("\n-- ---- ") for file in files)
    starts = sum(file.read_text().startswith("-- ---- ") for file in files)
    sections = scripts.sections()
    assert len(sections) == headings + starts
    assert {part for parts, _ in sections.values() for part in parts} < set(sections)
