"""What every broker promises about queues that are paused, and about messages that are moved."""

import asyncio
import time

import pytest

from tests.brokers.under_test import (
    LONG_S,
    OWNER,
    PEER,
    QUEUE,
    BrokerUnderTest,
    eventually,
    needs,
    outgoing,
    run,
    take,
    take_in_time,
    texts,
)
from umbel.brokers.interface import MOVED_AT_ONCE_MAX, Ack, Broker, Delivery, Depth, Pause, Return, Started
from umbel.errors import BrokerRefused
from umbel.wire.message import Message, Outgoing

OTHER = "other"
MARK = Pause(12.5, ("celery@there",))


class QueueControlContract:
    @needs("pauses")
    def test_a_paused_queue_is_not_claimed_from_until_it_is_resumed(
        self, under_test: BrokerUnderTest
    ) -> None:
        async def scenario() -> None:
            async with under_test.open() as operator, under_test.open() as worker:
                await operator.publish(outgoing("a", "b", "c") + outgoing("x", queue=OTHER))
                (held,) = (await take(worker, 1)).deliveries
                await operator.pause(QUEUE, MARK)
                await known(worker)
                await operator.publish(outgoing("d"))  # senders go on
                both = [QUEUE, OTHER]
                assert texts((await take(worker, queues=both)).deliveries) == ["x"]
                assert (await worker.settle([Ack(held.tag)])).applied == 1
                assert texts((await take(worker, queues=both)).deliveries) == []
                assert texts((await take(worker)).deliveries) == []
                assert await worker.resume(QUEUE) and not await worker.resume(QUEUE)
                got = await take_in_time(worker, 3, what="what waited")
                assert sorted(texts(got)) == ["b", "c", "d"]

        run(scenario())

    @needs("pauses")
    def test_a_pause_outlives_who_set_it_and_holds_for_who_comes_later(
        self, under_test: BrokerUnderTest
    ) -> None:
        async def scenario() -> None:
            async with under_test.open() as operator:
                await operator.pause(QUEUE, Pause(1.0))
                await operator.pause(QUEUE, MARK)
                await operator.publish(outgoing("a"))
            async with under_test.open() as late:
                assert texts((await take(late)).deliveries) == []
                assert await late.paused() == {QUEUE: MARK}
                assert await late.queues() == {QUEUE: Depth(1, 0, 0, paused=True)}
                await late.purge(QUEUE)
                assert await late.queues() == {QUEUE: Depth(0, 0, 0, paused=True)}
                await late.resume(QUEUE)
                assert await late.paused() == {} == await late.queues()

        run(scenario())

    @needs("pauses")
    def test_who_waits_for_a_paused_queue_waits_until_it_is_resumed(
        self, under_test: BrokerUnderTest
    ) -> None:
        """An idle worker neither asks all the time nor is given a message."""

        async def scenario() -> None:
            async with under_test.open() as operator, under_test.open() as worker:
                assert texts((await take(worker)).deliveries) == []
                waiting = asyncio.create_task(worker.wait_ready([QUEUE], LONG_S, owner=OWNER))
                await asyncio.wait([waiting], timeout=0.05)  # most often it is blocked by then
                await operator.pause(QUEUE, MARK)
                await known(worker)
                await operator.publish(outgoing("a"))
                await asyncio.wait([waiting], timeout=0.05)
                assert texts((await take(worker)).deliveries) == []
                waiting.cancel()
                await asyncio.wait([waiting])
                await worker.wait_ready([QUEUE], 0.02, owner=OWNER)  # at its time-out
                assert texts((await take(worker)).deliveries) == []
                for queues in ([QUEUE], [QUEUE, OTHER]):
                    assert texts((await take(worker, queues=queues)).deliveries) == []
                    again = asyncio.create_task(worker.wait_ready(queues, LONG_S, owner=OWNER))
                    await asyncio.wait([again], timeout=0.1)
                    assert not again.done()
                    again.cancel()
                    await asyncio.wait([again])
                assert texts((await take(worker)).deliveries) == []
                taking = asyncio.create_task(take_or_wait(worker))
                await operator.resume(QUEUE)
                await asyncio.wait([taking], timeout=LONG_S / 2)
                assert taking.done() and texts(taking.result()) == ["a"]

        run(scenario())

    @needs("pauses")
    def test_who_hears_of_a_resume_before_it_waits_does_not_wait(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with under_test.open() as operator, under_test.open() as worker:
                assert texts((await take(worker)).deliveries) == []
                await operator.pause(QUEUE, MARK)
                await known(worker)
                assert texts((await take(worker)).deliveries) == []
                await operator.publish(outgoing("a"))
                await operator.resume(QUEUE)

                async def heard() -> bool:
                    return not await worker.paused()

                await eventually(heard, what="the resume to be known")
                waiting = asyncio.create_task(worker.wait_ready([QUEUE], LONG_S, owner=OWNER))
                await asyncio.wait([waiting], timeout=LONG_S / 2)
                assert waiting.done()
                assert texts((await take(worker)).deliveries) == ["a"]

        run(scenario())

    @needs("pauses")
    def test_what_was_fetched_ahead_of_a_pause_goes_back(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            patient = {"lease_s": 2 * LONG_S}  # or they would go back with the lease
            async with under_test.open() as operator, under_test.open(**patient) as worker:
                assert texts((await take(worker, 100)).deliveries) == []  # so many may come
                await operator.publish(outgoing("a", "b", "c"))
                await operator.pause(QUEUE, MARK)
                await known(worker)
                assert texts((await take(worker, 100)).deliveries) == []

                async def all_wait() -> bool:
                    return (await operator.queues())[QUEUE] == Depth(3, 0, 0, paused=True)

                await eventually(all_wait, what="all messages in their queue")
                await operator.resume(QUEUE)
                taken = await take_in_time(worker, 3, what="the messages, once more")
                assert [one.redelivered for one in taken] == [False] * 3  # nobody has run them

        run(scenario())

    @needs("pauses")
    def test_a_returned_message_of_a_paused_queue_waits_too(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with under_test.open() as operator, under_test.open() as worker:
                await operator.publish(outgoing("a"))
                (held,) = (await take(worker)).deliveries
                await operator.pause(QUEUE, MARK)
                await known(worker)
                await worker.settle([Return(held.tag)])
                assert texts((await take(worker)).deliveries) == []
                await operator.resume(QUEUE)
                assert texts(await take_in_time(worker, 1, what="the message")) == ["a"]

        run(scenario())

    def test_moved_messages_keep_what_they_are(self, under_test: BrokerUnderTest) -> None:
        later = time.time() + 3600
        full = Message(
            b'{"task": "t", "id": "full", "x": 9007199254740993}',
            b"\x00body",
            "application/x",
            "binary",
            priority=6,
            correlation_id="full",
            reply_to="me",
            expiration_ms=3_600_000,
            properties=b'{"app_id":"shop"}',
        )

        async def scenario() -> None:
            async with under_test.open() as sender:
                await sender.publish([*outgoing("a", "b"), Outgoing(QUEUE, full)])
                await sender.publish(outgoing("late", not_before=later))
                await sender.publish(outgoing("there", queue=OTHER))
            async with under_test.open() as operator:
                assert await move_all(operator, QUEUE, OTHER) == 4
            async with under_test.open() as worker:
                taken = {
                    one.message.correlation_id: one for one in (await take(worker, queues=[OTHER])).deliveries
                }
                assert taken["full"].message == full
                assert set(taken) == {"a", "b", "there", "full"}
                assert {one.queue for one in taken.values()} == {OTHER}
                assert list(taken).index("a") < list(taken).index("b")
                if not under_test.capabilities.depths:
                    return
                depths = await worker.queues()
                assert depths == {OTHER: Depth(ready=0, delayed=1, claimed=4)}
                assert await move_all(worker, OTHER, QUEUE) == 1  # where it waits for its time
                assert (await worker.queues())[QUEUE] == Depth(ready=0, delayed=1, claimed=0)

        run(scenario())

    def test_a_move_is_limited_and_leaves_what_is_claimed(self, under_test: BrokerUnderTest) -> None:
        count = MOVED_AT_ONCE_MAX + 20

        async def scenario() -> None:
            async with under_test.open() as worker, under_test.open() as operator:
                await operator.publish(outgoing("held"))
                (held,) = (await take(worker, 1)).deliveries
                await worker.leave_queue(OWNER, QUEUE)
                await operator.publish(outgoing(*(f"{number:04}" for number in range(count))))
                assert await operator.move(QUEUE, OTHER, 3) == 3
                assert 0 < await operator.move(QUEUE, OTHER, count) <= MOVED_AT_ONCE_MAX
                await move_all(operator, QUEUE, OTHER)
                assert await operator.move("nothing", OTHER, 5) == 0
                if under_test.capabilities.depths:
                    depths = await operator.queues()
                    assert depths[OTHER] == Depth(count, 0, 0)
                    assert QUEUE not in depths or depths[QUEUE].ready == 0
                assert (await worker.settle([Ack(held.tag)])).applied == 1
                first = await take(operator, 5, owner=PEER, queues=[OTHER])
                if "order" in under_test.capabilities.reasons:
                    return
                assert texts(first.deliveries) == [f"{number:04}" for number in range(5)]

        run(scenario())

    def test_a_moved_message_that_may_have_run_says_so(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with under_test.open() as worker:
                await worker.publish(outgoing("a"))
                (held,) = (await take(worker)).deliveries
                await worker.settle([Return(held.tag, charged=1, ran=True)])
            async with under_test.open() as operator:
                await eventually(lambda: operator.move(QUEUE, OTHER, 5), what="the returned message")
                (moved,) = (await take(operator, queues=[OTHER])).deliveries
                assert (moved.starts, moved.redelivered, moved.queue) == (1, True, OTHER)

        run(scenario())

    def test_a_moved_message_has_the_starts_and_the_mark_of_redelivery_that_it_had(
        self, under_test: BrokerUnderTest
    ) -> None:
        """There and back, as often as an operator likes."""
        expected = {"new": (0, False), "again": (0, False), "started": (2, True)}

        async def scenario() -> None:
            async with under_test.open() as worker:
                await worker.publish(outgoing("again", "started"))
                tags = {
                    delivery.message.correlation_id: delivery.tag
                    for delivery in (await take(worker, 2)).deliveries
                }
                await worker.leave_queue(OWNER, QUEUE)
                await worker.settle([Started(tags["started"])])
                await worker.settle([Return(tags["again"]), Return(tags["started"], charged=1, ran=True)])
            async with under_test.open() as operator:
                await operator.publish(outgoing("new"))
                for source, target in ((QUEUE, OTHER), (OTHER, QUEUE), (QUEUE, OTHER)):
                    await move_in_time(operator, source, target, 3)
            async with under_test.open() as worker:
                taken = await take_in_time(worker, 3, what="the moved messages", queues=[OTHER])
                found = {
                    delivery.message.correlation_id: (delivery.starts, delivery.redelivered)
                    for delivery in taken
                }
                if "unstarted" in under_test.capabilities.reasons:
                    found["again"] = (0, False)  # this broker may say so, or not
                assert found == expected
                await worker.settle([Ack(delivery.tag) for delivery in taken])
                # The next attempt of the task has the same id, and no starts of its own.
                await worker.publish(outgoing("started"))
                (next_attempt,) = await take_in_time(worker, 1, what="the next attempt")
                assert (next_attempt.starts, next_attempt.redelivered) == (0, False)

        run(scenario())

    def test_what_a_move_leaves_has_the_starts_and_the_mark_of_redelivery_that_it_had(
        self, under_test: BrokerUnderTest
    ) -> None:
        if "unstarted" in under_test.capabilities.reasons:
            pytest.skip(under_test.capabilities.reasons["unstarted"])
        signed = Message(b'{"task":"t","umbel_signature":"1:k:1:0"}', b"s", correlation_id="s")

        async def scenario() -> None:
            async with under_test.open() as worker:
                await worker.publish([*outgoing("a"), Outgoing(QUEUE, signed), *outgoing("b")])
                await worker.publish(outgoing("started", queue=OTHER))
                (first,) = await take_in_time(worker, 1, what="the message", queues=[OTHER])
                await worker.leave_queue(OWNER, OTHER)
                await worker.settle([Started(first.tag)])
                await worker.settle([Return(first.tag, charged=1, ran=True)])
            async with under_test.open() as operator:
                await move_in_time(operator, OTHER, QUEUE, 1)
                assert await operator.move(QUEUE, OTHER, 5) == 1
            async with under_test.open() as worker:
                stayed = await take_in_time(worker, 3, what="the messages that stayed")
                found = {
                    delivery.message.correlation_id: (delivery.starts, delivery.redelivered)
                    for delivery in stayed
                }
                assert found == {"s": (0, False), "b": (0, False), "started": (2, True)}

        run(scenario())

    def test_a_message_that_is_signed_for_its_queue_stays(self, under_test: BrokerUnderTest) -> None:
        signed = Message(b'{"task":"t","umbel_signature":"1:k:1:0"}', b"s", correlation_id="s")

        async def scenario() -> None:
            async with under_test.open() as operator:
                await operator.publish([*outgoing("a"), Outgoing(QUEUE, signed), *outgoing("b")])
                assert await operator.move(QUEUE, OTHER, 5) == 1
                with pytest.raises(BrokerRefused, match="is signed for that queue"):
                    await operator.move(QUEUE, OTHER, 5)
                assert texts(await operator.peek(OTHER, 5)) == ["a"]
                assert texts(await operator.peek(QUEUE, 5)) == ["s", "b"]

        run(scenario())


async def known(worker: Broker) -> None:
    """RabbitMQ tells of a pause some milliseconds after it was set."""

    async def heard() -> bool:
        return QUEUE in await worker.paused()

    await eventually(heard, what="the pause to be known")


async def move_in_time(broker: Broker, source: str, target: str, count: int) -> None:
    """So many messages, of which not all may be back in their queue at once."""
    moved = 0

    async def enough() -> bool:
        nonlocal moved
        moved += await broker.move(source, target, count - moved)
        return moved == count

    await eventually(enough, what=f"{count} messages to move to {target}")


async def move_all(broker: Broker, source: str, target: str) -> int:
    moved = 0
    while portion := await broker.move(source, target, 10_000):
        moved += portion
    return moved


async def take_or_wait(worker: Broker) -> list[Delivery]:
    while True:
        if found := (await take(worker)).deliveries:
            return list(found)
        await worker.wait_ready([QUEUE], LONG_S, owner=OWNER)
