"""What Redis refuses ends alone: one list, one result, one key; everything else of the step is done (N2)."""

import asyncio
import logging

import pytest

from tests.brokers.under_test import (
    OWNER,
    PEER,
    QUEUE,
    BrokerUnderTest,
    outgoing,
    result,
    run,
    take,
    take_one,
    texts,
)
from tests.servers.redis import RedisServer
from umbel.brokers.interface import Ack, Broker, Bury, Refused, Return, Started, Verdict
from umbel.brokers.redis import publishing
from umbel.errors import BrokerRefused
from umbel.wire.message import Outgoing, StoredResult
from umbel.worker.delivery.settle import store_failed

NOT_A_LIST = "the key 'bad' holds a string, not a list: delete or rename it"
LATER = 4102444800.0


@pytest.fixture
def bad(redis_server: RedisServer, redis_url: str) -> str:
    """A queue whose list is a string."""
    redis_server.ask("SET", "bad", "not a list")
    return "bad"


async def reasons_of(broker: Broker) -> list[tuple[str, str, str]]:
    return [
        (one.queue, one.message.body.decode(), one.reason) for one in reversed(await broker.dead_letters())
    ]


def test_a_refused_follow_up_is_a_dead_letter_and_everything_else_is_settled_once(
    on_redis: BrokerUnderTest, redis_server: RedisServer, bad: str
) -> None:
    async def scenario() -> None:
        async with on_redis.open() as broker:
            await broker.publish(outgoing("a", "b", "c", "d"))
            a, b, c, d = (await take(broker)).deliveries
            refused = outgoing("refused", queue=bad)
            verdicts: list[Verdict] = [
                Ack(a.tag, [result("a")], [*outgoing("one", queue="next"), *refused]),
                Bury(
                    b.tag,
                    "no use",
                    results=[result("b", "FAILURE")],
                    follow_ups=outgoing("two", queue="next"),
                ),
                Return(c.tag),
                Ack(d.tag, [result("d")]),
            ]
            settled = await broker.settle(verdicts)
            assert (settled.applied, settled.conflicts) == (4, frozenset())
            assert settled.refused == (Refused(refused[0], NOT_A_LIST),)
            assert await reasons_of(broker) == [(bad, "refused", NOT_A_LIST), (QUEUE, "b", "no use")]
            again = await broker.settle(verdicts)
            assert (again.applied, len(again.conflicts), again.refused) == (0, 4, ())
            assert texts((await take(broker, queues=["next"])).deliveries) == ["one", "two"]
            assert texts((await take(broker)).deliveries) == ["c"]
            assert len(await broker.dead_letters()) == 2
            read = await asyncio.to_thread(on_redis.backend().read, ["a", "b", "d"])
            assert {one.status for one in read.values()} == {"SUCCESS", "FAILURE"} and len(read) == 3
            redis_server.ask("DEL", bad)
            assert await broker.requeue_dead([one.letter_id for one in await broker.dead_letters()]) == 2
            assert texts((await take(broker, queues=[bad])).deliveries) == ["refused"]

    run(scenario())


def test_a_follow_up_for_later_that_is_refused_is_a_dead_letter(
    on_redis: BrokerUnderTest, redis_server: RedisServer
) -> None:
    async def scenario() -> None:
        async with on_redis.open() as broker:
            await broker.publish(outgoing("a"))
            held = await take_one(broker)
            redis_server.ask("SET", f"umbel.delayed.{QUEUE}", "not a zset")
            settled = await broker.settle([Ack(held.tag, (), outgoing("later", not_before=LATER))])
            (refused,) = settled.refused
            assert f"'umbel.delayed.{QUEUE}' holds a string, not a zset" in refused.reason
            assert await reasons_of(broker) == [(QUEUE, "later", refused.reason)]

    run(scenario())


def test_a_refused_result_is_reported_and_the_others_are_stored(
    on_redis: BrokerUnderTest, redis_server: RedisServer
) -> None:
    async def scenario() -> None:
        async with on_redis.open() as broker:
            redis_server.ask("LPUSH", "celery-task-meta-b", "not a string")
            redis_server.ask("SET", "asker", "not a list")
            letter = StoredResult("c", "SUCCESS", b"{}", reply_to="asker")
            await broker.publish(outgoing("a", "b"))
            a, b = (await take(broker)).deliveries
            settled = await broker.settle([Ack(a.tag, [result("b"), letter]), Ack(b.tag, [result("a")])])
            assert settled.applied == 2
            assert [one.part for one in settled.refused] == [result("b"), letter]
            assert "'celery-task-meta-b' holds a list, not a string" in settled.refused[0].reason
            assert "'asker' holds a string, not a list" in settled.refused[1].reason
            assert not await broker.dead_letters()

    run(scenario())
    redis_server.ask("DEL", "celery-task-meta-a")
    backend = on_redis.backend()
    with pytest.raises(
        BrokerRefused, match="of 'b' cannot be stored: the key 'celery-task-meta-b'"
    ) as caught:
        backend.store([result("a"), result("b"), result("d")])
    assert caught.value.places == (1,)
    redis_server.ask("DEL", "celery-task-meta-b")
    assert backend.read(["a", "b", "d"]).keys() == {"a", "d"}


def test_what_cannot_be_buried_stays_claimed_and_is_named_and_its_verdict_is_applied_once(
    on_redis: BrokerUnderTest, redis_server: RedisServer, bad: str
) -> None:
    async def scenario() -> None:
        async with on_redis.open() as broker:
            redis_server.ask("SET", "umbel.dead", "not a stream")
            await broker.publish(outgoing("a"))
            held = await take_one(broker)
            sent = [*outgoing("next", queue="next"), *outgoing("refused", queue=bad)]
            settled = await broker.settle([Bury(held.tag, "no use", follow_ups=sent)])
            follow_up, message = settled.refused
            assert follow_up.part == sent[1] and NOT_A_LIST in follow_up.reason
            assert "'umbel.dead' holds a string, not a stream" in follow_up.reason
            assert isinstance(message.part, Outgoing) and message.part.queue == QUEUE
            assert message.part.message.body == b"a" and "'umbel.dead'" in message.reason
            assert (await broker.settle([Ack(held.tag)])).conflicts == {held.tag}
            assert texts((await take(broker, queues=["next"])).deliveries) == ["next"]
            assert (await broker.queues())[QUEUE].claimed == 1
            assert await broker.forget_owner(OWNER) == 2
            assert texts((await take(broker, owner=PEER)).deliveries) == ["a"]

    run(scenario())


def test_a_message_that_cannot_go_back_to_its_queue_is_a_dead_letter(
    on_redis: BrokerUnderTest, redis_server: RedisServer
) -> None:
    async def scenario() -> None:
        async with on_redis.open() as broker:
            await broker.publish(outgoing("a", "b", queue="bad"))
            a, _ = (await take(broker, queues=["bad"])).deliveries
            redis_server.ask("SET", "bad", "not a list")
            settled = await broker.settle([Return(a.tag)])
            assert (settled.applied, [one.reason for one in settled.refused]) == (1, [NOT_A_LIST])
            assert await broker.forget_owner(OWNER) == 1
            assert await reasons_of(broker) == [("bad", "a", NOT_A_LIST), ("bad", "b", NOT_A_LIST)]

    run(scenario())


def test_what_neither_its_queue_nor_the_dead_letters_take_stays_and_goes_back_later(
    on_redis: BrokerUnderTest, redis_server: RedisServer
) -> None:
    async def scenario(*, is_handed: bool) -> None:
        async with on_redis.open() as broker:
            await broker.publish(outgoing("a", queue="bad"))
            if is_handed:
                redis_server.ask("HSET", "umbel.handing", OWNER, "bad")
                redis_server.ask("LMOVE", "bad", f"umbel.handed.{OWNER}", "RIGHT", "LEFT")
            else:
                await take(broker, queues=["bad"])
            redis_server.ask("SET", "bad", "not a list")
            redis_server.ask("SET", "umbel.dead", "not a stream")
            assert await broker.forget_owner(OWNER) == 0
            redis_server.ask("ZADD", "umbel.owners", "XX", "0", OWNER)
            assert await broker.return_lost() == 0
            assert (await broker.queues())["bad"].claimed == 1
            redis_server.ask("DEL", "bad", "umbel.dead")
            redis_server.ask("ZADD", "umbel.owners", "XX", "0", OWNER)
            assert await broker.return_lost() == 1
            held = (await take(broker, queues=["bad"])).deliveries
            assert texts(held) == ["a"]
            await broker.settle([Ack(one.tag) for one in held])

    run(scenario(is_handed=False))
    run(scenario(is_handed=True))


@pytest.mark.parametrize("late", [0.0, LATER])
def test_a_batch_is_published_wholly_or_not_at_all(
    on_redis: BrokerUnderTest, redis_server: RedisServer, bad: str, late: float
) -> None:
    producer = on_redis.producer()

    async def scenario() -> None:
        async with on_redis.open() as broker:
            for batch in (
                outgoing("a", queue=bad),
                [*outgoing("a", not_before=late), *outgoing("b", queue=bad), *outgoing("c", queue="other")],
            ):
                with pytest.raises(BrokerRefused, match=NOT_A_LIST):
                    await broker.publish(batch)
                with pytest.raises(BrokerRefused, match=NOT_A_LIST):
                    await asyncio.to_thread(producer.publish, batch)
            assert {name: depth.ready for name, depth in (await broker.queues()).items()} == {}
            await broker.publish([*outgoing("a"), *outgoing("c", queue="other")])
            assert (redis_server.ask("LLEN", QUEUE), redis_server.ask("LLEN", "other")) == (1, 1)

    run(scenario())


def test_a_batch_too_large_for_one_script_asks_the_lists_first(
    on_redis: BrokerUnderTest, redis_server: RedisServer, bad: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "ARGUMENTS_MAX", 2)
    producer = on_redis.producer()
    with pytest.raises(BrokerRefused, match=NOT_A_LIST):
        producer.publish([*outgoing("a", "b", "c"), *outgoing("d", queue=bad)])
    assert redis_server.ask("EXISTS", QUEUE) == 0
    producer.publish([*outgoing("a", "b", "c"), *outgoing("d", queue="other")])
    assert redis_server.ask("LLEN", QUEUE) == 3


def test_a_queue_that_cannot_be_declared_still_takes_messages(
    on_redis: BrokerUnderTest, redis_server: RedisServer
) -> None:
    redis_server.ask("SET", f"_kombu.binding.{QUEUE}", "not a set")

    async def scenario() -> None:
        async with on_redis.open() as broker:
            await asyncio.to_thread(on_redis.producer().publish, outgoing("a"))
            assert texts((await take(broker)).deliveries) == ["a"]

    run(scenario())


def test_buried_messages_are_dead_letters_and_results_are_passed_over(on_redis: BrokerUnderTest) -> None:
    async def scenario() -> None:
        async with on_redis.open() as broker:
            await broker.bury([Refused(outgoing("a")[0], "no room"), Refused(result("r"), "no room")])
            assert await reasons_of(broker) == [(QUEUE, "a", "no room")]
            (letter,) = await broker.dead_letters()
            assert await broker.requeue_dead([letter.letter_id]) == 1
            assert texts((await take(broker)).deliveries) == ["a"]

    run(scenario())


def test_a_dead_letter_that_its_queue_refuses_stays(
    on_redis: BrokerUnderTest, redis_server: RedisServer, bad: str
) -> None:
    async def scenario() -> None:
        async with on_redis.open() as broker:
            parts = [*outgoing("a", queue=bad), *outgoing("b")]
            await broker.bury([Refused(one, "why") for one in parts])
            redis_server.ask("XADD", "umbel.dead", "*", "somebody", "else")
            letters = [one.letter_id for one in reversed(await broker.dead_letters())]
            with pytest.raises(
                BrokerRefused, match="1 dead letters requeued, 2 refused: .*" + NOT_A_LIST
            ) as caught:
                await broker.requeue_dead(letters)
            assert caught.value.places == (0, 2)
            assert [one.queue for one in await broker.dead_letters()] == ["", bad]

    run(scenario())


def test_a_queue_of_another_type_does_not_stop_the_others_and_is_named_once(
    on_redis: BrokerUnderTest, redis_server: RedisServer, bad: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with on_redis.open() as broker:
            redis_server.ask("SET", "umbel.delayed.worse", "not a zset")
            for text in ("a", "b"):
                await broker.publish(outgoing(text))
                taken = (await take(broker, queues=[bad, "worse", QUEUE])).deliveries
                assert texts(taken) == [text]
            await broker.wait_ready([bad, "worse"], 0.0, owner=OWNER)
            redis_server.ask("DEL", bad, "umbel.delayed.worse")
            await broker.publish(outgoing("c", queue=bad))
            assert texts((await take(broker, queues=[bad, "worse"])).deliveries) == ["c"]

    with caplog.at_level(logging.INFO, "umbel.brokers.redis"):
        run(scenario())
    said = sorted((one.message, vars(one)["queue"]) for one in caplog.records if hasattr(one, "queue"))
    assert said == [
        ("cannot fetch messages from a queue; retrying, other queues continue", "bad"),
        ("cannot fetch messages from a queue; retrying, other queues continue", "worse"),
        ("queue can be used again; fetching its messages", "bad"),
        ("queue can be used again; fetching its messages", "worse"),
    ]


@pytest.mark.parametrize(
    ("key", "step"),
    [
        ("umbel.owners", "claim"),
        ("umbel.generations", "claim"),
        (f"umbel.inflight.{OWNER}", "claim"),
        ("umbel.owners", "renew"),
        ("umbel.owners", "reap"),
    ],
)
def test_a_key_of_ours_of_another_type_is_named_and_nothing_is_taken(
    on_redis: BrokerUnderTest, redis_server: RedisServer, key: str, step: str
) -> None:
    async def scenario() -> None:
        async with on_redis.open() as broker:
            await broker.publish(outgoing("a"))
            redis_server.ask("SET", key, "not ours")
            calls = {"claim": take(broker), "renew": broker.renew(OWNER), "reap": broker.return_lost()}
            refused = calls.pop(step)
            for unused in calls.values():
                unused.close()
            with pytest.raises(BrokerRefused, match=f"the key '{key}' holds a string"):
                await refused
            redis_server.ask("DEL", key)
            assert texts((await take(broker)).deliveries) == ["a"]

    run(scenario())


def test_a_refused_periodic_message_does_not_hold_up_the_others_nor_the_marks(
    on_redis: BrokerUnderTest, bad: str
) -> None:
    async def scenario() -> None:
        async with on_redis.open() as broker:
            store = broker.coordination
            lease = await store.acquire_lease("beat", OWNER, ttl_s=10.0)
            batch = [*outgoing("a"), *outgoing("b", queue=bad), *outgoing("c")]
            assert await store.fenced_publish("beat", OWNER, lease.term, batch, data=b"marks")
            assert (await store.read_lease("beat")).data == b"marks"
            assert texts((await take(broker)).deliveries) == ["a", "c"]
            assert await reasons_of(broker) == [(bad, "b", NOT_A_LIST)]
            assert await store.fenced_publish("beat", OWNER, lease.term, outgoing("d"))

    run(scenario())


def test_a_chord_whose_body_is_refused_has_ended(on_redis: BrokerUnderTest, bad: str) -> None:
    backend = on_redis.backend()
    backend.start_chord("g", 1)
    assert backend.claim_chord("g", "last")
    (refused,) = backend.end_chord("g", [*outgoing("body", queue=bad), *outgoing("more")])
    assert refused == Refused(outgoing("body", queue=bad)[0], NOT_A_LIST)
    assert not backend.claim_chord("g", "other")
    backend.end_chord("g", outgoing("once more"))

    async def scenario() -> None:
        async with on_redis.open() as broker:
            assert await reasons_of(broker) == [(bad, "body", NOT_A_LIST)]
            assert texts((await take(broker)).deliveries) == ["more"]

    run(scenario())


def test_a_hostile_mark_between_good_messages_takes_none_of_them_along(
    on_redis: BrokerUnderTest, redis_server: RedisServer
) -> None:
    """Each of these once made the claim fail after it had taken the others out of their list (N1)."""
    hostile = [
        '{"umbel": {x}, "body": "a"}',
        *(f'{{"umbel": {{"not_before": {one}}}, "body": "a"}}' for one in ('"soon"', "null")),
    ]

    async def scenario() -> None:
        async with on_redis.open() as broker:
            names = [str(number) for number in range(80)]
            for name in names:
                await broker.publish(outgoing(name))
                redis_server.ask("LPUSH", QUEUE, hostile[int(name) % len(hostile)])
            held = (await take(broker, 500)).deliveries
            good = [one for one in held if one.message.headers]
            assert texts(good) == names and len(held) == 160
            unreadable = [one for one in held if not one.message.headers]
            await broker.settle([Started(one.tag) for one in unreadable])
            await broker.settle([Bury(one.tag, "no message") for one in unreadable])
            assert len(await broker.dead_letters()) == 80

    run(scenario())


def test_a_worker_goes_on_where_failures_cannot_be_kept(
    on_redis: BrokerUnderTest, redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    redis_server.ask("SET", "umbel.failed", "not a stream")

    async def scenario() -> None:
        async with on_redis.open() as broker:
            await store_failed(broker, [Refused(one, "broke") for one in outgoing("a", "b")])

    run(scenario())
    (told,) = [one.__dict__ for one in caplog.records if one.levelno == logging.ERROR]
    assert told["task_ids"] == "a,b" and "umbel.failed" in told["why"]
