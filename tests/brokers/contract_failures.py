"""What every broker promises about failures: kept with the verdict, within limits, and retried once."""

import asyncio
from collections.abc import Sequence

from msgspec.structs import replace

from tests.brokers.contract_verdicts import lose
from tests.brokers.under_test import (
    OWNER,
    PEER,
    QUEUE,
    SHORT_LEASE_S,
    BrokerUnderTest,
    eventually,
    message,
    needs,
    outgoing,
    run,
    take,
    take_in_time,
    take_one,
    texts,
)
from umbel.brokers.interface import Ack, Broker, Bury, DeadLetter, Refused, Resend, Return, Started
from umbel.wire.call import read_headers
from umbel.wire.message import Outgoing

MANY = 1000


async def fail(broker: Broker, *names: str) -> Sequence[DeadLetter]:
    """Publish these, and end them as failures; the kept ones, oldest first."""
    await broker.publish(outgoing(*names))
    taken = await take_in_time(broker, len(names), what="the messages")
    settled = await broker.settle([Ack(one.tag, keep=f"{one.message.correlation_id} broke") for one in taken])
    assert (settled.applied, settled.conflicts, settled.refused) == (len(names), frozenset(), ())
    return (await broker.failed(MANY))[::-1]


def ids(letters: Sequence[DeadLetter]) -> list[str]:
    return [one.message.correlation_id for one in letters]


def again(*letters: DeadLetter, queue: str = "again") -> list[Resend]:
    return [Resend(one, Outgoing(queue, message(f"{one.message.correlation_id} again"))) for one in letters]


class FailuresContract:
    @needs("failures")
    def test_a_failure_is_kept_as_it_was_sent_with_its_reason(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with under_test.open() as broker:
                assert await broker.failed(MANY) == []
                first, second = await fail(broker, "a", "b")
                assert (first.message, first.queue, first.reason) == (message("a"), QUEUE, "a broke")
                assert first.failed and first.letter_id != second.letter_id
                assert first.buried_at > 0
                assert ids(await broker.failed(MANY)) == ["b", "a"]
                assert ids(await broker.failed(1)) == ["b"]
                assert ids(await broker.failed(MANY, task_id="a")) == ["a"]
                assert not (await take(broker)).deliveries
                assert await broker.dead_letters() == []

        run(scenario())

    @needs("failures")
    def test_a_failure_is_kept_with_its_starts_and_its_attempt(self, under_test: BrokerUnderTest) -> None:
        headers = b'{"task":"t","id":"a","retries":4,"umbel_starts":3}'  # it was a dead letter before

        async def scenario() -> None:
            async with under_test.open() as broker:
                await broker.publish([Outgoing(QUEUE, replace(message("a"), headers=headers))])
                first = await take_one(broker)
                await broker.settle([Started(first.tag)])
                await broker.settle([Return(first.tag, charged=1, ran=True)])
                (again,) = await take_in_time(broker, 1, what="the redelivered message")
                await broker.settle([Started(again.tag)])
                await broker.settle([Ack(again.tag, keep="it broke")])
                (letter,) = await broker.failed(MANY)
                kept = read_headers(letter.message)
                assert (letter.starts, kept.retries, kept.umbel_starts) == (3, 4, 3)

        run(scenario())

    @needs("failures")
    def test_success_keeps_nothing(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with under_test.open() as broker:
                await broker.publish(outgoing("a"))
                await broker.settle([Ack((await take_one(broker)).tag)])
                assert await broker.failed(MANY) == []

        run(scenario())

    @needs("failures")
    def test_beyond_the_limit_the_oldest_make_room(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with under_test.open(failed_keep=3) as broker:
                await fail(broker, "a", "b")

                async def newest() -> bool:  # RabbitMQ drops when it gets to it
                    return ids(await broker.failed(MANY)) == ["e", "d", "c"]

                await fail(broker, "c", "d", "e")
                await eventually(newest, what="the three newest failures")

        run(scenario())

    @needs("failures")
    def test_after_their_time_they_are_gone(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with under_test.open(failed_keep_s=1.0) as broker:
                await fail(broker, "a")

                async def gone() -> bool:
                    return not await broker.failed(MANY)

                await eventually(gone, what="the end of the failure's time")

        run(scenario())

    @needs("failures")
    def test_a_verdict_whose_claim_has_ended_keeps_nothing(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with (
                under_test.open(lease_s=SHORT_LEASE_S) as dead,
                under_test.open(lease_s=SHORT_LEASE_S) as peer,
            ):
                await peer.publish(outgoing("a"))
                delivery = await take_one(dead)
                await lose(peer, [delivery], holder=dead)
                settled = await dead.settle([Ack(delivery.tag, keep="broken")])
                assert settled.conflicts == {delivery.tag}
                assert await peer.failed(MANY) == []

        run(scenario())

    @needs("failures")
    def test_one_that_was_acknowledged_before_is_kept_too(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with under_test.open() as broker:
                await broker.keep_failed([Refused(one, "broken") for one in outgoing("a", "b")])
                kept = await broker.failed(MANY)
                assert ids(kept) == ["b", "a"]
                assert [(one.queue, one.reason) for one in kept] == [(QUEUE, "broken")] * 2

        run(scenario())

    @needs("failures")
    def test_a_retry_is_sent_and_its_failure_is_gone(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with under_test.open() as broker:
                letters = await fail(broker, "a", "b", "c", "d")
                resent = await broker.resend([Resend(letters[3], None), *again(letters[2], letters[0])])
                assert (resent.sent, resent.refused) == (frozenset({1, 2}), {})
                assert ids(await broker.failed(MANY)) == ["b"]
                claim = await take(broker, queues=["again"])
                assert sorted(texts(claim.deliveries)) == ["a again", "c again"]

        run(scenario())

    @needs("failures")
    def test_a_dead_letter_is_retried_the_same_way(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with under_test.open() as broker:
                await broker.publish(outgoing("a"))
                await broker.settle([Bury((await take_one(broker)).tag, "gave up")])
                (letter,) = await broker.dead_letters()
                (failure,) = await fail(broker, "b")
                resent = await broker.resend(again(letter, failure))
                assert resent.sent == {0, 1}
                assert not await broker.dead_letters() and not await broker.failed(MANY)
                claim = await take(broker, queues=["again"])
                assert sorted(texts(claim.deliveries)) == ["a again", "b again"]

        run(scenario())

    @needs("failures")
    def test_two_who_retry_the_same_send_each_once(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with under_test.open() as one, under_test.open() as other:
                letters = await fail(one, *(f"t{number}" for number in range(30)))
                done = await asyncio.gather(one.resend(again(*letters)), other.resend(again(*letters)))
                assert not done[0].sent & done[1].sent

                async def rest() -> bool:  # what a reader of RabbitMQ holds, another does not see
                    await one.resend(again(*(await one.failed(MANY))))
                    return not await one.failed(MANY)

                await eventually(rest, what="the retry of all")
                claim = await take(one, queues=["again"], owner=PEER)
                assert sorted(texts(claim.deliveries)) == sorted(f"t{n} again" for n in range(30))

        run(scenario())

    @needs("failures")
    def test_what_was_retried_is_not_retried_again(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with under_test.open() as broker:
                letters = await fail(broker, "a", "b")
                assert (await broker.resend(again(*letters))).sent == {0, 1}
                resent = await broker.resend(again(*letters))
                assert (resent.sent, resent.refused) == (frozenset(), {})
                claim = await take(broker, queues=["again"], owner=OWNER)
                assert len(claim.deliveries) == 2

        run(scenario())
