"""What every broker promises about things it says no to (N2): they end alone."""

import asyncio
import re
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from tests.brokers.under_test import (
    LONG_S,
    OWNER,
    QUEUE,
    BrokerUnderTest,
    message,
    needs,
    outgoing,
    read_results,
    result,
    run,
    take,
    take_in_time,
    take_one,
    texts,
)
from tests.servers.redis import ask_redis
from umbel.brokers.interface import Ack, Attempt, Bury, Refused, Resend, Return
from umbel.brokers.registry import open_async_producer
from umbel.errors import BrokerRefused
from umbel.wire.message import Outgoing


def refusing_queue(under_test: BrokerUnderTest) -> str:
    """A queue that this broker lets nobody write to, however often it is tried."""
    url = under_test.settings.url
    match under_test.capabilities.transport:
        case "sqlite":
            with closing(sqlite3.connect(Path(url.removeprefix("sqlite:///")))) as db, db:
                db.execute(
                    "CREATE TRIGGER IF NOT EXISTS no BEFORE INSERT ON messages WHEN NEW.queue = 'closed'"
                    " BEGIN SELECT RAISE(ABORT, 'closed for repairs'); END"
                )
            return "closed"
        case "redis":
            ask_redis(url, "SET", "closed", "no list")
            return "closed"
        case "gcpubsub":
            return "no"  # too short a name
        case transport:
            assert transport == "amqp"
            return "amq.closed"


def reserved_names(under_test: BrokerUnderTest) -> list[str]:
    """Some names of each kind that this broker reserves."""
    return [name.replace("*", "starts") for name in under_test.capabilities.reserved][:4]


class RefusalsContract:
    def test_a_refused_follow_up_ends_alone_among_the_dead_letters(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with under_test.open() as broker:
                closed = refusing_queue(under_test)
                await broker.publish(outgoing("a", "b", "c"))
                one, two, three = (await take(broker, 3)).deliveries
                bad = outgoing("bad", queue=closed)
                settled = await broker.settle(
                    [
                        Ack(one.tag, (), outgoing("after a")),
                        Ack(two.tag, (), [*outgoing("first"), *bad, *outgoing("last")]),
                        Ack(three.tag, (), outgoing("after c")),
                    ]
                )
                assert (settled.applied, settled.conflicts) == (3, frozenset())
                (refused,) = settled.refused
                assert refused.part == bad[0] and refused.reason
                found = await take_in_time(broker, 4, what="everything else")
                assert sorted(texts(found)) == ["after a", "after c", "first", "last"]
                (letter,) = await broker.dead_letters()
                assert (letter.queue, letter.message.body) == (closed, bad[0].message.body)
                assert letter.reason
                # Nothing is held any more, and nothing is applied a second time.
                assert (await broker.settle([Ack(two.tag, (), outgoing("again"))])).conflicts == {two.tag}
                await broker.settle([Ack(one.tag) for one in found])
                assert not (await take(broker, 9)).deliveries

        run(scenario())

    def test_a_buried_message_and_a_returned_one_are_settled_beside_a_refused_follow_up(
        self, under_test: BrokerUnderTest
    ) -> None:
        async def scenario() -> None:
            async with under_test.open() as broker:
                closed = refusing_queue(under_test)
                await broker.publish(outgoing("buried", "returned"))
                one, two = (await take(broker, 2)).deliveries
                settled = await broker.settle(
                    [
                        Bury(one.tag, "no use", False, (), outgoing("bad", queue=closed)),
                        Return(two.tag),
                    ]
                )
                assert [part.part.queue for part in settled.refused if isinstance(part.part, Outgoing)] == [
                    closed
                ]
                letters = {letter.queue: letter.reason for letter in await broker.dead_letters()}
                assert letters[QUEUE] == "no use" and letters[closed]
                assert texts([await take_one(broker)]) == ["returned"]

        run(scenario())

    def test_publishing_what_is_refused_names_the_queue_and_sends_nothing_else(
        self, under_test: BrokerUnderTest
    ) -> None:
        async def scenario() -> None:
            async with under_test.open() as broker:
                closed = refusing_queue(under_test)
                with pytest.raises(BrokerRefused, match=closed):
                    await broker.publish(outgoing("bad", queue=closed))
                with pytest.raises(BrokerRefused, match=closed):
                    under_test.producer().publish(outgoing("bad", queue=closed))
                under_test.producer().publish(outgoing("good"))
                assert texts([await take_one(broker)]) == ["good"]

        run(scenario())

    def test_a_queue_whose_name_is_reserved_is_refused_whoever_sends_there(
        self, under_test: BrokerUnderTest
    ) -> None:
        """Umbel's own data would be spoilt, or the task would wait for ever."""
        later = time.time() + 600

        async def scenario() -> None:
            producer, awaited = under_test.producer(), open_async_producer(under_test.settings)
            async with under_test.open() as broker:
                await take(broker)  # it makes all that a broker of ours makes
                for name in reserved_names(under_test):
                    why = f"the queue '{re.escape(name)}' is reserved .*: use a queue with another name"
                    for not_before in (0.0, later):
                        bad = outgoing("bad", queue=name, not_before=not_before)
                        for batch in (bad, [*outgoing("good"), *bad]):
                            for sending in (
                                asyncio.to_thread(producer.publish, batch),
                                broker.publish(batch),
                                awaited.publish(batch, Attempt()),
                            ):
                                with pytest.raises(BrokerRefused, match=why) as refused:
                                    await sending
                                assert refused.value.places == ()  # nothing of the batch was sent
                    with pytest.raises(BrokerRefused, match=why):
                        await broker.purge(name)
                    for source, target in ((QUEUE, name), (name, QUEUE)):
                        with pytest.raises(BrokerRefused, match=why):
                            await broker.move(source, target, 5)
                assert not (await take(broker)).deliveries
                assert await broker.dead_letters() == []
            await awaited.close()

        run(scenario())

    def test_a_follow_up_to_a_reserved_queue_ends_alone_and_can_be_retried_nowhere(
        self, under_test: BrokerUnderTest
    ) -> None:
        async def scenario() -> None:
            async with under_test.open() as broker:
                for name in reserved_names(under_test):
                    await broker.publish(outgoing("a"))
                    delivery = await take_one(broker)
                    bad = [*outgoing("bad", queue=name), *outgoing("later", queue=name, not_before=4e9)]
                    settled = await broker.settle([Ack(delivery.tag, (), [*bad, *outgoing("good")])])
                    assert (settled.applied, settled.conflicts) == (1, frozenset())
                    assert {one.part for one in settled.refused} == set(bad)
                    assert all("is reserved" in one.reason for one in settled.refused)
                    good = await take_one(broker)
                    assert texts([good]) == ["good"]
                    await broker.settle([Ack(good.tag)])
                    letters = await broker.dead_letters()
                    assert sorted(letter.queue for letter in letters) == [name] * 2
                    with pytest.raises(BrokerRefused, match="is reserved"):
                        await broker.requeue_dead([letter.letter_id for letter in letters])
                    if under_test.capabilities.failures:
                        again = [Resend(one, Outgoing(name, one.message)) for one in letters]
                        resent = await broker.resend(again)
                        assert not resent.sent and all(
                            "is reserved" in why for why in resent.refused.values()
                        )
                    assert len(await broker.dead_letters()) == 2
                    assert await broker.drop_dead([letter.letter_id for letter in letters]) == 2

        run(scenario())

    @needs("leases")
    def test_a_leader_that_sends_to_a_reserved_queue_sends_all_else(
        self, under_test: BrokerUnderTest
    ) -> None:
        async def scenario() -> None:
            async with under_test.open() as broker:
                for name in reserved_names(under_test)[:1]:
                    reply = await broker.coordination.acquire_lease("l", "me", ttl_s=LONG_S)
                    batch = [*outgoing("bad", queue=name), *outgoing("good")]
                    assert await broker.coordination.fenced_publish("l", "me", reply.term, batch)
                    assert texts([await take_one(broker)]) == ["good"]
                    (letter,) = await broker.dead_letters()
                    assert letter.queue == name and "is reserved" in letter.reason

        run(scenario())

    def test_what_no_queue_takes_can_be_buried_and_requeued(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with under_test.open() as broker:
                await broker.bury([Refused(outgoing("t")[0], "no queue takes it"), Refused(result("t"), "")])
                (letter,) = await broker.dead_letters()
                assert (letter.queue, letter.reason, letter.starts) == (QUEUE, "no queue takes it", 0)
                assert await broker.requeue_dead([letter.letter_id]) == 1
                assert texts([await take_one(broker)]) == ["t"]

        run(scenario())

    def test_a_message_of_any_bytes_can_be_buried(self, under_test: BrokerUnderTest) -> None:
        """N1: what cannot be read ends with a reason."""

        async def scenario() -> None:
            async with under_test.open() as broker:
                await broker.publish(outgoing("a", "b"))
                one, two = (await take(broker, 2)).deliveries
                results = [result("t2")] if broker.capabilities.stores_results else []
                reason = "corrupt: \x1b[31m\x00 \N{SNOWMAN}"
                settled = await broker.settle([Bury(one.tag, reason), Ack(two.tag, results)])
                assert not settled.refused and not settled.conflicts
                assert [letter.reason for letter in await broker.dead_letters()] == [reason]

        run(scenario())

    @needs("leases")
    def test_a_leader_that_sends_what_is_refused_goes_on(self, under_test: BrokerUnderTest) -> None:
        """A periodic task with a queue that takes nothing must not stop the schedule."""

        async def scenario() -> None:
            async with under_test.open() as broker:
                closed = refusing_queue(under_test)
                store = broker.coordination
                lease = await store.acquire_lease("beat", OWNER, ttl_s=LONG_S)
                batch = [*outgoing("bad", queue=closed), *outgoing("good")]
                assert await store.fenced_publish("beat", OWNER, lease.term, batch, data=b"marks")
                assert (await store.read_lease("beat")).data == b"marks"
                assert texts([await take_one(broker)]) == ["good"]
                assert [letter.queue for letter in await broker.dead_letters()] == [closed]

        run(scenario())

    def test_results_are_stored_beside_a_refused_follow_up(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            backend = under_test.backend()
            address = getattr(backend, "reply_to", "")
            async with under_test.open() as broker:
                closed = refusing_queue(under_test)
                await broker.publish(outgoing("a", reply_to=address))
                delivery = await take_one(broker)
                settled = await broker.settle(
                    [Ack(delivery.tag, [result("t1")], outgoing("bad", queue=closed))]
                )
                if not broker.capabilities.stores_results:
                    assert len(settled.refused) == 2
                    return
                assert len(settled.refused) == 1
                assert read_results(backend, ["t1"])["t1"].status == "SUCCESS"

        run(scenario())

    def test_a_message_for_an_exchange_that_reaches_no_queue_is_refused(
        self, under_test: BrokerUnderTest
    ) -> None:
        astray = Outgoing("", message("astray"), exchange="nowhere", routing_key="k")

        async def scenario() -> None:
            producer = under_test.producer()
            async with under_test.open() as broker:
                with pytest.raises(BrokerRefused, match="nowhere"):
                    await broker.publish([*outgoing("with it"), astray])
                with pytest.raises(BrokerRefused, match="nowhere"):
                    producer.publish([astray])
                await broker.publish(outgoing("a"))
                delivery = (await take(broker)).deliveries[-1]
                settled = await broker.settle([Ack(delivery.tag, (), [astray, *outgoing("next")])])
                assert (settled.applied, [one.part for one in settled.refused]) == (1, [astray])
                assert texts((await take(broker)).deliveries) == ["next"]
                (letter,) = await broker.dead_letters()
                assert (letter.queue, letter.message.exchange) == ("", "nowhere")

        run(scenario())
