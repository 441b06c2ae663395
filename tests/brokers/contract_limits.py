"""What every broker promises about limits for the whole cluster, or refuses with its reason."""

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import wraps
from typing import ParamSpec

from tests.brokers.contract_verdicts import lose, settle_all
from tests.brokers.under_test import (
    LONG_S,
    OWNER,
    PEER,
    QUEUE,
    SHORT_LEASE_S,
    BrokerUnderTest,
    eventually,
    needs,
    outgoing,
    run,
    take,
    take_in_time,
    take_one,
    texts,
)
from umbel.brokers.interface import (
    Ack,
    Broker,
    Bury,
    Delivery,
    Depth,
    Pause,
    Permit,
    Return,
    Spend,
    Started,
    Tag,
)
from umbel.brokers.redis.broker import RedisBroker
from umbel.brokers.sqlite.broker import SqliteBroker
from umbel.protocol.delivery.limits import Concurrency, Rate, Terms

ONE, TWO = Concurrency(1).terms, Concurrency(2).terms
SLOW = Rate("1/h").terms
FAR = time.time() + 600


async def start(
    broker: Broker, deliveries: Sequence[Delivery], terms: Terms, bucket: str = "t:k", *, ends: bool = False
) -> list[Delivery]:
    """Those that may start now."""
    asked = [Permit(one.tag, one.message.correlation_id, bucket, terms, ends) for one in deliveries]
    refused = await broker.permit(asked)
    assert not any(refused.values())
    return [one for one in deliveries if one.tag not in refused]


P = ParamSpec("P")


def kept(test: Callable[P, None]) -> Callable[P, None]:
    """Where limits are not kept there is nothing more to promise than the refusal, which one test is for."""

    @wraps(test)
    def run_where_kept(*args: P.args, **kwargs: P.kwargs) -> None:
        under_test = kwargs["under_test"]
        assert isinstance(under_test, BrokerUnderTest)
        if under_test.capabilities.limits:
            test(*args, **kwargs)

    return run_where_kept


async def depth(broker: Broker, queue: str = QUEUE) -> Depth:
    return (await broker.queues()).get(queue, Depth(0, 0, 0))


def marks_of(broker: Broker) -> dict[Tag, str]:
    if isinstance(broker, RedisBroker):
        return broker._claims._marks
    assert isinstance(broker, SqliteBroker)
    return broker._store._holding.marks


class LimitsContract:
    @needs("limits")
    def test_so_many_start_at_once_and_each_end_calls_the_next(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with under_test.open() as broker, under_test.open() as peer:
                await broker.publish(outgoing("a", "b", "c", "d", "e", "f"))
                held = (await take(broker)).deliveries
                started = await start(broker, held, TWO)
                assert texts(started) == ["a", "b"]
                assert await depth(broker) == Depth(0, 0, 2, limited=4)
                assert not (await take(peer, owner=PEER)).deliveries
                await settle_all(broker, Started(started[0].tag))  # no end
                assert await depth(broker) == Depth(0, 0, 2, limited=4)
                for verdict in (Ack(started[0].tag), Bury(started[1].tag, "why")):
                    await settle_all(broker, verdict)
                assert await depth(broker) == Depth(2, 0, 0, limited=2)
                called = (await take(peer, owner=PEER)).deliveries
                assert sorted(texts(called)) == ["c", "d"]
                assert await start(peer, called, TWO) == called
                await settle_all(peer, *(Ack(one.tag) for one in called))
                last = (await take(peer, owner=PEER)).deliveries
                assert sorted(texts(await start(peer, last, TWO))) == ["e", "f"]
                await settle_all(peer, *(Ack(one.tag) for one in last))
                assert await depth(broker) == Depth(0, 0, 0)

        run(scenario())

    @kept
    def test_other_keys_and_tasks_go_on(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with under_test.open() as broker:
                await broker.publish(outgoing("a", "b", "other", "plain"))
                first, second, other, plain = (await take(broker)).deliveries
                assert texts(await start(broker, [first, second], ONE)) == ["a"]
                assert texts(await start(broker, [other], ONE, "t:other")) == ["other"]
                await settle_all(broker, Ack(other.tag), Ack(plain.tag))
                assert await depth(broker) == Depth(0, 0, 1, limited=1)

        run(scenario())

    @kept
    def test_who_was_called_comes_before_who_comes_new(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with under_test.open() as broker, under_test.open() as peer:
                await broker.publish(outgoing("a", "b", "c"))
                first, *_ = await start(broker, (await take(broker)).deliveries, ONE)
                await peer.publish(outgoing("new"))
                new = await take_one(peer, owner=PEER)
                await settle_all(broker, Ack(first.tag))  # calls b
                assert await start(peer, [new], ONE) == []
                called = await take_one(broker)
                assert texts([called]) == ["b"]
                assert await start(broker, [called], ONE) == [called]
                assert await depth(broker) == Depth(0, 0, 1, limited=2)

        run(scenario())

    @kept
    def test_a_slot_is_free_when_its_message_is_returned_or_its_owner_stops(
        self, under_test: BrokerUnderTest
    ) -> None:
        async def scenario() -> None:
            async with under_test.open() as broker, under_test.open() as peer:
                await broker.publish(outgoing("a", "b"))
                (first,) = await start(broker, (await take(broker)).deliveries, ONE)
                await settle_all(broker, Return(first.tag))
                both = (await take(broker)).deliveries
                assert sorted(texts(both)) == ["a", "b"]
                (running,) = await start(broker, both, ONE)
                assert await broker.forget_owner(OWNER) == 1
                again = (await take(peer, owner=PEER)).deliveries
                assert running.message.body in [one.message.body for one in again]
                assert len(await start(peer, again, ONE)) == 1

        run(scenario())

    @kept
    def test_a_dead_holder_frees_its_slot(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with (
                under_test.open(lease_s=SHORT_LEASE_S) as dead,
                under_test.open(lease_s=SHORT_LEASE_S) as peer,
            ):
                await dead.publish(outgoing("a", "b", "c"))
                held = await start(dead, (await take(dead)).deliveries, ONE)
                assert texts(held) == ["a"]
                await lose(peer, held, holder=dead)
                ended: list[str] = []

                async def all_ran() -> bool:
                    claimed = (await take(peer, owner=PEER)).deliveries
                    running = await start(peer, claimed, ONE)
                    assert len(running) <= 1
                    await settle_all(peer, *(Ack(one.tag) for one in running))
                    ended.extend(texts(running))
                    await peer.return_lost()
                    return len(ended) == 3

                await eventually(all_ran, what="the end of all that waited for the dead one")
                assert sorted(ended) == ["a", "b", "c"]
                assert await depth(peer) == Depth(0, 0, 0)

        run(scenario())

    @kept
    def test_one_that_ends_without_starting_passes_its_turn_on(self, under_test: BrokerUnderTest) -> None:
        """It was revoked, or expired, while it waited."""

        async def scenario() -> None:
            async with under_test.open() as broker:
                await broker.publish(outgoing("a", "b", "c"))
                (first,) = await start(broker, (await take(broker)).deliveries, ONE)
                await settle_all(broker, Ack(first.tag))
                revoked = await take_one(broker)
                await start(broker, [revoked], ONE, ends=True)
                await settle_all(broker, Ack(revoked.tag))
                called = await take_one(broker)
                assert texts(await start(broker, [called], ONE)) == ["c"]
                await broker.publish(outgoing("d"))  # nobody waits for it
                await start(broker, [await take_one(broker)], ONE, ends=True)
                assert not (await take(broker)).deliveries

        run(scenario())

    @kept
    def test_a_limit_that_was_changed_holds_at_once(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with under_test.open() as broker:
                await broker.publish(outgoing("a", "b", "c", "d"))
                started = await start(broker, (await take(broker)).deliveries, TWO)
                await broker.publish(outgoing("e"))
                assert await start(broker, [await take_one(broker)], ONE) == []
                await settle_all(broker, Ack(started[0].tag))
                assert not (await take(broker)).deliveries  # one is at work, and one is the limit
                await settle_all(broker, Ack(started[1].tag))
                assert len((await take(broker)).deliveries) == 1

        run(scenario())

    @kept
    def test_a_rate_is_kept_and_who_waits_is_due_at_its_time(self, under_test: BrokerUnderTest) -> None:
        rate = Rate("10/s")

        async def scenario() -> list[float]:
            async with under_test.open() as broker:
                await broker.publish(outgoing(*(str(number) for number in range(12))))
                started: list[float] = []
                order: list[str] = []

                async def all_started() -> bool:
                    claimed = (await take(broker)).deliveries
                    now = time.time()
                    running = await start(broker, claimed, rate.terms)
                    started.extend([now] * len(running))
                    order.extend(texts(running))
                    await settle_all(broker, *(Ack(one.tag) for one in running))
                    if not running:
                        await broker.wait_ready([QUEUE], LONG_S)
                    return len(started) == 12

                await eventually(all_started, what="the start of all")
                assert order[0] == "0"
                assert sorted(order, key=int) == [str(number) for number in range(12)]
                return started

        started = run(scenario())
        assert started[-1] - started[0] >= 10 * 0.11 - 0.06  # its pace, but for the slack and the last step
        for first in started:
            assert sum(first <= one < first + 0.9 for one in started) <= 10

    @kept
    def test_what_waits_for_a_rate_wakes_a_worker_when_it_is_due(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with under_test.open() as broker:
                await broker.publish(outgoing("a", "b"))
                rate = Rate("1/s").terms
                await start(broker, (await take(broker)).deliveries, rate)
                assert await depth(broker) == Depth(0, 1, 1)
                asked_at = asyncio.get_running_loop().time()
                await broker.wait_ready([QUEUE], LONG_S)
                assert asyncio.get_running_loop().time() < asked_at + LONG_S
                (due,) = await take_in_time(broker, 1, what="the one that waited")
                assert await start(broker, [due], rate) == [due]

        run(scenario())

    @kept
    def test_an_empty_bucket_leaves_what_waits_behind_its_first(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with under_test.open() as broker:
                await broker.publish(outgoing("a", "b", "c"))
                assert texts(await start(broker, (await take(broker)).deliveries, SLOW)) == ["a"]
                assert await depth(broker) == Depth(0, 1, 1, limited=1)
                await broker.publish(outgoing("d"))
                assert await start(broker, (await take(broker)).deliveries, SLOW) == []
                assert await depth(broker) == Depth(0, 1, 1, limited=2)

        run(scenario())

    @kept
    def test_what_waits_is_purged_with_its_queue_and_no_other(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with under_test.open() as broker:
                await broker.publish([*outgoing("a", "b", "c"), *outgoing("d", queue="other")])
                held = (await take(broker, queues=(QUEUE, "other"))).deliveries
                (first,) = await start(broker, sorted(held, key=lambda one: one.message.body), ONE)
                assert await depth(broker, "other") == Depth(0, 0, 0, limited=1)
                assert await broker.purge(QUEUE) == 2
                assert await broker.queues() == {QUEUE: Depth(0, 0, 1), "other": Depth(0, 0, 0, limited=1)}
                await settle_all(broker, Ack(first.tag))
                assert texts((await take(broker, queues=("other",))).deliveries) == ["d"]

        run(scenario())

    @kept
    def test_what_waits_in_a_paused_queue_keeps_nobody_waiting(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with under_test.open() as broker:
                held: list[Delivery] = []
                for text in ("holds", "a1", "a2", "next", "last"):
                    queue = "a" if text[1:].isdigit() else QUEUE
                    await broker.publish(outgoing(text, queue=queue))
                    held += (await take(broker, queues=(queue,))).deliveries
                assert texts(await start(broker, held, ONE)) == ["holds"]
                await broker.pause("a", Pause(1.0))
                await settle_all(broker, Ack(held[0].tag))
                called = (await take(broker, queues=("a", QUEUE))).deliveries
                assert texts(await start(broker, called, ONE)) == ["next"]
                assert await depth(broker) == Depth(0, 0, 1, limited=1)
                assert await depth(broker, "a") == Depth(2, 0, 0, paused=True)
                await broker.resume("a")
                back = (await take(broker, queues=("a",))).deliveries
                assert texts(back) == ["a1", "a2"]
                assert await start(broker, back, ONE) == []
                assert await depth(broker, "a") == Depth(0, 0, 0, limited=2)

        run(scenario())

    @kept
    def test_who_waits_leaves_nothing_of_its_signature_with_its_worker(
        self, under_test: BrokerUnderTest
    ) -> None:
        async def scenario() -> None:
            async with under_test.open(remembers_signatures=True) as broker:
                await broker.publish(outgoing("a", "b"))
                held = (await take(broker)).deliveries
                await broker.spend([Spend(one.tag, one.message.correlation_id, FAR, FAR) for one in held])
                (first,) = await start(broker, held, ONE)
                assert list(marks_of(broker)) == [first.tag]
                await settle_all(broker, Ack(first.tag))
                called = await take_one(broker)
                assert not await broker.spend([Spend(called.tag, held[1].message.correlation_id, FAR, FAR)])
                assert await start(broker, [called], ONE) == [called]
                await settle_all(broker, Ack(called.tag))
                assert not marks_of(broker)

        run(scenario())

    @kept
    def test_a_claim_that_has_ended_is_not_started(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with (
                under_test.open(lease_s=SHORT_LEASE_S) as dead,
                under_test.open(lease_s=SHORT_LEASE_S) as peer,
            ):
                await peer.publish(outgoing("a"))
                held = (await take(dead)).deliveries
                await lose(peer, held, holder=dead)
                again = await take_one(peer, owner=PEER)
                assert await dead.permit([Permit(held[0].tag, "a", "t:k", ONE)]) == {held[0].tag: None}
                assert (await dead.settle([Return(held[0].tag)])).conflicts == {held[0].tag}
                assert await start(peer, [again], ONE) == [again]

        run(scenario())
