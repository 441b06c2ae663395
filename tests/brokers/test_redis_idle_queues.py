"""A worker of many queues asks after those that the server told of, and misses nothing in the others."""

import asyncio
import math
import random
import time

from tests.brokers.under_test import LONG_S, OWNER, BrokerUnderTest, outgoing, run, take, texts
from tests.servers.redis import RedisServer, calls
from umbel.brokers.interface import Ack, Broker, Pause
from umbel.brokers.redis.keys import Keys
from umbel.brokers.redis.waiting import IdleQueues

MANY = tuple(f"queue-{number}" for number in range(200))
SOME = MANY[:30]
LASTS_S = 30.0


def known(*queues: str, due_at: float = math.inf) -> IdleQueues:
    idle = IdleQueues(Keys("", 0))
    assert idle.ask(queues, 1.0, LASTS_S) == queues
    assert idle.keep(dict.fromkeys(queues, due_at)) == 1.0 + LASTS_S
    return idle


def test_only_what_the_server_told_of_is_asked_for_again() -> None:
    idle = known("a", "b", "c")
    assert idle.others(["a", "b", "c", "new"], 2.0) == ["new"]
    idle.forget([b"b", b"stranger"])
    idle.forget([b"umbel.delayed.c"])
    assert idle.ask(["a", "b", "c"], 2.0, LASTS_S) == ["b", "c"]


def test_a_list_of_another_priority_is_a_list_of_its_queue() -> None:
    idle = known("a")
    idle.forget([b"a\x06\x169"])
    assert idle.others(["a"], 2.0) == ["a"]


def test_a_queue_whose_delayed_message_is_due_is_not_idle() -> None:
    idle = known("a", due_at=5.0)
    assert (idle.others(["a"], 4.9), idle.others(["a"], 5.0)) == ([], ["a"])
    assert (idle.first_due(["a", "b"]), idle.first_due(["b"])) == (5.0, math.inf)


def test_what_was_told_while_the_answer_was_on_its_way_is_not_overwritten_by_it() -> None:
    idle = known()
    idle.ask(["a", "b"], 2.0, LASTS_S)
    idle.forget([b"a"])
    idle.keep({"a": math.inf, "b": math.inf})
    assert idle.others(["a", "b"], 3.0) == ["a"]
    idle.ask(["a"], 4.0, LASTS_S)
    idle.forget(None)
    idle.keep({"a": math.inf})
    assert idle.others(["a", "b"], 5.0) == ["a", "b"], "the server was emptied"


def test_everything_is_asked_for_again_when_it_is_time() -> None:
    idle = known("a", "b")
    assert idle.others(["a", "b"], 0.9 + LASTS_S) == []
    assert idle.others(["a", "b"], 1.0 + LASTS_S) == ["a", "b"], "also by who claims and never waits"
    assert idle.ask(["a", "b"], 1.0 + LASTS_S, LASTS_S) == ["a", "b"]


async def taken_from(broker: Broker, queues: tuple[str, ...]) -> list[str]:
    """What the next ring is for; settled."""
    assert await broker.wait_ready(queues, LONG_S, owner=OWNER)
    deliveries = (await take(broker, queues=queues, limit=100)).deliveries
    await broker.settle([Ack(one.tag) for one in deliveries])
    return texts(deliveries)


def test_the_next_message_of_many_queues_costs_what_it_costs_with_few(
    on_redis: BrokerUnderTest, redis_server: RedisServer
) -> None:
    """Counted: looks into lists by claims, and questions after lists before each wait."""

    def looks() -> tuple[int, int]:
        return calls(redis_server, "rpop"), calls(redis_server, "llen")

    async def scenario() -> None:
        async with on_redis.open() as broker:
            await take(broker, queues=MANY)
            assert not await broker.wait_ready(MANY, 0.05, owner=OWNER)
            before = looks()
            for number in range(5):
                sent = asyncio.create_task(broker.publish(outgoing(f"m{number}", queue=MANY[7 * number])))
                got: list[str] = []
                while not got:  # the worker's own settling is told, too
                    got = await taken_from(broker, MANY)
                assert got == [f"m{number}"]
                await sent
            popped, asked = (after - earlier for after, earlier in zip(looks(), before, strict=True))
            assert popped < len(MANY), "a claim looked into every list"
            assert asked < len(MANY), "a wait asked after every list"

    run(scenario())


def test_nothing_is_missed_whatever_happens_to_the_queues(on_redis: BrokerUnderTest) -> None:
    """Sends of any priority, delayed ones, and pauses, while a worker waits and claims."""
    chance = random.Random(7)

    async def disturb(broker: Broker, sent: set[str]) -> None:
        paused: set[str] = set()
        for number in range(300):
            queue = chance.choice(SOME)
            match chance.randrange(8):
                case 0 if len(paused) < 5:
                    await broker.pause(queue, Pause(time.time()))
                    paused.add(queue)
                case 1 if paused:
                    await broker.resume(paused.pop())
                case 2:
                    due = time.time() + chance.random() / 5
                    await broker.publish(outgoing(f"m{number}", queue=queue, not_before=due))
                    sent.add(f"m{number}")
                case _:
                    priority = chance.choice((0, 0, 3, 9))
                    await broker.publish(outgoing(f"m{number}", queue=queue, priority=priority))
                    sent.add(f"m{number}")
            for _ in range(chance.randrange(4)):  # a little later
                await broker.paused()
        for queue in paused:
            await broker.resume(queue)

    async def scenario() -> None:
        sent: set[str] = set()
        got: list[str] = []
        async with on_redis.open() as other, on_redis.open() as broker:
            disturbing = asyncio.create_task(disturb(other, sent))
            while not disturbing.done() or set(got) < sent:
                limit = chance.choice((1, 3, 100))
                deliveries = (await take(broker, queues=SOME, limit=limit)).deliveries
                await broker.settle([Ack(one.tag) for one in deliveries])
                got += texts(deliveries)
                if not deliveries and (not disturbing.done() or set(got) < sent):
                    # One that nobody rings for would be missed for longer than this.
                    assert await broker.wait_ready(SOME, LONG_S / 3, owner=OWNER)
            await disturbing
        assert sorted(got) == sorted(sent)

    run(scenario())
