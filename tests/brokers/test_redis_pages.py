"""More than one call, chunk or page: what is too much for one goes in several."""

import time
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from tests.brokers.under_test import (
    OWNER,
    QUEUE,
    BrokerUnderTest,
    message,
    outgoing,
    result,
    run,
    take,
    take_one,
    texts,
)
from tests.servers.redis import RedisServer
from umbel.backends import redis as redis_backend
from umbel.brokers.interface import Ack, Return
from umbel.brokers.redis import publishing, verdicts
from umbel.brokers.redis.broker import RedisBroker
from umbel.brokers.redis.link import Link
from umbel.brokers.redis.scripts import Script
from umbel.errors import BrokerRefused
from umbel.wire.message import Outgoing
from umbel.wire.records import Revoke

LATER = 4102444800.0


def revoke_of(task_id: str) -> Revoke:
    return Revoke(task_id, recorded_at=time.time(), expires_at=LATER)


def large(text: str) -> Outgoing:
    """With a short id, as every message has it."""
    return Outgoing("next", replace(message(text), correlation_id=text[:8]))


def test_verdicts_that_are_large_go_in_several_calls_and_a_part_beyond_the_limit_is_refused(
    on_redis: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limits are those of a server: a gigabyte in one call ends the connection."""
    for module in (publishing, verdicts, redis_backend):
        monkeypatch.setattr(module, "BATCH_BYTES_MAX", 1000)
        monkeypatch.setattr(module, "CALL_BYTES_MAX", 300, raising=False)
    settles: list[Script] = []
    run_script = Link.run

    def counted(self: Link, script: Script, *args: Any) -> Any:
        settles.extend([script] if script.name == "settle" else [])
        return run_script(self, script, *args)

    monkeypatch.setattr(Link, "run", counted)

    async def scenario() -> None:
        async with on_redis.open() as broker:
            await broker.publish(outgoing("a", "b", "c"))
            held = (await take(broker)).deliveries
            follow_ups = [large("x" * 900), large("y" * 900)]
            settled = await broker.settle(
                [
                    Ack(held[0].tag, (), outgoing("z" * 200, queue="next")),
                    Ack(held[1].tag, (), follow_ups),
                    Ack(held[2].tag, [result("r")]),
                ]
            )
            assert (len(settles), settled.applied) == (3, 3)
            assert [one.part for one in settled.refused] == [follow_ups[1]]
            assert "other results exceed" in settled.refused[0].reason
            sent = texts((await take(broker, queues=["next"])).deliveries)
            assert [len(text) for text in sent] == [200, 900]
            with pytest.raises(BrokerRefused, match="for 'celery' exceeds the limit"):
                await broker.publish(outgoing("x" * 1200))

    run(scenario())
    with pytest.raises(BrokerRefused, match="it exceeds the limit") as caught:
        on_redis.backend().store([result("a"), result("b", value="x" * 1200), result("c")])
    assert caught.value.places == (1,)
    assert on_redis.backend().read(["a", "b", "c"]).keys() == {"a", "c"}


def test_more_follow_ups_than_one_push_takes_all_arrive(on_redis: BrokerUnderTest) -> None:
    names = [str(number) for number in range(2500)]

    async def scenario() -> None:
        async with on_redis.open() as broker:
            await broker.publish(outgoing("a"))
            held = await take_one(broker)
            await broker.settle([Ack(held.tag, (), outgoing(*names, queue="next"))])
            assert texts((await take(broker, 5000, queues=["next"])).deliveries) == names

    run(scenario())


def test_more_messages_than_one_chunk_are_claimed_and_settled(on_redis: BrokerUnderTest) -> None:
    names = [str(number) for number in range(2500)]

    async def scenario() -> None:
        async with on_redis.open() as broker:
            await broker.publish(outgoing(*names))
            held = (await take(broker, 5000)).deliveries
            assert texts(held) == names
            assert (await broker.settle([Ack(one.tag) for one in held])).applied == len(names)
            assert await broker.forget_owner(OWNER) == 0

    run(scenario())


def test_a_settle_in_doubt_is_asked_for_by_its_own_claim(
    on_redis: BrokerUnderTest, redis_server: RedisServer
) -> None:
    """The claims of an owner whose epoch stands may be gone each for itself."""

    async def scenario(verdicts_of: Sequence[type[Ack] | type[Return]]) -> None:
        async with on_redis.open() as broker:
            await broker.publish(outgoing("a", "b"))
            a, b = (await take(broker)).deliveries
            assert isinstance(broker, RedisBroker)
            holding = broker._claims._holding
            groups, _ = holding.judge([Ack(a.tag), Ack(b.tag)])
            holding.restore(groups)  # nobody knows whether these were settled: that of a was
            redis_server.ask("HDEL", f"umbel.inflight.{OWNER}", a.tag)
            made = [kind(one.tag) for kind, one in zip(verdicts_of, (a, b), strict=True)]
            with_follow_up = [
                Ack(one.tag, (), outgoing(str(place), queue="next")) if isinstance(one, Ack) else one
                for place, one in enumerate(made)
            ]
            settled = await broker.settle(with_follow_up)
            assert (settled.applied, settled.conflicts) == (2, frozenset())
            sent = texts((await take(broker, queues=["next"])).deliveries)
            assert sent == (["1"] if isinstance(made[1], Ack) else [])
            left = texts((await take(broker)).deliveries)
            assert left == (["b"] if isinstance(made[1], Return) else [])
            assert await broker.forget_owner(OWNER) == len(sent) + len(left)
            redis_server.ask("DEL", "next", QUEUE)

    for kinds in ((Ack, Ack), (Return, Ack), (Ack, Return), (Return, Return)):
        run(scenario(kinds))


def test_more_revokes_than_one_page_come_before_any_message(
    on_redis: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("umbel.brokers.redis.claims.REVOKES_PAGE", 3)

    async def scenario() -> None:
        async with on_redis.open() as broker:
            await broker.publish(outgoing("a"))
            await broker.revoke([revoke_of(f"t{number}") for number in range(8)])
            cursor, pages = 0, []
            while True:
                claim = await broker.claim(OWNER, [QUEUE], 10, revoked_after=cursor)
                pages.append([one.task_id for one in claim.revokes])
                cursor = claim.revoked_cursor
                if claim.deliveries:
                    break
            assert pages == [["t0", "t1", "t2"], ["t3", "t4", "t5"], ["t6", "t7"]]
            assert not (await broker.claim(OWNER, [QUEUE], 10, revoked_after=cursor)).revokes

    run(scenario())


def test_a_revoke_or_a_cursor_that_cannot_be_read_stops_no_claim(
    on_redis: BrokerUnderTest, redis_server: RedisServer
) -> None:
    async def scenario() -> None:
        async with on_redis.open() as broker:
            await broker.revoke([revoke_of("t")])
            redis_server.ask("ZADD", "umbel.revokes.order", "1", "no revoke")
            redis_server.ask("ZADD", "umbel.revokes.order", "+inf", "no cursor")
            for cursor in ("first", "-1", "1e999"):
                redis_server.ask("SET", "umbel.revokes.cursor", cursor)
                await broker.publish(outgoing("a"))
                claim = await broker.claim(OWNER, [QUEUE], 10)
                assert ([one.task_id for one in claim.revokes], texts(claim.deliveries)) == (["t"], ["a"])
                await broker.wait_ready([QUEUE], 0.0)
            await broker.revoke([revoke_of("u")])
            claim = await broker.claim(OWNER, [QUEUE], 10, revoked_after=claim.revoked_cursor)
            assert [one.task_id for one in claim.revokes] == ["u"]

    run(scenario())


def test_an_owner_that_was_forgotten_does_not_take_the_data_for_replaced(on_redis: BrokerUnderTest) -> None:
    async def scenario() -> None:
        async with on_redis.open() as broker:
            assert [await broker.renew(OWNER) for _ in range(3)] == [False, True, True]
            await broker.forget_owner(OWNER)
            assert await broker.renew(OWNER) is False

    run(scenario())
