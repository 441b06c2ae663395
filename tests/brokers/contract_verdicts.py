"""What every broker promises about ownership and verdicts: who holds a message, and how it ends."""

import asyncio
import time
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from tests.brokers.under_test import (
    LONG_S,
    OWNER,
    PEER,
    QUEUE,
    SHORT_LEASE_S,
    BrokerUnderTest,
    address_of,
    eventually,
    message,
    outgoing,
    read_results,
    result,
    run,
    take,
    take_in_time,
    take_one,
    texts,
)
from umbel.brokers.interface import Ack, Broker, Bury, Delivery, Return, Started, Verdict
from umbel.wire.message import Outgoing


async def settle_all(broker: Broker, *verdicts: Verdict) -> None:
    settled = await broker.settle(verdicts)
    assert (settled.applied, settled.conflicts) == (len(verdicts), frozenset())


async def lose(broker: Broker, deliveries: Sequence[Delivery], *, holder: Broker | None = None) -> None:
    """Let the owner of these fall silent until a peer takes them from it.

    Where the connection is the lease, no peer can: there the holder's own broker puts it out.
    """
    count = 0
    reaper = holder if holder is not None and "ownership" in broker.capabilities.reasons else broker

    async def returned() -> bool:
        nonlocal count
        count += await reaper.return_lost()
        return count == len(deliveries)

    await eventually(returned, what="the return of a silent owner's messages")


def _is_over(renewed: float) -> bool:
    """Whether a short lease may have ended since then: on a busy machine one does within a few steps."""
    return time.monotonic() - renewed >= SHORT_LEASE_S


class OwnershipContract:
    def test_a_silent_owner_loses_its_messages_and_they_come_back_marked(
        self, under_test: BrokerUnderTest
    ) -> None:
        async def scenario() -> None:
            async with (
                under_test.open(lease_s=SHORT_LEASE_S) as dead,
                under_test.open(lease_s=SHORT_LEASE_S) as peer,
            ):
                await peer.publish(outgoing("a", "b", "c"))
                held = (await take(dead, 2)).deliveries
                await lose(peer, held, holder=dead)
                assert await peer.return_lost() == 0
                again = sorted((await take(peer, owner=PEER)).deliveries, key=lambda one: one.message.body)
                assert texts(again) == ["a", "b", "c"]
                assert [delivery.redelivered for delivery in again] == [True, True, False]
                assert [delivery.starts for delivery in again] == [0, 0, 0]

        run(scenario())

    def test_a_claim_that_has_ended_is_told_from_one_that_stands(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with (
                under_test.open(lease_s=SHORT_LEASE_S) as silent,
                under_test.open(lease_s=SHORT_LEASE_S) as peer,
            ):
                await peer.publish(outgoing("a", "b"))
                held = (await take(silent)).deliveries
                tags = [delivery.tag for delivery in held]
                assert await silent.ended(tags) == frozenset()
                await lose(peer, held, holder=silent)
                assert await silent.ended(tags) == frozenset(tags)
                assert (await silent.settle([Ack(tag) for tag in tags])).conflicts == frozenset(tags)

        run(scenario())

    def test_claiming_alone_brings_back_what_dead_owners_held(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with (
                under_test.open(lease_s=SHORT_LEASE_S) as dead,
                under_test.open(lease_s=SHORT_LEASE_S) as peer,
            ):
                await peer.publish(outgoing("a"))
                await take(dead)

                async def claimed() -> Sequence[Delivery]:
                    return (await take(peer, owner=PEER)).deliveries

                assert texts(await eventually(claimed, what="the dead owner's message")) == ["a"]

        run(scenario())

    def test_an_owner_that_renews_keeps_its_messages_however_long(self, under_test: BrokerUnderTest) -> None:
        lease_s = SHORT_LEASE_S * under_test.pace

        async def scenario() -> None:
            async with (
                under_test.open(lease_s=lease_s) as keeper,
                under_test.open(lease_s=lease_s) as peer,
            ):
                await peer.publish(outgoing("kept") + outgoing("lost", queue="other"))
                held = await take_one(keeper)
                await take(peer, owner="dead@here.3", queues=["other"])
                ends = time.monotonic() + 5 * lease_s

                async def long_over() -> bool:
                    assert await keeper.renew(OWNER)
                    await peer.return_lost()
                    return time.monotonic() > ends

                await eventually(long_over, what="five leases")
                # The dead one's message came back meanwhile: the reaper was at work.
                assert texts((await take(peer, owner=PEER, queues=["other"])).deliveries) == ["lost"]
                await settle_all(keeper, Ack(held.tag))

        run(scenario())

    def test_an_owner_learns_from_renewing_that_its_lease_had_ended(
        self, under_test: BrokerUnderTest
    ) -> None:
        async def scenario() -> None:
            async with under_test.open(lease_s=SHORT_LEASE_S) as broker:
                await broker.publish(outgoing("a"))
                await lose(broker, [await take_one(broker)])
                renewed = time.monotonic()
                assert await broker.renew(OWNER) is False
                assert await broker.renew(OWNER) is True or _is_over(renewed)
                assert not (await take(broker)).lease_ended or _is_over(renewed)  # as it knows

        run(scenario())

    def test_an_owner_learns_from_claiming_that_its_lease_had_ended(
        self, under_test: BrokerUnderTest
    ) -> None:
        async def scenario() -> None:
            async with under_test.open(lease_s=SHORT_LEASE_S) as broker:
                renewed = time.monotonic()
                await broker.renew(OWNER)
                await broker.publish(outgoing("a"))
                claim = await take(broker)
                assert not claim.lease_ended or _is_over(renewed)
                await lose(broker, claim.deliveries)
                renewed = time.monotonic()
                again = await take(broker)
                assert again.lease_ended and texts(again.deliveries) == ["a"]
                await settle_all(broker, Ack(again.deliveries[0].tag))
                await broker.publish(outgoing("b"))
                assert not (await take(broker)).lease_ended or _is_over(renewed)

        run(scenario())

    def test_an_owner_that_stops_returns_what_it_holds_at_once(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with under_test.open() as broker:
                await broker.publish(outgoing("a", "b"))
                await take(broker)
                assert await broker.forget_owner(OWNER) == 2
                assert await broker.forget_owner(OWNER) == 0
                assert texts((await take(broker, owner=PEER)).deliveries) == ["a", "b"]

        run(scenario())

    def test_a_cancelled_claim_leaves_no_message_without_an_owner(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with under_test.open() as broker:
                await broker.publish(outgoing(*map(str, range(20))))
                for _ in range(10):
                    claiming = asyncio.create_task(take(broker, 1))
                    await asyncio.wait([claiming], timeout=0)
                    claiming.cancel()
                    await asyncio.wait([claiming])
                    if not claiming.cancelled():
                        await settle_all(broker, Return(claiming.result().deliveries[0].tag))

                async def all_ready() -> bool:
                    return (await broker.queues())[QUEUE].ready == 20

                if not under_test.capabilities.depths:
                    await take_in_time(broker, 20, what="every message")
                    return
                await eventually(all_ready, what="every message back in the queue")

        run(scenario())


class VerdictsContract:
    def test_an_acknowledged_message_is_gone(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with under_test.open() as broker:
                await broker.publish(outgoing("a", "b"))
                await settle_all(broker, *(Ack(delivery.tag) for delivery in (await take(broker)).deliveries))
                assert not under_test.capabilities.depths or await broker.queues() == {}
                assert await broker.forget_owner(OWNER) == 0

        run(scenario())

    def test_a_returned_message_is_first_in_line(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with under_test.open() as broker:
                await broker.publish(outgoing("a", "b", "c"))
                await settle_all(broker, Return((await take_one(broker)).tag))
                again = await take_in_time(broker, 3, what="the three messages")  # RabbitMQ may be busy
                if "return_order" in under_test.capabilities.reasons:
                    again.sort(key=lambda delivery: texts([delivery]))
                assert texts(again) == ["a", "b", "c"]
                assert (again[0].starts, again[0].redelivered) == (0, False)

        run(scenario())

    def test_what_goes_back_unstarted_is_redelivered_to_nobody(self, under_test: BrokerUnderTest) -> None:
        """Not even in the eyes of another worker; until somebody takes it, and dies with it."""
        if "unstarted" in under_test.capabilities.reasons:
            pytest.skip(under_test.capabilities.reasons["unstarted"])

        async def scenario() -> None:
            async with under_test.open() as broker, under_test.open() as other:
                await broker.publish(outgoing("a", "b", "c"))
                fetched = (await take(broker, 2)).deliveries
                await broker.leave_queue(OWNER, QUEUE)  # which RabbitMQ may have sent the third already
                await settle_all(broker, *(Return(delivery.tag) for delivery in fetched))
                again = await take_in_time(other, 3, owner=PEER, what="the three messages")
                assert {(delivery.starts, delivery.redelivered) for delivery in again} == {(0, False)}
                await other.leave_queue(PEER, QUEUE)
                await settle_all(other, *(Return(delivery.tag) for delivery in again[:1]))
                (third,) = await take_in_time(broker, 1, what="the message that was returned twice")
                assert (third.starts, third.redelivered) == (0, False)
                await broker.leave_queue(OWNER, QUEUE)
                assert await broker.forget_owner(OWNER) == 1  # as if it had died
                (last,) = await take_in_time(other, 1, owner=PEER, what="the message of the dead worker")
                assert last.redelivered

        run(scenario())

    def test_what_an_owner_fetched_and_never_claimed_is_redelivered_to_nobody(
        self, under_test: BrokerUnderTest
    ) -> None:
        """A worker may be stopped between the arrival of a message and its claim."""
        if "unstarted" in under_test.capabilities.reasons:
            pytest.skip(under_test.capabilities.reasons["unstarted"])

        async def scenario() -> None:
            async with under_test.open() as broker, under_test.open() as other:
                assert not (await take(broker)).deliveries
                waiting = asyncio.ensure_future(broker.wait_ready([QUEUE], LONG_S, owner=OWNER))
                await other.publish(outgoing("a"))
                await waiting
                await broker.forget_owner(OWNER)
                (delivery,) = await take_in_time(other, 1, owner=PEER, what="the message")
                assert (delivery.starts, delivery.redelivered) == (0, False)

        run(scenario())

    def test_a_returned_message_can_be_parked_until_it_is_due(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with under_test.open() as broker:
                await broker.publish(outgoing("a"))
                later = time.time() + 0.2 * under_test.pace
                await settle_all(broker, Return((await take_one(broker)).tag, not_before=later))

                async def due() -> Sequence[Delivery]:
                    return (await take(broker)).deliveries

                early = await due()
                assert not early or time.time() >= later  # on a busy machine it may be due by now
                assert texts(early or await eventually(due, what="the parked message")) == ["a"]

        run(scenario())

    def test_starts_are_counted_and_claims_are_not(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with under_test.open() as broker:
                await broker.publish(outgoing("a"))
                counts = []
                for verdict in (
                    lambda tag: [Return(tag)],
                    lambda tag: [Return(tag, ran=True)],
                    lambda tag: [Return(tag, charged=True)],
                    lambda tag: [Started(tag), Return(tag)],
                    lambda tag: [Started(tag), Return(tag, charged=-1, ran=True)],  # cut off by a shutdown
                    lambda tag: [],
                ):
                    delivery = await take_one(broker)
                    counts.append((delivery.starts, delivery.redelivered))
                    await settle_all(broker, *verdict(delivery.tag))
                assert counts == [(0, False), (0, False), (0, True), (1, True), (2, True), (2, True)]

        run(scenario())

    def test_counting_a_start_keeps_the_claim_and_outlives_its_owner(
        self, under_test: BrokerUnderTest
    ) -> None:
        async def scenario() -> None:
            async with under_test.open(lease_s=SHORT_LEASE_S) as broker:
                await broker.publish(outgoing("a"))
                delivery = await take_one(broker)
                await settle_all(broker, Started(delivery.tag))
                assert not (await take(broker)).deliveries
                await broker.forget_owner(OWNER)
                again = await take_one(broker, owner=PEER)
                assert (again.starts, again.redelivered) == (1, True)

        run(scenario())

    def test_a_verdict_on_a_lost_claim_is_refused_and_nothing_of_it_applied(
        self, under_test: BrokerUnderTest
    ) -> None:
        async def scenario() -> None:
            async with under_test.open(lease_s=SHORT_LEASE_S) as late, under_test.open() as peer:
                await late.publish(outgoing("a", "b", "c"))
                held = (await take(late)).deliveries
                await lose(peer, held, holder=late)
                results = (
                    [result(f"of {number}") for number in range(3)]
                    if peer.capabilities.stores_results
                    else []
                )
                again = (await take(peer, owner=PEER)).deliveries
                refused = await late.settle(
                    [
                        Ack(held[0].tag, results[:1], outgoing("follow-up", queue="other")),
                        Bury(held[1].tag, "why", results=results[1:2]),
                        Return(held[2].tag, charged=True),
                        Started(held[0].tag),
                    ]
                )
                assert refused.applied == 0
                assert refused.conflicts == {delivery.tag for delivery in held}
                assert not await peer.dead_letters()
                assert not (await take(peer, owner=PEER, queues=["other"])).deliveries
                assert not under_test.backend().read([one.task_id for one in results])
                await settle_all(peer, *(Return(delivery.tag) for delivery in again))
                assert [delivery.starts for delivery in (await take(peer, owner=PEER)).deliveries] == [
                    0,
                    0,
                    0,
                ]

        run(scenario())

    def test_one_refused_verdict_does_not_hold_up_the_rest_of_its_batch(
        self, under_test: BrokerUnderTest
    ) -> None:
        async def scenario() -> None:
            async with under_test.open() as broker:
                await broker.publish(outgoing("a", "b"))
                one, other = (await take(broker)).deliveries
                await settle_all(broker, Ack(one.tag))
                settled = await broker.settle([Ack(one.tag), Ack(other.tag), Ack(other.tag)])
                assert settled.applied == 1
                assert settled.conflicts == {one.tag, other.tag}

        run(scenario())

    def test_the_same_owner_cannot_settle_its_earlier_claim(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with under_test.open() as broker:
                await broker.publish(outgoing("a"))
                earlier = await take_one(broker)
                await settle_all(broker, Return(earlier.tag))
                now = await take_one(broker)
                assert (await broker.settle([Ack(earlier.tag)])).conflicts == {earlier.tag}
                await settle_all(broker, Ack(now.tag))

        run(scenario())

    def test_results_and_follow_ups_come_with_the_ack(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with under_test.open() as broker:
                backend = under_test.backend()
                await broker.publish(outgoing("a", reply_to=address_of(backend)))
                delivery = await take_one(broker)
                carried = (
                    [result("one"), result("two", "FAILURE")] if broker.capabilities.stores_results else []
                )
                await settle_all(
                    broker, Ack(delivery.tag, carried, outgoing("next") + outgoing("x", queue="other"))
                )
                assert texts((await take(broker)).deliveries) == ["next"]
                assert texts((await take(broker, queues=["other"])).deliveries) == ["x"]
                stored = read_results(backend, [one.task_id for one in carried])
                assert [stored[one.task_id] for one in carried] == carried

        run(scenario())

    def test_the_first_success_of_a_task_stays(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with under_test.open() as broker:
                backend = under_test.backend()
                if not broker.capabilities.stores_results:
                    return
                for status, value in (
                    ("FAILURE", "1"),
                    ("SUCCESS", "2"),
                    ("FAILURE", "3"),
                    ("SUCCESS", "4"),
                ):
                    await broker.publish(outgoing("a", reply_to=address_of(backend)))
                    delivery = await take_one(broker)
                    carried = [result("task", status, value), result(f"after {value}")]
                    await settle_all(broker, Ack(delivery.tag, carried))
                assert read_results(backend, ["after 4"])
                assert backend.read(["task"]) == {"task": result("task", "SUCCESS", "2")}

        run(scenario())

    def test_a_buried_message_is_listed_with_its_reason_and_can_be_requeued_or_dropped(
        self, under_test: BrokerUnderTest
    ) -> None:
        async def scenario() -> None:
            async with under_test.open() as broker:
                before = time.time()
                await broker.publish(outgoing("a", "b", priority=4))
                for delivery in (await take(broker)).deliveries:
                    await settle_all(
                        broker, Started(delivery.tag), Bury(delivery.tag, "it crashed", charged=True)
                    )
                assert not (await take(broker)).deliveries
                letters = await broker.dead_letters()
                assert sorted(letter.message.body for letter in letters) == [b"a", b"b"]
                letter = next(letter for letter in letters if letter.message.body == b"a")
                assert (letter.queue, letter.reason, letter.starts) == (QUEUE, "it crashed", 2)
                assert before - 1 <= letter.buried_at <= time.time() + 1
                assert len(await broker.dead_letters(1)) == 1

                assert await broker.requeue_dead([letter.letter_id]) == 1
                assert await broker.requeue_dead([letter.letter_id]) == 0
                again = await take_one(broker)
                assert again.message.body == letter.message.body
                assert again.message.priority == letter.message.priority
                (left,) = await broker.dead_letters()
                assert left.message.body == b"b"

                assert await broker.drop_dead([letter.letter_id, left.letter_id]) == 1
                assert await broker.drop_dead([left.letter_id]) == 0
                assert not await broker.dead_letters()
                assert not (await take(broker)).deliveries

        run(scenario())

    def test_a_requeued_letter_is_marked_and_its_earlier_starts_are_kept_apart_from_new_ones(
        self, under_test: BrokerUnderTest
    ) -> None:
        """Or it would run as one that never ran, or be a dead letter again at once."""
        headers = b'{"task":"t","id":"a","retries":4}'

        async def scenario() -> None:
            async with under_test.open() as broker:
                await broker.publish([Outgoing(QUEUE, replace(message("a"), headers=headers))])
                delivery = await take_one(broker)
                for earlier in (2, 4):
                    burial = Bury(delivery.tag, "it crashed", charged=True)
                    await settle_all(broker, Started(delivery.tag), burial)
                    (letter,) = await broker.dead_letters()
                    assert letter.starts == 2
                    assert await broker.requeue_dead([letter.letter_id]) == 1
                    delivery = await take_one(broker)
                    assert (delivery.starts, delivery.redelivered) == (0, True)
                    counted = headers[:-1] + b',"umbel_starts":%d}' % earlier
                    assert delivery.message == replace(message("a"), headers=counted)
                # One that never started has nothing to tell but that it may have run.
                await settle_all(broker, Bury(delivery.tag, "rejected"))
                (letter,) = await broker.dead_letters()
                assert await broker.requeue_dead([letter.letter_id]) == 1
                again = await take_one(broker)
                assert (again.starts, again.redelivered, again.message) == (0, True, delivery.message)

        run(scenario())

    def test_burying_can_bring_a_result_and_follow_ups(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with under_test.open() as broker:
                backend = under_test.backend()
                await broker.publish(outgoing("a", reply_to=address_of(backend)))
                delivery = await take_one(broker)
                carried = [result("task", "FAILURE")] if broker.capabilities.stores_results else []
                await settle_all(
                    broker,
                    Bury(delivery.tag, "why", results=carried, follow_ups=outgoing("errback", queue="other")),
                )
                assert list(read_results(backend, [one.task_id for one in carried]).values()) == carried
                assert texts((await take(broker, queues=["other"])).deliveries) == ["errback"]

        run(scenario())
