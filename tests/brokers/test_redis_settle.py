"""One settle with everything in it: each part ends in its place, and what is refused is named by its own."""

import json
import time
from itertools import pairwise

import pytest
from msgspec.structs import replace

from tests.brokers.under_test import OWNER, PEER, QUEUE, BrokerUnderTest, outgoing, result, run, take, texts
from tests.servers.redis import RedisServer, calls
from umbel.brokers.interface import (
    Ack,
    Broker,
    BrokerSettings,
    Bury,
    Delivery,
    Return,
    Spend,
    Started,
    Verdict,
)
from umbel.brokers.redis.broker import RedisBroker
from umbel.brokers.redis.keys import CAPABILITIES
from umbel.errors import BrokerRefused
from umbel.wire.message import StoredResult

HOUR_S = 3600.0
NOT_A_LIST = "the key 'P:bad' holds a string, not a list: delete or rename it"


@pytest.fixture
def prefixed(redis_url: str) -> BrokerUnderTest:
    return BrokerUnderTest(BrokerSettings(redis_url, key_prefix="P:", result_expires_s=60.0), CAPABILITIES)


async def hold(broker: Broker, count: int) -> list[Delivery]:
    await broker.publish(outgoing(*(f"m{number}" for number in range(count))))
    return list((await take(broker)).deliveries)


def letter_to(asker: str, task_id: str) -> StoredResult:
    return replace(result(task_id), reply_to=asker)


def waiting(server: RedisServer, key: str) -> list[str]:
    """The ids of the messages in a list; the first is the next to be taken."""
    found = server.ask("LRANGE", f"P:{key}", 0, -1)
    assert isinstance(found, list)
    return [json.loads(one)["properties"]["correlation_id"] for one in found][::-1]


def test_everything_in_one_settle_ends_in_its_place(
    prefixed: BrokerUnderTest, redis_server: RedisServer
) -> None:
    later = time.time() + HOUR_S

    async def scenario() -> None:
        async with prefixed.open() as broker:
            held = await hold(broker, 10)
            verdicts: list[Verdict] = [
                Ack(
                    held[0].tag,
                    [result("r0"), letter_to("asker", "l0"), result("r1")],
                    [*outgoing("n0", "n1", queue="next"), *outgoing("late0", not_before=later)],
                ),
                Return(held[1].tag),
                Ack(held[2].tag, [letter_to("asker", "l1"), letter_to("other", "l2")]),
                Started(held[3].tag),
                Bury(held[4].tag, "no use", charged=True, follow_ups=outgoing("n2", queue="more")),
                Return(held[5].tag, charged=1, ran=True),
                Return(held[6].tag, charged=2, not_before=later),
                Ack(held[7].tag, (), outgoing("due", not_before=time.time() - 5)),
                Started(held[9].tag),
            ]
            settled = await broker.settle(verdicts)
            assert (settled.applied, settled.conflicts, settled.refused) == (9, frozenset(), ())
            assert [waiting(redis_server, key) for key in ("next", "more")] == [["n0", "n1"], ["n2"]]
            assert [waiting(redis_server, key) for key in ("asker", "other")] == [["l0", "l1"], ["l2"]]
            for key in ("asker", "other", "celery-task-meta-r0", "celery-task-meta-r1"):
                left_ms = redis_server.ask("PTTL", f"P:{key}")
                assert isinstance(left_ms, int) and 50_000 < left_ms <= 60_000
            assert redis_server.ask("PTTL", "P:next") == -1
            assert waiting(redis_server, QUEUE) == ["m1", "m5", "due"]
            (dead,) = await broker.dead_letters()
            assert (dead.reason, dead.starts, dead.message.body) == ("no use", 1, b"m4")
            delayed = redis_server.ask("ZRANGE", f"P:umbel.delayed.{QUEUE}", 0, -1, "WITHSCORES")
            assert isinstance(delayed, list) and len(delayed) == 4
            assert [float(score) for score in delayed[1::2]] == pytest.approx([later] * 2, abs=0.01)
            m1, m5, due = (await take(broker, owner=PEER)).deliveries
            assert [(one.starts, one.redelivered) for one in (m1, m5, due)] == [
                (0, False),
                (1, True),
                (0, False),
            ]
            # Still held: what was started and what has no verdict; nothing else.
            assert await broker.forget_owner(OWNER) == 3
            back = (await take(broker)).deliveries
            assert [(one.starts, one.redelivered) for one in back] == [(1, True), (0, True), (1, True)]
            assert texts(back) == ["m3", "m8", "m9"]
            redis_server.ask("ZADD", f"P:umbel.delayed.{QUEUE}", "XX", 1, delayed[0], 1, delayed[2])
            parked = {text: one for one in (await take(broker)).deliveries for text in texts([one])}
            assert {text: one.starts for text, one in parked.items()} == {"late0": 0, "m6": 2}

    run(scenario())


def test_no_key_is_touched_because_a_verdict_says_its_name(
    prefixed: BrokerUnderTest, redis_server: RedisServer
) -> None:
    """Only keys of signatures are ended; counts and reasons stand before them."""
    names = ("0", "1", "2", "ran", "no use")
    for name in names:
        redis_server.ask("SET", name, "mine")

    async def scenario() -> None:
        async with prefixed.open(remembers_signatures=True) as broker:
            for spends in (False, True):
                first, second, third = await hold(broker, 3)
                if spends:
                    await broker.spend([Spend(first.tag, "0" * 32, time.time() + 600)])
                await broker.settle([Ack(first.tag), Return(second.tag, ran=True), Bury(third.tag, "no use")])
                await broker.settle([Ack(one.tag) for one in (await take(broker)).deliveries])

    run(scenario())
    assert [redis_server.ask("GET", name) for name in names] == [b"mine"] * len(names)


def test_a_signature_is_remembered_while_it_lasts(
    prefixed: BrokerUnderTest, redis_server: RedisServer
) -> None:
    async def scenario() -> None:
        async with prefixed.open(remembers_signatures=True) as broker:
            first, second = await hold(broker, 2)
            over = Spend(second.tag, "b" * 32, time.time() - 5)  # it is refused elsewhere
            assert not await broker.spend([Spend(first.tag, "a" * 32, time.time() + HOUR_S), over])
            left_ms = redis_server.ask("PTTL", f"P:umbel.signature.{'a' * 32}")
            assert isinstance(left_ms, int) and 3_500_000 < left_ms <= 3_600_000

    run(scenario())


def test_who_claims_often_looks_for_lost_owners_and_askers_seldom(
    prefixed: BrokerUnderTest, redis_server: RedisServer
) -> None:
    async def calls_of(broker: Broker) -> tuple[int, ...]:
        counts = [calls(redis_server, "evalsha")]
        for step in (take(broker), take(broker), broker.return_lost(), broker.return_lost()):
            await step
            counts.append(calls(redis_server, "evalsha"))
        return tuple(after - before for before, after in pairwise(counts))

    async def scenario() -> None:
        async with prefixed.open() as first, prefixed.open() as broker:
            await calls_of(first)  # the server knows the scripts
            # The first has tidied up: the claims; then askers and owners; then owners.
            assert await calls_of(broker) == (1, 1, 2, 1)
            redis_server.ask("DEL", "P:umbel.turn")
        async with prefixed.open() as broker:
            # Askers, owners and the claim; then the claim; then owners.
            assert await calls_of(broker) == (3, 1, 1, 1)

    run(scenario())


def test_a_settle_without_conflicts_is_one_call(prefixed: BrokerUnderTest, redis_server: RedisServer) -> None:
    async def scenario() -> None:
        async with prefixed.open() as broker:
            first, *held = await hold(broker, 3)
            await broker.renew(OWNER)
            await broker.settle([Ack(first.tag)])  # the server knows the script
            before = calls(redis_server, "evalsha")
            await broker.settle([Ack(one.tag) for one in held])
            assert calls(redis_server, "evalsha") == before + 1

    run(scenario())


def test_what_is_refused_is_named_by_its_place_and_all_else_is_done(
    prefixed: BrokerUnderTest, redis_server: RedisServer
) -> None:
    later = time.time() + HOUR_S

    async def scenario() -> None:
        async with prefixed.open() as broker:
            await broker.publish(outgoing("b0", "b1", "b2", queue="bad"))
            bad = (await take(broker, queues=["bad"])).deliveries
            held = await hold(broker, 3)
            await take(broker, queues=[QUEUE, "bad"])  # both are consumed here
            for key in ("bad", "umbel.delayed.bad", "celery-mail"):
                redis_server.ask("SET", f"P:{key}", "not a list")
            redis_server.ask("LPUSH", "P:celery-task-meta-r1", "not a string")
            sent = [
                *outgoing("n0", queue="next"),
                *outgoing("x0", queue="bad"),
                *outgoing("late", not_before=later),
                *outgoing("x1", queue="bad", not_before=later),
                *outgoing("x2", queue="bad", not_before=time.time() - 5),
            ]
            mail = letter_to("celery-mail", "l0")
            settled = await broker.settle(
                [
                    Started(held[1].tag),
                    Ack(held[0].tag, [result("r0"), result("r1"), mail], sent),
                    Return(bad[0].tag, charged=1),
                    Return(held[2].tag),
                    Return(bad[1].tag, not_before=later),
                ]
            )
            reasons = {
                one.part.task_id if isinstance(one.part, StoredResult) else one.part.message.body.decode(): (
                    one.reason
                )
                for one in settled.refused
            }
            not_a_zset = "the key 'P:umbel.delayed.bad' holds a string, not a zset: delete or rename it"
            assert settled.applied == 5 and len(settled.refused) == len(reasons)
            assert reasons == {
                "r1": "the key 'P:celery-task-meta-r1' holds a list, not a string: delete or rename it",
                "l0": "the key 'P:celery-mail' holds a string, not a list: delete or rename it",
                "x0": NOT_A_LIST,
                "x1": not_a_zset,
                "x2": NOT_A_LIST,
                "b0": NOT_A_LIST,
                "b1": not_a_zset,
            }
            letters = {one.message.body.decode(): one for one in await broker.dead_letters()}
            assert {text: one.reason for text, one in letters.items()} == {
                text: why for text, why in reasons.items() if text not in ("r1", "l0")
            }
            assert {text: one.starts for text, one in letters.items() if one.starts} == {"b0": 1}
            assert waiting(redis_server, "next") == ["n0"] and waiting(redis_server, QUEUE) == ["m2"]
            assert redis_server.ask("HLEN", f"P:umbel.inflight.{OWNER}") == 3  # m1, b2, the epoch
            await broker.forget_owner(OWNER)
            left = (await take(broker)).deliveries
            assert {text: one.starts for one in left for text in texts([one])} == {"m1": 1, "m2": 0}

    run(scenario())


def test_every_one_of_many_refused_follow_ups_is_named(
    prefixed: BrokerUnderTest, redis_server: RedisServer
) -> None:
    """More than one call to the list takes."""

    async def scenario() -> None:
        async with prefixed.open() as broker:
            (held,) = await hold(broker, 1)
            redis_server.ask("SET", "P:bad", "not a list")
            sent = [
                *outgoing("n0", "n1", queue="next"),
                *outgoing(*(f"x{number}" for number in range(1002)), queue="bad"),
                *outgoing("n2", queue="last"),
            ]
            settled = await broker.settle([Ack(held.tag, (), sent)])
            assert [one.part for one in settled.refused] == sent[2:-1]
            assert redis_server.ask("XLEN", "P:umbel.dead") == 1002
            assert (waiting(redis_server, "next"), waiting(redis_server, "last")) == (["n0", "n1"], ["n2"])

    run(scenario())


def test_a_full_server_lets_a_worker_settle(prefixed: BrokerUnderTest, redis_server: RedisServer) -> None:
    async def scenario() -> None:
        async with prefixed.open() as broker:
            held = await hold(broker, 2)
            redis_server.ask("CONFIG", "SET", "maxmemory", 1)
            settled = await broker.settle(
                [Ack(held[0].tag, [result("r")], outgoing("n", queue="next")), Return(held[1].tag)]
            )
            assert (settled.applied, settled.refused) == (2, ())

    try:
        run(scenario())
    finally:
        redis_server.ask("CONFIG", "SET", "maxmemory", 0)
    assert waiting(redis_server, "next") == ["n"]


def test_without_a_time_results_and_answers_are_kept_for_ever(
    redis_url: str, redis_server: RedisServer
) -> None:
    under_test = BrokerUnderTest(
        BrokerSettings(redis_url, key_prefix="P:", result_expires_s=0.0), CAPABILITIES
    )

    async def scenario() -> None:
        async with under_test.open() as broker:
            (held,) = await hold(broker, 1)
            await broker.settle([Ack(held.tag, [result("r"), letter_to("asker", "l")])])

    run(scenario())
    assert redis_server.ask("PTTL", "P:celery-task-meta-r") == -1
    assert redis_server.ask("PTTL", "P:asker") == -1


def test_a_settle_is_refused_when_its_hold_has_ended_or_cannot_be_read(
    prefixed: BrokerUnderTest, redis_server: RedisServer
) -> None:
    async def scenario() -> None:
        async with prefixed.open() as broker:
            (held,) = await hold(broker, 1)
            redis_server.ask("HSET", f"P:umbel.inflight.{OWNER}", "epoch", "another")
            settled = await broker.settle([Ack(held.tag, [result("r")], outgoing("n", queue="next"))])
            assert settled.applied == 0 and settled.conflicts == {held.tag}
            assert redis_server.ask("EXISTS", "P:next", "P:celery-task-meta-r") == 0
            (held,) = await hold(broker, 1)
            redis_server.ask("SET", f"P:umbel.inflight.{OWNER}", "not ours")
            with pytest.raises(BrokerRefused, match="holds a string, not a hash"):
                await broker.settle([Ack(held.tag)])

    run(scenario())


def test_what_a_settle_in_doubt_has_sent_is_not_sent_again(
    prefixed: BrokerUnderTest, redis_server: RedisServer
) -> None:
    async def scenario() -> None:
        async with prefixed.open() as broker:
            (held,) = await hold(broker, 1)
            assert isinstance(broker, RedisBroker)
            holding = broker._claims._holding
            groups, _ = holding.judge([Ack(held.tag)])
            holding.restore(groups)  # nobody knows whether it was settled: it was
            redis_server.ask("HDEL", f"P:umbel.inflight.{OWNER}", held.tag)
            settled = await broker.settle([Bury(held.tag, "why", follow_ups=outgoing("n", queue="next"))])
            assert (settled.applied, settled.conflicts) == (1, frozenset())
            assert redis_server.ask("EXISTS", "P:next", "P:umbel.dead") == 0

    run(scenario())


def test_a_failure_that_cannot_be_kept_is_a_dead_letter(
    redis_server: RedisServer, prefixed: BrokerUnderTest
) -> None:
    redis_server.ask("SET", "P:umbel.failed", "not a stream")

    async def scenario() -> None:
        async with prefixed.open() as broker:
            first, second, third = await hold(broker, 3)
            settled = await broker.settle(
                [Ack(first.tag, keep="one"), Ack(second.tag), Ack(third.tag, [result("m2")], keep="three")]
            )
            assert (settled.applied, settled.conflicts, settled.refused) == (3, frozenset(), ())
            letters = await broker.dead_letters()
            assert [one.message.correlation_id for one in letters] == ["m2", "m0"]
            assert letters[0].reason.startswith(
                "three; it cannot be stored with the failed tasks: the key 'P:umbel.failed'"
            )
            assert redis_server.ask("GET", "P:celery-task-meta-m2") is not None
            assert await broker.forget_owner(OWNER) == 0  # nothing is held any more

    run(scenario())


def test_failures_are_kept_in_their_order_within_their_number(prefixed: BrokerUnderTest) -> None:
    async def scenario() -> None:
        async with prefixed.open(failed_keep=3, failed_keep_s=60.0) as broker:
            held = await hold(broker, 6)
            verdicts: list[Verdict] = [Ack(one.tag, keep=f"m{place} broke") for place, one in enumerate(held)]
            verdicts[1], verdicts[4] = Return(held[1].tag), Started(held[4].tag)
            assert (await broker.settle(verdicts)).applied == 6
            kept = await broker.failed(10)
            assert [one.reason for one in kept] == ["m5 broke", "m3 broke", "m2 broke"]
            assert {one.queue for one in kept} == {QUEUE} and not await broker.dead_letters()
            assert texts((await take(broker)).deliveries) == ["m1"]
            assert (await broker.settle([Ack(held[4].tag, keep="at last")])).applied == 1
            last = (await broker.failed(10))[0]
            assert (last.reason, last.starts) == ("at last", 1)

    run(scenario())
