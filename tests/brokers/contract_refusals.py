"""What every broker promises about things it says no to (N2): they end alone."""

import sqlite3
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
from umbel.brokers.interface import Ack, Bury, Refused, Return
from umbel.errors import BrokerRefused
from umbel.wire.message import Outgoing


def refusing_queue(under_test: BrokerUnderTest) -> str:
    """A queue that this broker lets nobody write to, however often it is tried."""
    url = under_test.settings.url
    match under_test.capabilities.transport:
        case "sqlite":
            with closing(sqlite3.connect(Path(url.removeprefix("sqlite:///")))) as db, db:
                db.execute(
                    "CREATE TRIGGER no BEFORE INSERT ON messages WHEN NEW.queue = 'closed'"
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
