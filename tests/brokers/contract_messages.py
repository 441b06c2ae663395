"""What every broker promises about messages: publishing, order, delay, and looking into queues."""

import asyncio
import time

from msgspec.structs import replace

from tests.brokers.under_test import (
    LONG_S,
    OWNER,
    PEER,
    QUEUE,
    BrokerUnderTest,
    eventually,
    message,
    needs,
    outgoing,
    run,
    take,
    take_in_time,
    texts,
)
from umbel.brokers.interface import Ack, Bury, Depth, Return
from umbel.wire.message import Message, Outgoing, encode_others, others_of


class MessagesContract:
    def test_a_message_arrives_as_it_was_sent(self, under_test: BrokerUnderTest) -> None:
        sent = Message(
            headers=b'{"task": "t", "\xc3\xa4": 1}',
            body=bytes(range(256)),
            content_type="application/x-python-serialize",
            content_encoding="binary",
            priority=3,
            correlation_id="an id",
            reply_to="somewhere",
        )

        async def scenario() -> None:
            async with under_test.open() as broker:
                await broker.publish([Outgoing(QUEUE, sent)])
                (delivery,) = (await take(broker)).deliveries
                assert delivery.message == sent
                assert (delivery.queue, delivery.starts, delivery.redelivered) == (QUEUE, 0, False)

        run(scenario())

    def test_properties_that_mean_nothing_to_us_stay_with_the_message(
        self, under_test: BrokerUnderTest
    ) -> None:
        others = {"app_id": "shop", "type": "order", "message_id": "m1", "user_id": "somebody",
                  "timestamp": 1794703129, "cluster_id": "c"}  # fmt: skip
        sent = replace(message("a"), properties=encode_others(others | {"priority": 9}))

        async def scenario() -> None:
            async with under_test.open() as broker:
                await broker.publish([Outgoing(QUEUE, sent)])
                for verdict in (
                    Return,
                    lambda tag: Return(tag, ran=True),
                    lambda tag: Return(tag, ran=True, not_before=time.time() + 0.3),
                    lambda tag: Bury(tag, "broken"),
                ):
                    (delivery,) = await take_in_time(broker, 1, what="the message")
                    assert others_of(delivery.message) == others
                    await broker.settle([verdict(delivery.tag)])
                (letter,) = await broker.dead_letters()
                assert others_of(letter.message) == others
                await broker.requeue_dead([letter.letter_id])
                (delivery,) = await take_in_time(broker, 1, what="the requeued letter")
                assert others_of(delivery.message) == others
                await broker.settle([Ack(delivery.tag, follow_ups=[Outgoing("next", delivery.message)])])
                (followed,) = (await take(broker, queues=["next"])).deliveries
                assert others_of(followed.message) == others

        run(scenario())

    def test_dead_letters_are_dropped_by_their_ids(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with under_test.open() as broker:
                await broker.publish(outgoing("a", "b", "c"))
                taken = await take_in_time(broker, 3, what="three messages")
                await broker.settle([Bury(one.tag, "broken") for one in taken])
                ids = {one.message.body: one.letter_id for one in await broker.dead_letters()}
                assert await broker.count_dead(100) == len(ids) > await broker.count_dead(1) == 1
                assert await broker.drop_dead([ids[b"a"], ids[b"c"]]) == 2
                (left,) = await broker.dead_letters()
                assert left.message.body == b"b"
                assert await broker.drop_dead([ids[b"a"]]) == 0
                assert await broker.requeue_dead([left.letter_id]) == 1
                assert texts(await take_in_time(broker, 1, what="the letter that was left")) == ["b"]

        run(scenario())

    def test_a_message_that_is_sent_again_is_marked(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with under_test.open() as broker:
                again = [Outgoing(QUEUE, message("alone"), redelivered=True)]
                await broker.publish(again)
                both = [Outgoing(QUEUE, message("a")), Outgoing("other", message("b"), redelivered=True)]
                await broker.publish(both)  # of several queues
                await broker.publish([Outgoing(QUEUE, message("due"), time.time() - 1, redelivered=True)])
                found = (await take(broker, limit=10, queues=[QUEUE, "other"])).deliveries
                marks = {one.message.body: one.redelivered for one in found}
                assert marks == {b"alone": True, b"a": False, b"b": True, b"due": True}

        run(scenario())

    def test_what_was_published_is_there_for_whoever_comes_later(self, under_test: BrokerUnderTest) -> None:
        producer = under_test.producer()
        producer.publish(outgoing("a", "b"))
        producer.close()

        async def scenario() -> list[str]:
            async with under_test.open() as broker:
                return texts((await take(broker)).deliveries)

        assert run(scenario()) == ["a", "b"]

    def test_messages_of_one_priority_come_in_the_order_they_were_sent(
        self, under_test: BrokerUnderTest
    ) -> None:
        async def scenario() -> None:
            async with under_test.open() as broker:
                for text in "abc":
                    await broker.publish(outgoing(text))
                await broker.publish(outgoing("d", "e"))
                assert texts((await take(broker, 2)).deliveries) == ["a", "b"]
                assert texts((await take(broker)).deliveries) == ["c", "d", "e"]

        run(scenario())

    def test_priorities_come_in_the_order_the_broker_declares(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with under_test.open() as broker:
                for priority in (5, 0, 9, 5):
                    await broker.publish(outgoing(str(priority), priority=priority))
                wanted = ["0", "5", "5", "9"]
                if under_test.capabilities.priorities != "0 first":
                    wanted.reverse()
                assert texts((await take(broker)).deliveries) == wanted

        run(scenario())

    def test_a_priority_out_of_range_is_the_nearest_one_in_range(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with under_test.open() as broker:
                for priority in (99, 8, 0, 1):
                    await broker.publish(outgoing(str(priority), priority=priority))
                wanted = ["0", "1", "8", "99"]
                if under_test.capabilities.priorities != "0 first":
                    wanted.reverse()
                assert texts((await take(broker)).deliveries) == wanted

        run(scenario())

    def test_a_claim_takes_no_more_than_asked_and_only_from_its_queues(
        self, under_test: BrokerUnderTest
    ) -> None:
        async def scenario() -> None:
            async with under_test.open() as broker:
                await broker.publish(outgoing("a", "b", "c") + outgoing("x", queue="other"))
                assert texts((await take(broker, 2)).deliveries) == ["a", "b"]
                assert texts((await take(broker)).deliveries) == ["c"]
                assert not (await take(broker)).deliveries

        run(scenario())

    def test_a_full_queue_does_not_starve_another(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with under_test.open() as broker:
                full = [f"full {number}" for number in range(50)]
                await broker.publish(outgoing(*full, queue="full") + outgoing("lone", queue="lone"))
                taken: list[str] = []
                for _ in range(4):
                    taken += texts((await take(broker, 1, queues=("full", "lone"))).deliveries)
                assert "lone" in taken
                assert [text for text in taken if text != "lone"] == full[:3]

        run(scenario())

    def test_an_urgent_message_in_one_queue_goes_before_a_full_other_queue(
        self, under_test: BrokerUnderTest
    ) -> None:
        first, last = (0, 9) if under_test.capabilities.priorities == "0 first" else (9, 0)

        async def scenario() -> None:
            async with under_test.open() as broker:
                await broker.publish(outgoing(*"abcdef", queue="full", priority=last))
                await broker.publish(outgoing("urgent", queue="lone", priority=first))
                assert texts((await take(broker, 1, queues=("full", "lone"))).deliveries) == ["urgent"]

        run(scenario())

    def test_two_claimers_never_get_the_same_message(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with under_test.open() as one, under_test.open() as other:
                await one.publish(outgoing(*map(str, range(200))))
                claims = await asyncio.gather(
                    *(
                        take(broker, 7, owner=owner)
                        for _ in range(20)
                        for broker, owner in ((one, OWNER), (other, PEER))
                    )
                )
                taken = [text for claim in claims for text in texts(claim.deliveries)]
                assert sorted(taken, key=int) == [str(number) for number in range(200)]

        run(scenario())

    @needs("delayed")
    def test_a_message_that_is_not_due_is_not_claimed(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with under_test.open() as broker:
                await broker.publish(outgoing("later", not_before=time.time() + 3600))
                await broker.publish(outgoing("now") + outgoing("past", not_before=time.time() - 3600))
                assert texts((await take(broker)).deliveries) == ["now", "past"]
                if under_test.capabilities.depths:
                    assert (await broker.queues())[QUEUE].delayed == 1

        run(scenario())

    @needs("delayed")
    def test_a_delayed_message_wakes_who_waits_when_it_is_due(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with under_test.open() as broker:
                due = time.time() + 0.3 * under_test.pace
                await broker.publish(outgoing("later", not_before=due))
                taken = texts((await take(broker)).deliveries)
                assert not taken or time.time() >= due  # a busy machine may be late

                async def claimed() -> list[str]:
                    await broker.wait_ready([QUEUE], LONG_S)
                    return texts((await take(broker)).deliveries)

                taken = taken or await eventually(claimed, what="the message", deadline_s=LONG_S / 2)
                assert taken == ["later"]
                assert time.time() >= due

        run(scenario())

    def test_whoever_waits_is_woken_by_a_message(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with under_test.open() as broker:
                waiting = asyncio.create_task(broker.wait_ready([QUEUE, "other"], LONG_S))
                await asyncio.to_thread(under_test.producer().publish, outgoing("a"))
                async with asyncio.timeout(LONG_S / 3):
                    await waiting
                assert texts((await take(broker)).deliveries) == ["a"]

        run(scenario())

    def test_waiting_again_and_again_loses_no_wake_up(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with under_test.open() as broker, asyncio.timeout(LONG_S / 2):
                producer = under_test.producer()
                for number in range(30):
                    waiting = asyncio.create_task(broker.wait_ready([QUEUE], LONG_S))
                    await asyncio.to_thread(producer.publish, outgoing(str(number)))
                    await waiting
                    (delivery,) = (await take(broker)).deliveries
                    await broker.settle([Ack(delivery.tag)])

        run(scenario())

    def test_waiting_ends_at_once_when_a_message_is_there_and_at_the_time_out_when_none_comes(
        self, under_test: BrokerUnderTest
    ) -> None:
        async def scenario() -> None:
            async with under_test.open() as broker, asyncio.timeout(LONG_S / 2):
                await broker.wait_ready([QUEUE], 0.01)
                await broker.publish(outgoing("a"))
                await broker.wait_ready([QUEUE], LONG_S)

        run(scenario())

    def test_waiting_can_be_cancelled_and_takes_nothing(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with under_test.open() as broker:
                waiting = asyncio.create_task(broker.wait_ready([QUEUE], LONG_S))
                waiting.cancel()
                await asyncio.wait([waiting])
                await broker.publish(outgoing("a"))
                assert texts((await take(broker)).deliveries) == ["a"]

        run(scenario())

    @needs("depths")
    def test_depths_tell_ready_delayed_and_claimed_apart(self, under_test: BrokerUnderTest) -> None:
        later = time.time() + 3600 if under_test.capabilities.delayed else 0.0

        async def scenario() -> None:
            async with under_test.open() as broker:
                assert await broker.queues() == {}
                await broker.publish(outgoing("a", "b", "c") + outgoing("x", queue="other"))
                await take(broker, 1)
                await broker.publish(outgoing("later", not_before=later))
                delayed = int(under_test.capabilities.delayed)
                assert await broker.queues() == {
                    QUEUE: Depth(ready=3 - delayed, delayed=delayed, claimed=1),
                    "other": Depth(ready=1, delayed=0, claimed=0),
                }

        run(scenario())

    def test_peeking_takes_nothing(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with under_test.open() as broker:
                await broker.publish(outgoing("a", "b", "c"))
                for _ in range(2):
                    seen = await broker.peek(QUEUE, 2)
                    assert len(seen) == 2 and seen[0].message == message(*texts(seen[:1]))
                    assert "order" in broker.capabilities.reasons or texts(seen) == ["a", "b"]
                taken = texts((await take(broker)).deliveries)
                assert sorted(taken) == ["a", "b", "c"]
                assert "order" in broker.capabilities.reasons or taken == ["a", "b", "c"]

        run(scenario())

    def test_purging_removes_what_waits_and_leaves_what_is_claimed(self, under_test: BrokerUnderTest) -> None:
        later = time.time() + 3600 if under_test.capabilities.delayed else 0.0

        async def scenario() -> None:
            async with under_test.open() as broker:
                await broker.publish(outgoing("a", "b") + outgoing("x", queue="other"))
                await broker.publish(outgoing("later", not_before=later))
                (held,) = (await take(broker, 1)).deliveries
                assert await broker.purge(QUEUE) == 2
                assert await broker.purge(QUEUE) == 0
                assert not (await take(broker)).deliveries
                assert (await broker.settle([Ack(held.tag)])).applied == 1
                assert texts((await take(broker, queues=["other"])).deliveries) == ["x"]

        run(scenario())
