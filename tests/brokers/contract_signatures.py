"""What every broker promises about signatures: each is used by one message, however often it is delivered."""

import asyncio
import time

from tests.brokers.contract_verdicts import lose, settle_all
from tests.brokers.under_test import (
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
)
from umbel.brokers.interface import Ack, Broker, Bury, Delivery, Return, Spend
from umbel.protocol.delivery.trust import Doubt, Doubted, Signed
from umbel.wire.message import Outgoing
from umbel.wire.signing import Keyring

MARK = "0123456789abcdef" * 2
KEYRING = Keyring([("one", b"k" * 32)])
STRICT = {"remembers_signatures": True}


async def is_copy(broker: Broker, delivery: Delivery, mark: str = MARK) -> bool:
    copies = await broker.spend([Spend(delivery.tag, mark, time.time() + 600)])
    assert copies <= {delivery.tag}
    return bool(copies)


class SignaturesContract:
    @needs("signatures")
    def test_a_copy_is_refused_beside_its_original_and_after_it(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with under_test.open(**STRICT) as broker, under_test.open(**STRICT) as peer:
                await broker.publish(outgoing("a", "a", "a"))
                first, second = (await take(broker, 2)).deliveries
                third = await take_one(peer, owner=PEER)
                marks = [Spend(one.tag, MARK, time.time() + 600) for one in (first, second)]
                assert await broker.spend(marks) == {second.tag}
                assert await is_copy(peer, third)
                await settle_all(broker, Bury(second.tag, "copy"))  # the end of a copy ends nothing else
                assert await is_copy(peer, third)
                await settle_all(broker, Ack(first.tag))
                assert await is_copy(peer, third)
                await broker.publish(outgoing("a", "b"))
                late, other = (await take(broker, 2)).deliveries
                assert await is_copy(broker, late)
                assert not await is_copy(broker, other, "f" * 32)
                await settle_all(broker, Bury(other.tag, "dead"))
                assert await is_copy(peer, third, "f" * 32)

        run(scenario())

    @needs("signatures")
    def test_a_copy_is_refused_in_a_broker_that_has_nothing_else(self, under_test: BrokerUnderTest) -> None:
        """It may then be given the number, or the place, that its original had."""

        async def scenario() -> None:
            async with under_test.open(**STRICT) as broker:
                for ending in (Ack, lambda tag: Bury(tag, "why"), lambda tag: Bury(tag, "copy")):
                    await broker.publish(outgoing("a"))
                    delivery = await take_one(broker)
                    assert await is_copy(broker, delivery) is (ending is not Ack)
                    await settle_all(broker, ending(delivery.tag))

        run(scenario())

    @needs("signatures")
    def test_a_message_that_comes_back_is_no_copy(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with under_test.open(**STRICT) as broker, under_test.open(**STRICT) as peer:
                await broker.publish(outgoing("a"))
                for verdict in ({}, {"ran": True}, {"charged": 1}, {"not_before": time.time() + 0.2}):
                    delivery = await take_one(broker)
                    assert not await is_copy(broker, delivery)
                    await settle_all(broker, Return(delivery.tag, **verdict))
                (delivery,) = await take_in_time(broker, 1, what="the parked message")
                assert not await is_copy(broker, delivery)
                assert await broker.forget_owner(OWNER) == 1
                delivery = await take_one(peer, owner=PEER)
                assert not await is_copy(peer, delivery)
                await settle_all(peer, Ack(delivery.tag))

        run(scenario())

    @needs("signatures")
    def test_a_message_of_a_dead_owner_is_no_copy_but_one_of_its_copies_is(
        self, under_test: BrokerUnderTest
    ) -> None:
        async def scenario() -> None:
            async with (
                under_test.open(lease_s=SHORT_LEASE_S, **STRICT) as dead,
                under_test.open(lease_s=SHORT_LEASE_S, **STRICT) as peer,
            ):
                await dead.publish(outgoing("a"))
                held = (await take(dead, 1)).deliveries
                assert not await is_copy(dead, held[0])
                await lose(peer, held, holder=dead)
                again = await take_one(peer, owner=PEER)
                assert not await is_copy(peer, again)
                await peer.publish(outgoing("a"))
                assert await is_copy(peer, await take_one(peer, owner=PEER))

        run(scenario())

    @needs("signatures")
    def test_of_two_that_use_a_signature_at_once_one_has_it(self, under_test: BrokerUnderTest) -> None:
        """And the end of the other ends nothing else: what comes back from the first user is no copy."""

        async def scenario() -> None:
            async with under_test.open(**STRICT) as broker, under_test.open(**STRICT) as peer:

                async def next_one() -> tuple[Broker, Delivery] | None:
                    for one, owner in ((broker, OWNER), (peer, PEER)):
                        if found := (await take(one, 1, owner=owner)).deliveries:
                            return one, found[0]
                    return None

                for number in range(20):
                    mark = f"{number:032}"
                    await broker.publish(outgoing("a", "a"))
                    both = [await eventually(next_one, what="a message") for _ in range(2)]
                    copies = await asyncio.gather(*(is_copy(*one, mark) for one in both))
                    assert sorted(copies) == [False, True]
                    (user, first), (other, copy) = both if copies[1] else both[::-1]
                    await settle_all(other, Bury(copy.tag, "copy"))
                    await settle_all(user, Return(first.tag, ran=True))
                    user, again = await eventually(next_one, what="the message again")
                    assert not await is_copy(user, again, mark)
                    await settle_all(user, Ack(again.tag))

        run(scenario())

    @needs("signatures")
    def test_dead_letters_are_signed_anew_unless_they_are_forged_or_copies(
        self, under_test: BrokerUnderTest
    ) -> None:
        async def scenario() -> list[Delivery]:
            async with under_test.open(keyring=KEYRING, **STRICT) as broker:
                signed = [KEYRING.sign_task(one, 1000.0) for one in outgoing("dead", "copy")]
                await broker.publish([*signed, *outgoing("forged")])
                dead, copy, forged = await take_in_time(broker, 3, what="the messages")
                reason = Doubted(Doubt.REPLAYED, "why").reason
                burials = [Bury(dead.tag, "why"), Bury(copy.tag, reason), Bury(forged.tag, "why")]
                await settle_all(broker, *burials)
                letters = await broker.dead_letters()
                assert await broker.requeue_dead([one.letter_id for one in letters]) == 3
                return await take_in_time(broker, 3, what="the messages again")

        at = {}
        for delivery in run(scenario()):
            proof, _ = KEYRING.check_task(delivery.message, delivery.queue)
            at[delivery.message.body] = proof.at if isinstance(proof, Signed) else None
        assert at[b"forged"] is None
        assert at[b"copy"] == 1000.0
        assert (at[b"dead"] or 0.0) > 1_000_000.0

    @needs("signatures")
    def test_a_signature_survives_the_way_through_the_broker(self, under_test: BrokerUnderTest) -> None:
        """Through a parked and a returned message too, whatever the headers are."""

        async def scenario() -> None:
            async with under_test.open(**STRICT) as broker:
                headers = '{"task": "t", "timelimit": [1.5, null], "x": {"ä": [1e3, 123456789012345678901]}}'
                plain = outgoing("a")[0].message
                odd = Outgoing(
                    QUEUE, type(plain)(headers.encode(), b"\xff\x00", "application/data", "binary")
                )
                signed = KEYRING.sign_task(odd, time.time())
                await broker.publish([signed])
                delivery = await take_one(broker)
                await settle_all(broker, Return(delivery.tag, ran=True, not_before=time.time() + 0.1))
                (delivery,) = await take_in_time(broker, 1, what="the parked message")
                await settle_all(broker, Return(delivery.tag, charged=1))
                delivery = await take_one(broker)
                proof, _ = KEYRING.check_task(delivery.message, delivery.queue)
                assert isinstance(proof, Signed)

        run(scenario())
