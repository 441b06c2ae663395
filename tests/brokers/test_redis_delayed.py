"""What waits in Redis until it is due: where others find it, and when no worker of ours is left."""

import json
import time
from typing import Any

from tests.brokers.under_test import OWNER, PEER, QUEUE, BrokerUnderTest, outgoing, run, take, take_one, texts
from tests.servers.redis import RedisServer
from umbel.brokers.interface import Ack, Depth, Return


def waiting(server: RedisServer, key: str) -> list[tuple[str, float]]:
    """(task, when it is due) of the messages in a list, next one first."""
    found = server.ask("LRANGE", key, 0, -1)
    assert isinstance(found, list)
    envelopes: list[dict[str, Any]] = [json.loads(one) for one in reversed(found)]
    return [
        (one["properties"]["correlation_id"], one.get("umbel", {}).get("not_before", 0.0))
        for one in envelopes
    ]


def test_a_delayed_follow_up_is_parked_only_where_this_worker_wakes_up_for_it(
    on_redis: BrokerUnderTest, redis_server: RedisServer
) -> None:
    due = round(time.time()) + 3600.0

    async def scenario() -> None:
        async with on_redis.open() as broker:
            await broker.publish(outgoing("first"))
            held = await take_one(broker)
            follow_ups = [
                *outgoing("here", not_before=due),
                *outgoing("elsewhere", queue="celerys", not_before=due),
                *outgoing("now", queue="celerys"),
            ]
            await broker.settle([Ack(held.tag, follow_ups=follow_ups)])
            await broker.publish(outgoing("sent", queue="celerys", not_before=due))
            assert dict(await broker.queues())[QUEUE] == Depth(0, 1, 0)

    run(scenario())
    assert waiting(redis_server, "celerys") == [("elsewhere", due), ("now", 0.0), ("sent", due)]


def test_what_is_parked_goes_back_into_the_lists_with_the_last_worker(
    on_redis: BrokerUnderTest, redis_server: RedisServer
) -> None:
    due = round(time.time()) + 3600.0

    async def scenario() -> None:
        async with on_redis.open() as broker:
            on_redis.producer().publish([*outgoing("b", not_before=due + 1), *outgoing("a", not_before=due)])
            await broker.publish(outgoing("returned", queue="other", priority=6))
            (held,) = (await take(broker, queues=(QUEUE, "other"))).deliveries
            await broker.settle([Return(held.tag, charged=1, ran=True, not_before=due)])
            await broker.renew(PEER)
            await broker.forget_owner(OWNER)
            assert waiting(redis_server, QUEUE) == []
            await broker.forget_owner(PEER)
            assert waiting(redis_server, QUEUE) == [("a", due), ("b", due + 1)]
            assert waiting(redis_server, "other\x06\x166") == [("returned", due)]

            claim = await take(broker, queues=(QUEUE, "other"))
            assert texts(claim.deliveries) == []
            assert dict(await broker.queues()) == {QUEUE: Depth(0, 2, 0), "other": Depth(0, 1, 0)}
            found = redis_server.ask("ZRANGE", "umbel.delayed.other", 0, -1)
            assert isinstance(found, list)
            mark = json.loads(found[0].partition(b"\0")[2])["umbel"]
            assert mark == {"starts": 1, "redelivered": True, "not_before": due}

    run(scenario())


def test_many_parked_messages_go_back_in_several_steps(
    on_redis: BrokerUnderTest, redis_server: RedisServer
) -> None:
    async def scenario() -> None:
        async with on_redis.open() as broker:
            names = [str(number) for number in range(2500)]
            on_redis.producer().publish(outgoing(*names, not_before=time.time() + 3600))
            while dict(await broker.queues())[QUEUE].delayed != 2500:
                assert not (await take(broker)).deliveries
            await broker.forget_owner(OWNER)
            assert dict(await broker.queues()) == {QUEUE: Depth(2500, 0, 0)}

    run(scenario())
