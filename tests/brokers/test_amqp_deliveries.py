"""What an AMQP worker makes of deliveries: marks of having run, consumers that end, waiting."""

import asyncio

import pytest

from tests.brokers.amqp_worker import ADA, BOB, LEASE_S, Worker, run, skip
from tests.brokers.under_test import eventually
from umbel.brokers.amqp.consumer import Arrived
from umbel.brokers.amqp.envelope import NO_STATE, MessageState
from umbel.brokers.amqp.frames import Method
from umbel.brokers.amqp.handshake import ChannelClosed
from umbel.brokers.amqp.streams import Start, encode_record
from umbel.errors import BrokerUnavailable
from umbel.wire.message import Message

MESSAGE = Message(b'{"retries": 1, "task": "t"}', b"", correlation_id="id")

# -- what is delivered -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("by_server", "ran", "known", "unstarted", "wanted"),
    [
        (False, False, None, False, (0, False)),
        (False, False, Start("b", "id", 5), False, (0, False)),
        (False, False, Start("a", "id", 5, attempt=2), False, (0, False)),  # another attempt
        (False, False, Start("a", "id", 5, attempt=1), False, (5, True)),  # a copy of it runs
        (False, False, Start("a", "id", 0, attempt=1), False, (0, True)),  # or has run
        (False, False, Start("a", "id", 0, attempt=0), False, (0, False)),
        (True, False, None, False, (0, True)),
        (True, False, None, True, (0, False)),  # it was returned, and RabbitMQ knows no more
        (True, False, Start("a", "id", 2), True, (2, True)),
        (True, False, Start("a", "id", 0, attempt=1), True, (0, True)),
        (False, True, None, True, (0, True)),
        (False, True, Start("a", "id", 3), False, (3, True)),
    ],
)
def test_a_delivery_says_whether_it_may_have_run(
    by_server: bool, ran: bool, known: Start | None, unstarted: bool, wanted: tuple[int, bool]
) -> None:
    async def scenario() -> None:
        worker = Worker()
        await worker.take("a", 1)
        if known is not None:
            worker.starts.apply(0, encode_record(known))
        notes = {("a", "id"), ("b", "id")} if unstarted else set[tuple[str, str]]()
        arrived = Arrived(MESSAGE, 7, by_server, MessageState(ran=ran))
        twice = [(worker.consumer("a"), arrived)] * 2
        delivery, copy = worker.claims.deliver(ADA, twice, notes)
        assert (delivery.starts, delivery.redelivered, delivery.queue) == (*wanted, "a")
        claimed = worker.claims.active[delivery.tag]
        assert (claimed.owner, claimed.delivery_tag, claimed.starts) == (ADA, 7, wanted[0])
        assert copy.tag != delivery.tag
        assert copy.redelivered == (by_server or wanted[1])  # one note is for one message

    run(scenario())


# -- consumers that end, pause and wait ------------------------------------------------------------------


def test_a_queue_that_was_deleted_is_told_with_the_claims_on_it() -> None:
    async def scenario() -> None:
        worker = Worker()
        worker.server.put("a", "a0", "a1")
        worker.server.put("b", "b0")
        await worker.take("ab", 3)
        of_a = {tag for tag, one in worker.claims.active.items() if one.consumer.queue == "a"}
        worker.server.consumed["a"].end(ChannelClosed(ChannelClosed.NOT_FOUND, "no queue"))
        assert worker.deleted == [("a", of_a)] and len(of_a) == 2
        assert len(worker.claims.active) == 1

    run(scenario())


def test_a_consumer_that_ended_is_begun_anew_and_its_claims_are_forgotten() -> None:
    async def scenario() -> None:
        worker = Worker()
        worker.server.put("a", "a0")
        worker.server.put("b", "b0")
        await worker.take("ab", 2)
        worker.server.consumed["a"].end(ChannelClosed(ChannelClosed.PRECONDITION, "acknowledgement"))
        assert [one.queue for one in worker.claims.consumers()] == ["b"]
        assert len(worker.claims.active) == 2
        worker.server.put("a", "a1")
        assert await worker.take("ab", 2) == ["a1"]
        assert sorted(one.delivery.message.body for one in worker.claims.active.values()) == [b"a1", b"b0"]
        assert len(worker.server.channels) == 3  # that of b stays

    run(scenario())


async def leave(worker: Worker, owner: str, queue: str) -> None:
    async with worker.claims.leaving(owner, queue, is_busy=False):
        pass


def test_who_leaves_a_queue_is_handed_nothing_more() -> None:
    async def scenario() -> None:
        worker = Worker()
        await worker.take("ab", 2)
        await leave(worker, ADA, "a")
        cancelled = [Method.BASIC_CANCEL in channel.methods for channel in worker.server.channels]
        assert cancelled == [True, False]
        await leave(worker, ADA, "nowhere")
        await leave(worker, BOB, "a")
        worker.server.consumed["b"].end(BrokerUnavailable("gone"))
        await leave(worker, ADA, "b")
        assert Method.BASIC_CANCEL not in worker.server.channels[1].methods

    run(scenario())


def test_a_claim_would_be_served_from_here_when_something_arrived_and_nothing_is_early() -> None:
    async def scenario() -> None:
        worker = Worker()
        arrived = worker.claims.has_arrived
        assert not arrived(ADA, ["a"])
        await worker.take("ab", 1)
        assert not arrived(ADA, ["a", "b"])
        await worker.consumer("a").want(5)
        worker.server.put("a", "a0")
        worker.server.consumed["a"].hand_over()
        assert arrived(ADA, ["a", "b"]) and arrived(ADA, ["a"])
        assert not arrived(ADA, ["b"])
        assert not arrived(ADA, ["a", "never consumed"])
        assert not arrived(BOB, ["a"])
        await worker.consumer("b").want(5)
        worker.server.put("b", "later", mark=MessageState(due=4e9))
        worker.server.consumed["b"].hand_over()
        assert not arrived(ADA, ["a", "b"]) and arrived(ADA, ["a"])
        worker.server.consumed["a"].end(BrokerUnavailable("gone"))
        assert not arrived(ADA, ["a"])

    run(scenario())


def test_arrivals_are_noticed_in_the_queues_that_are_consumed() -> None:
    async def scenario() -> None:
        worker = Worker()
        assert not worker.claims.watches(["a"])
        await worker.take("ab", 1)
        assert worker.claims.watches(["a"]) and worker.claims.watches(["a", "b"])
        assert not worker.claims.watches(["a", "c"])
        worker.server.consumed["a"].end(BrokerUnavailable("gone"))
        assert not worker.claims.watches(["a"])

    run(scenario())


@pytest.mark.parametrize("news", ["message", "early", "end", "link"])
def test_who_waits_is_woken_by_news_of_its_queues(news: str) -> None:
    async def scenario() -> None:
        worker = Worker()
        server = worker.server
        await worker.take("ab", 1)
        await worker.consumer("a").want(5)
        await worker.consumer("b").want(5)
        waiting = asyncio.ensure_future(worker.claims.wait(["a", "never consumed"], LEASE_S))
        server.put("b", "b0")
        server.consumed["b"].hand_over()
        await skip(0)
        assert not waiting.done()
        match news:
            case "message" | "early":
                server.put("a", "a0", mark=MessageState(due=4e9) if news == "early" else NO_STATE)
                server.consumed["a"].hand_over()
            case "end":
                server.consumed["a"].end(BrokerUnavailable("gone"))
            case "link":
                server.error = BrokerUnavailable("gone")
                server.consumed["b"].on_end(server.error)

        async def is_woken() -> bool:
            return waiting.done()

        await eventually(is_woken, what="the end of the wait")
        await worker.claims.wait(["a"], LEASE_S)  # what is here does not wait

    run(scenario())


def test_a_wait_ends_with_its_time() -> None:
    async def scenario() -> None:
        worker = Worker()
        await worker.take("a", 1)
        waiting = asyncio.ensure_future(worker.claims.wait(["a"], 50.0))
        await skip(0.0)  # it has begun
        await skip(40.0)
        assert not waiting.done()
        await skip(11.0)
        await waiting

    run(scenario())
