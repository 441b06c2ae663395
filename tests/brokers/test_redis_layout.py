"""What a stranger's client sees in Redis: the keys of Celery, and ours beside them."""

import asyncio
import json
import re
import time
from base64 import b64decode
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.brokers.under_test import (
    OWNER,
    QUEUE,
    BrokerUnderTest,
    message,
    outgoing,
    result,
    run,
    take,
    texts,
)
from tests.servers.redis import RedisServer
from umbel.brokers.interface import Ack, Broadcast, BrokerSettings, Bury, Return
from umbel.brokers.redis import broadcasts
from umbel.brokers.redis.keys import CAPABILITIES, Keys
from umbel.brokers.redis.publishing import Bindings, pattern_of
from umbel.wire.envelope_redis import seal


def envelopes(server: RedisServer, key: str) -> list[dict[str, Any]]:
    found = server.ask("LRANGE", key, 0, -1)
    assert isinstance(found, list)
    return [json.loads(envelope) for envelope in found]


def test_messages_lie_in_the_lists_of_their_priorities_newest_first(
    on_redis: BrokerUnderTest, redis_server: RedisServer
) -> None:
    producer = on_redis.producer()
    for priority in (0, 2, 3, 5, 6, 9, 11, -1):
        producer.publish(outgoing(str(priority), priority=priority))
    lists = {
        key: [one["properties"]["correlation_id"] for one in envelopes(redis_server, key)]
        for key in ("celery", "celery\x06\x163", "celery\x06\x166", "celery\x06\x169")
    }
    assert list(lists.values()) == [["-1", "2", "0"], ["5", "3"], ["6"], ["11", "9"]]


def test_a_queue_is_bound_for_good_as_celery_binds_it(
    on_redis: BrokerUnderTest, redis_server: RedisServer
) -> None:
    on_redis.producer().publish(outgoing("a", queue="mine"))
    member = [b"mine\x06\x16\x06\x16mine"]
    assert redis_server.ask("SMEMBERS", "_kombu.binding.mine") == member
    assert redis_server.ask("SMEMBERS", "_kombu.binding_permanent.mine") == member


def queues_reached(binding_key: str, pattern: str, routing_key: str) -> list[str]:
    """What a message for an exchange with this one binding goes to."""
    keys = Keys("", 0)
    sent = msgspec.structs.replace(*outgoing("m"), exchange="topics", routing_key=routing_key)
    members = [keys.binding_member(binding_key, pattern, "bound").encode()]
    return [one.queue for one in Bindings(keys).route([sent], [members]).batch]


@given(
    st.lists(st.sampled_from(["a", "b", "ab", "*", "#"]), min_size=1, max_size=5),
    st.lists(st.sampled_from(["a", "b", "ab", "c"]), min_size=1, max_size=5),
)
def test_a_binding_of_a_topic_exchange_fits_what_celerys_pattern_fits(
    bound: list[str], sent: list[str]
) -> None:
    key, routing_key = ".".join(bound), ".".join(sent)
    fits = re.match(pattern_of(key), routing_key) is not None
    assert queues_reached(key, pattern_of(key), routing_key) == (["bound"] if fits else [])


def test_a_pattern_that_somebody_wrote_into_redis_is_not_matched() -> None:
    """Publishers would compute for years."""
    assert queues_reached("a.*", "(a+)+$", "a" * 100 + "!") == []
    assert queues_reached("a.*", "(a+)+$", "a.b") == ["bound"]


def test_a_client_publishes_for_later_as_celery_does_and_a_claim_moves_it_aside(
    on_redis: BrokerUnderTest, redis_server: RedisServer
) -> None:
    on_redis.producer().publish(outgoing("later", not_before=time.time() + 3600) + outgoing("now"))
    assert redis_server.ask("LLEN", QUEUE) == 2

    async def scenario() -> None:
        async with on_redis.open() as broker:
            assert texts((await take(broker)).deliveries) == ["now"]
            assert (await broker.queues())[QUEUE].delayed == 1
            assert redis_server.ask("LLEN", QUEUE) == 0

    run(scenario())


def test_what_a_celery_worker_holds_is_left_to_celery(
    on_redis: BrokerUnderTest, redis_server: RedisServer
) -> None:
    redis_server.ask("HSET", "unacked", "tag", '[{}, "", "celery"]')
    redis_server.ask("ZADD", "unacked_index", 1, "tag")

    async def scenario() -> None:
        async with on_redis.open() as broker:
            assert not (await take(broker)).deliveries
            await broker.return_lost()
            await broker.sweep()

    run(scenario())
    assert redis_server.ask("HLEN", "unacked") == 1


def test_a_returned_message_is_marked_as_celery_marks_it_and_otherwise_unchanged(
    on_redis: BrokerUnderTest, redis_server: RedisServer
) -> None:
    redis_server.ask("LPUSH", QUEUE, seal(message("ours"), QUEUE, "one"))
    celerys = json.loads(seal(message("celery's"), QUEUE, "two")) | {"headers": {}}
    redis_server.ask("LPUSH", QUEUE, json.dumps(celerys))

    async def scenario() -> None:
        async with on_redis.open() as broker:
            before = (await take(broker)).deliveries
            await broker.forget_owner(OWNER)
            second, first = envelopes(redis_server, QUEUE)
            for envelope in (first, second):
                assert envelope["headers"]["redelivered"] is True
                assert envelope["properties"]["delivery_info"]["redelivered"] is True
                assert envelope["properties"]["delivery_tag"] in ("one", "two")
            again = (await take(broker)).deliveries
            assert [delivery.redelivered for delivery in again] == [True, True]
            assert [one.message for one in again] == [one.message for one in before]

    run(scenario())


def test_our_mark_outlives_a_restore_by_celery(on_redis: BrokerUnderTest, redis_server: RedisServer) -> None:
    async def scenario() -> None:
        async with on_redis.open() as broker:
            await broker.publish(outgoing("a"))
            (held,) = (await take(broker)).deliveries
            await broker.settle([Return(held.tag, charged=True, ran=True)])
            (envelope,) = envelopes(redis_server, QUEUE)
            redis_server.ask("DEL", QUEUE)
            redis_server.ask("RPUSH", QUEUE, json.dumps(envelope))  # so does Kombu, with its spaces
            (again,) = (await take(broker)).deliveries
            await broker.settle([Return(again.tag, charged=True, ran=True)])
            (again,) = (await take(broker)).deliveries
            assert (again.starts, again.redelivered, again.message) == (2, True, held.message)

    run(scenario())


def test_garbage_in_a_list_is_handed_out_like_a_message_and_can_be_buried(
    on_redis: BrokerUnderTest, redis_server: RedisServer
) -> None:
    redis_server.ask("LPUSH", QUEUE, b"\xff\x00 no envelope")

    async def scenario() -> None:
        async with on_redis.open() as broker:
            await broker.publish(outgoing("a"))
            bad, good = (await take(broker)).deliveries
            assert (bad.message.headers, texts([good])) == (b"", ["a"])
            await broker.forget_owner(OWNER)
            bad, good = (await take(broker)).deliveries
            await broker.settle([Bury(bad.tag, "no envelope"), Ack(good.tag)])
            (letter,) = await broker.dead_letters()
            assert letter.message.body == b"\xff\x00 no envelope"

    run(scenario())


def test_a_result_with_an_address_is_sent_there_as_celery_sends_it_and_not_stored(
    on_redis: BrokerUnderTest, redis_server: RedisServer
) -> None:
    stored = msgspec.structs.replace(result("id", value="ä"), reply_to="asker")

    async def scenario() -> None:
        async with on_redis.open(result_expires_s=1000.0) as broker:
            await broker.publish(outgoing("a"))
            (held,) = (await take(broker)).deliveries
            await broker.settle([Ack(held.tag, [stored, result("other")], outgoing("follow-up"))])

    run(scenario())
    (letter,) = envelopes(redis_server, "asker")
    assert letter["headers"] == {} and letter["properties"]["correlation_id"] == "id"
    assert letter["properties"]["delivery_info"] == {"exchange": "", "routing_key": "asker"}
    assert b64decode(letter["body"]) == stored.payload
    left_ms = redis_server.ask("PTTL", "asker")
    assert isinstance(left_ms, int) and 900_000 < left_ms <= 1_000_000
    assert redis_server.ask("EXISTS", "celery-task-meta-id", "celery-task-meta-other") == 1
    assert len(envelopes(redis_server, QUEUE)) == 1


def test_a_result_is_stored_under_celerys_key_with_its_ttl(
    on_redis: BrokerUnderTest, redis_server: RedisServer
) -> None:
    stored = result("id", value="ä")

    async def scenario() -> None:
        async with on_redis.open(result_expires_s=1000.0) as broker:
            await broker.publish(outgoing("a"))
            (held,) = (await take(broker)).deliveries
            await broker.settle([Ack(held.tag, [stored])])

    run(scenario())
    assert redis_server.ask("GET", "celery-task-meta-id") == stored.payload
    left = redis_server.ask("PTTL", "celery-task-meta-id")
    assert isinstance(left, int) and 990_000 < left <= 1_000_000
    on_redis.backend(result_expires_s=0.0).store([result("for ever")])
    assert redis_server.ask("PTTL", "celery-task-meta-for ever") == -1


def test_broadcasts_go_to_celerys_channels_and_come_from_them(
    on_redis: BrokerUnderTest, redis_server: RedisServer
) -> None:
    async def scenario() -> None:
        async with on_redis.open() as broker, broker.subscribe("celeryev", ["worker.#", "#"]) as heard:
            patterns = redis_server.ask("CLIENT", "LIST")
            assert isinstance(patterns, bytes) and b"psub=2" in patterns
            payload = seal(message("{}"), QUEUE, "tag")
            assert redis_server.ask("PUBLISH", "/0.celeryev/worker.heartbeat", payload) == 2
            assert redis_server.ask("PUBLISH", "/1.celeryev/worker.heartbeat", payload) == 0
            redis_server.ask("PUBLISH", "/0.celeryevil/worker.heartbeat", payload)
            redis_server.ask("PUBLISH", "/0.celeryev", payload)
            listening = aiter(heard)
            async with asyncio.timeout(10):
                one, other = await anext(listening), await anext(listening)
            assert (one.routing_key, one.body) == ("worker.heartbeat", b"{}")
            assert other.routing_key == ""  # twice from the server, once from us

    run(scenario())


def test_an_answer_waits_for_its_asker_and_leaves_nothing_behind(
    on_redis: BrokerUnderTest, redis_server: RedisServer
) -> None:
    exchange = "reply.celery.pidbox"

    async def scenario() -> None:
        async with on_redis.open() as worker, worker.subscribe(exchange, ["asker"]) as answers:
            members = redis_server.ask("SMEMBERS", f"_kombu.binding.{exchange}")
            assert members == [b"asker\x06\x16\x06\x16asker.reply.celery.pidbox"]
            for sender in (worker.broadcast, None):
                sent = Broadcast(exchange, "asker", b'{"ada": {"ok": "pong"}}', b'{"ticket": "t"}')
                other = Broadcast(exchange, "another", b"{}")
                if sender is not None:
                    await sender([sent, other], ttl_s=10)
                else:
                    await asyncio.to_thread(on_redis.producer().broadcast, [sent, other], ttl_s=10)
                async with asyncio.timeout(10):
                    assert await anext(aiter(answers)) == sent
        assert redis_server.ask("EXISTS", f"_kombu.binding.{exchange}", f"asker.{exchange}") == 0

    run(scenario())


def test_what_a_dead_asker_leaves_behind_is_swept(
    on_redis: BrokerUnderTest, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange = "reply.celery.pidbox"
    keys = (f"_kombu.binding.{exchange}", f"umbel.askers.{exchange}", f"dead.{exchange}")

    async def scenario() -> None:
        async with on_redis.open() as worker:
            with monkeypatch.context() as patch:
                patch.setattr(broadcasts, "ASKER_LIFE_S", -1)  # as if it had been silent for too long
                asker = worker.subscribe(exchange, ["dead"])
                await asker.__aenter__()
            await worker.broadcast([Broadcast(exchange, "dead", b"{}")], ttl_s=10)
            left = redis_server.ask("PTTL", keys[2])
            assert isinstance(left, int) and 0 < left <= 60_000
            assert redis_server.ask("EXISTS", *keys) == 3
            async with worker.subscribe(exchange, ["alive"]):
                members = redis_server.ask("SMEMBERS", keys[0])
                assert members == [b"alive\x06\x16\x06\x16alive.reply.celery.pidbox"]
                await worker.return_lost()  # what every worker does, time and again
                assert redis_server.ask("SCARD", keys[0]) == 1
            assert redis_server.ask("EXISTS", *keys) == 0
            await asker.__aexit__(None, None, None)

    run(scenario())


def test_a_key_prefix_stands_before_every_key(redis_url: str, redis_server: RedisServer) -> None:
    on_redis = BrokerUnderTest(BrokerSettings(redis_url, key_prefix="PFX:"), CAPABILITIES)

    async def scenario() -> None:
        async with on_redis.open() as broker:
            await broker.publish(outgoing("a", "b", "c", priority=4))
            await broker.publish(outgoing("later", not_before=time.time() + 3600))
            held = (await take(broker)).deliveries
            assert texts(held) == ["a", "b", "c"]
            assert [delivery.queue for delivery in held] == [QUEUE] * 3
            await broker.settle(
                [Ack(held[0].tag, [result("id")]), Bury(held[1].tag, "why"), Return(held[2].tag)]
            )
            assert [letter.queue for letter in await broker.dead_letters()] == [QUEUE]
            await broker.register_recorder("lake")
            await broker.log_events([("k", b"{}")])
            await broker.coordination.acquire_lease("beat", OWNER, ttl_s=10)
            await broker.coordination.raise_clock(7)
            assert texts((await take(broker)).deliveries) == ["c"]

    run(scenario())
    on_redis.backend().store([result("other")])
    assert set(on_redis.backend().read(["id", "other"])) == {"id", "other"}
    on_redis.close()
    keys = redis_server.ask("KEYS", "*")
    assert isinstance(keys, list) and len(keys) > 10
    assert [key for key in keys if not key.startswith(b"PFX:")] == []


def test_a_node_that_lives_has_a_key_that_ends_with_it(
    on_redis: BrokerUnderTest, redis_server: RedisServer
) -> None:
    async def scenario() -> None:
        async with on_redis.open() as broker:
            await broker.mark_alive("ada@here", 7, ttl_s=6.0)

    run(scenario())
    assert redis_server.ask("GET", "{coord}:m:ada@here") == b"7"
    left_ms = redis_server.ask("PTTL", "{coord}:m:ada@here")
    assert isinstance(left_ms, int) and 0 < left_ms <= 6000
