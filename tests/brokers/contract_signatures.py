"""What every broker promises about signatures: each is used by one message, however often it is delivered.

And about what they are bound to: a broker has one id of its cluster, and makes none by itself.
"""

import asyncio
import time

import pytest
from msgspec.structs import replace

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
from umbel.errors import ConfigurationError, NoClusterId
from umbel.protocol.delivery.trust import ClusterId, Doubt, Signed
from umbel.wire.message import Outgoing
from umbel.wire.signing import Keyring, signer_of

MARK = "0123456789abcdef" * 2
KEYRING = Keyring([("one", b"k" * 32)])
SIGNER = signer_of(KEYRING, "here")
STRICT = {"remembers_signatures": True}
SIGNED = {"keyring": KEYRING, "signing_cluster": "here", **STRICT}
BORN = time.time()


async def is_copy(broker: Broker, delivery: Delivery, mark: str = MARK) -> bool:
    now = time.time()
    copies = await broker.spend([Spend(delivery.tag, mark, now + 600, BORN)])
    assert copies in ({}, {delivery.tag: Doubt.REPLAYED})
    return bool(copies)


class SignaturesContract:
    @needs("signatures")
    def test_a_copy_is_refused_beside_its_original_and_after_it(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with under_test.open(**STRICT) as broker, under_test.open(**STRICT) as peer:
                await broker.publish(outgoing("a", "a", "a"))
                first, second = (await take(broker, 2)).deliveries
                third = await take_one(peer, owner=PEER)
                marks = [Spend(one.tag, MARK, time.time() + 600, BORN) for one in (first, second)]
                assert await broker.spend(marks) == {second.tag: Doubt.REPLAYED}
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
    def test_a_copy_that_comes_back_is_a_copy_while_its_original_runs(
        self, under_test: BrokerUnderTest
    ) -> None:
        """A server may say of both that they are redelivered; the original's claim stands."""

        async def scenario() -> None:
            async with under_test.open(**STRICT) as broker, under_test.open(**STRICT) as third:
                await broker.publish(outgoing("a"))
                original = await take_one(broker)
                assert not await is_copy(broker, original)
                async with under_test.open(**STRICT) as stops:
                    await stops.publish(outgoing("a"))
                    await take_one(stops, owner=PEER)
                    await stops.forget_owner(PEER)
                again = await take_one(third, owner="third")
                assert await is_copy(third, again)
                await settle_all(broker, Return(original.tag))
                both = [await is_copy(broker, await take_one(broker)), await is_copy(third, again)]
                assert both == [False, True]

        run(scenario())

    @needs("signatures")
    def test_dead_letters_are_signed_again_if_a_worker_vouches_for_them(
        self, under_test: BrokerUnderTest
    ) -> None:
        async def scenario() -> tuple[list[Delivery], list[Delivery]]:
            async with under_test.open(**SIGNED) as broker:
                signed = [SIGNER.sign_task(one, 1000.0) for one in outgoing("dead", "copy")]
                await broker.publish([*signed, *outgoing("forged")])
                dead, copy, forged = await take_in_time(broker, 3, what="the messages")
                stored = SIGNER.vouched("why", dead.message, QUEUE, time.time())
                burials = [Bury(dead.tag, stored), Bury(copy.tag, "why"), Bury(forged.tag, "why")]
                await settle_all(broker, *burials)
                letters = await broker.dead_letters()
                assert [one.reason for one in letters] == ["why"] * 3
                assert await broker.requeue_dead([one.letter_id for one in letters]) == 3
                first = await take_in_time(broker, 3, what="the messages again")
                await settle_all(broker, *(Bury(one.tag, "again") for one in first))
                ids = [one.letter_id for one in await broker.dead_letters()]
                assert await broker.requeue_dead(ids, even_if_used=True) == 3
                return first, await take_in_time(broker, 3, what="the messages once more")

        def signed_at(deliveries: list[Delivery]) -> dict[bytes, float | None]:
            proofs = {one.message.body: SIGNER.check_task(one.message, one.queue)[0] for one in deliveries}
            return {body: one.at if isinstance(one, Signed) else None for body, one in proofs.items()}

        first, second = map(signed_at, run(scenario()))
        assert (first[b"copy"], first[b"forged"], second[b"forged"]) == (1000.0, None, None)
        assert min(first[b"dead"] or 0.0, second[b"copy"] or 0.0, second[b"dead"] or 0.0) > 1_000_000.0

    @needs("signatures")
    def test_a_cluster_has_one_id_and_gets_none_by_itself(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            with pytest.raises(NoClusterId, match="umbel cluster-id make"):
                async with under_test.open(keyring=KEYRING, **STRICT):
                    pass
            async with under_test.open(keyring=KEYRING) as client:  # it can still make one
                assert await client.cluster_id() is None
                with pytest.raises(NoClusterId):
                    assert client.signer
                made = ClusterId("here", 1234.5)
                assert await client.keep_cluster_id(made) == made
                assert await client.keep_cluster_id(ClusterId("there", 9.0)) == made
            async with under_test.open(keyring=KEYRING, **STRICT) as worker, under_test.open() as other:
                assert worker.signer is not None and worker.signer.cluster == made
                assert other.signer is None and await other.cluster_id() == made
            with pytest.raises(ConfigurationError, match="'signing_cluster' is 'there'"):
                async with under_test.open(**SIGNED | {"signing_cluster": "there"}):
                    pass

        run(scenario())
        assert under_test.producer().cluster_id() == ClusterId("here", 1234.5)

    @needs("signatures")
    def test_a_worker_whose_settings_name_the_cluster_stores_that(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> ClusterId | None:
            async with under_test.open(**SIGNED | {"remembers_signatures": False}) as client:
                assert await client.cluster_id() is None
            async with under_test.open(**SIGNED):
                pass
            async with under_test.open() as client:
                return await client.cluster_id()

        assert under_test.producer().cluster_id() is None
        before = time.time()
        kept = run(scenario())
        assert kept is not None and kept.id == "here"
        assert before - 60 < kept.since < time.time() + 60

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
                odd = replace(odd, message=replace(odd.message, properties=b'{"app_id":"x"}', priority=3))
                signed = SIGNER.sign_task(odd, time.time())
                await broker.publish([signed])
                delivery = await take_one(broker)
                await settle_all(broker, Return(delivery.tag, ran=True, not_before=time.time() + 0.1))
                (delivery,) = await take_in_time(broker, 1, what="the parked message")
                await settle_all(broker, Return(delivery.tag, charged=1))
                delivery = await take_one(broker)
                proof, _ = SIGNER.check_task(delivery.message, delivery.queue)
                assert isinstance(proof, Signed)

        run(scenario())
