"""What every broker promises to remote control: mailboxes, replies, revokes recorded by workers."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from tests.brokers.under_test import (
    LONG_S,
    OWNER,
    PEER,
    BrokerUnderTest,
    eventually,
    needs,
    outgoing,
    run,
    take,
    texts,
)
from umbel.brokers.interface import Ack, Broadcast, Broker, Delivery
from umbel.errors import RevokesFull
from umbel.wire.control import REPLY_EXCHANGE, REQUEST_EXCHANGE
from umbel.wire.records import Revoke


async def first(count: int, heard: AsyncIterator[Broadcast]) -> list[bytes]:
    async with asyncio.timeout(LONG_S / 2):
        return [(await anext(heard)).body for _ in range(count)]


async def request(broker: Broker, body: bytes) -> int | None:
    return await broker.broadcast([Broadcast(REQUEST_EXCHANGE, "", body)], ttl_s=LONG_S)


class ControlContract:
    @needs("fanout")
    def test_a_request_reaches_the_mailbox_of_every_node(self, under_test: BrokerUnderTest) -> None:
        """P1."""

        async def scenario() -> None:
            async with (
                under_test.open() as broker,
                under_test.open() as other,
                broker.subscribe(REQUEST_EXCHANGE, ["ada@here"]) as one,
                other.subscribe(REQUEST_EXCHANGE, ["bob@here"]) as two,
            ):
                await request(other, b"first")
                sent = [
                    Broadcast(REQUEST_EXCHANGE, "", b"second", b'{"clock":1,"expires":1794703095.8502254}')
                ]
                await asyncio.to_thread(lambda: under_test.producer().broadcast(sent, ttl_s=LONG_S))
                for mailbox in (one, two):
                    heard = aiter(mailbox)
                    assert await first(1, heard) == [b"first"]
                    assert [await anext(heard)] == sent

        run(scenario())

    @needs("fanout")
    def test_who_asks_learns_how_many_heard_it_or_nothing(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with under_test.open() as broker:
                transport = broker.capabilities.transport
                counts = transport == "redis"
                knows_of_none = broker.capabilities.reports_nobody
                assert await request(broker, b"anybody?") == (0 if knows_of_none else None)
                async with (
                    broker.subscribe(REQUEST_EXCHANGE, ["a@x"]),
                    broker.subscribe(REQUEST_EXCHANGE, ["b@x"]),
                ):
                    assert await request(broker, b"both?") == (2 if counts else None)
                if transport == "amqp":  # where mailboxes go with their connections
                    assert await request(broker, b"still?") == 0

        run(scenario())

    @needs("fanout")
    def test_a_reply_reaches_who_asked_and_nobody_else(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with (
                under_test.open() as broker,
                under_test.open() as other,
                broker.subscribe(REPLY_EXCHANGE, ["asker-1"]) as one,
                broker.subscribe(REPLY_EXCHANGE, ["asker-2"]) as two,
            ):
                replies = [
                    Broadcast(REPLY_EXCHANGE, "asker-1", b"for one"),
                    Broadcast(REPLY_EXCHANGE, "nobody", b"for nobody"),
                    Broadcast(REPLY_EXCHANGE, "asker-2", b"for two"),
                ]
                await other.broadcast(replies, ttl_s=LONG_S)
                assert await first(1, aiter(one)) == [b"for one"]
                assert await first(1, aiter(two)) == [b"for two"]

        run(scenario())

    @needs("fanout")
    def test_leaving_a_reply_queue_while_waiting_for_it_takes_no_time(
        self, under_test: BrokerUnderTest
    ) -> None:
        """A question that ends at its deadline must not hold its caller any longer (P7)."""

        async def scenario() -> int:
            asked = 0
            async with under_test.open() as broker, asyncio.timeout(LONG_S / 2):
                for number in range(20):
                    async with broker.subscribe(REPLY_EXCHANGE, [f"asker-{number}"]) as replies:
                        waiting = asyncio.create_task(first(1, aiter(replies)))
                        await request(broker, b"anything")
                        waiting.cancel()
                        await asyncio.wait([waiting])
                        asked += 1
            return asked

        assert run(scenario()) == 20

    def test_a_queue_that_is_left_keeps_its_messages_for_others(self, under_test: BrokerUnderTest) -> None:
        """`cancel_consumer` and `add_consumer`."""

        async def scenario() -> None:
            async with under_test.open() as broker, under_test.open() as other:
                await broker.publish(outgoing("a", "b", "c", queue="left"))
                (first,) = (await take(broker, 1, queues=["left"])).deliveries
                await broker.leave_queue(OWNER, "left")
                await broker.leave_queue(OWNER, "never entered")

                async def taken_elsewhere() -> list[str] | None:
                    found = await take(other, 10, owner=PEER, queues=["left"])
                    rest.extend(found.deliveries)
                    return sorted(texts(rest)) if len(rest) == 2 else None

                rest: list[Delivery] = []
                assert await eventually(taken_elsewhere, what="the others to get them") == ["b", "c"]
                assert not any(delivery.redelivered and delivery.starts for delivery in rest)
                # What was claimed before is still ours to settle, and the queue can be entered again.
                assert (await broker.settle([Ack(first.tag)])).applied == 1
                await other.leave_queue(PEER, "left")
                await other.publish(outgoing("d", queue="left"))

                async def taken_again() -> list[str]:
                    return texts((await take(broker, 10, queues=["left"])).deliveries)

                assert await eventually(taken_again, what="the next message") == ["d"]

        run(scenario())

    @needs("revokes")
    def test_a_worker_records_revokes_as_a_client_does(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with under_test.open(revokes_max=2) as broker, under_test.open() as other:
                now = time.time()
                one, two, three = (Revoke(name, now, now + 3600) for name in "abc")
                await broker.revoke([one, two])
                assert list((await take(other)).revokes) == [one, two]
                await broker.revoke([two])  # known: it needs no room
                with pytest.raises(RevokesFull, match="revokes_max"):
                    await broker.revoke([three])
                claim = await other.claim(OWNER, ["celery"], 1)
                assert {revoke.task_id for revoke in claim.revokes} == {"a", "b"}

        run(scenario())

    @needs("revokes")
    def test_a_revoke_that_is_taken_back_is_told_to_who_knew_it(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with under_test.open(revokes_max=1) as broker, under_test.open() as other:
                now = time.time()
                await broker.revoke([Revoke("a", now, now + 3600)])
                claim = await take(other)
                assert [one.takes_back for one in claim.revokes] == [False]
                await broker.revoke([Revoke("a", now + 1, now + 1)])

                async def news() -> list[Revoke]:
                    found = await other.claim(OWNER, ["celery"], 0, revoked_after=claim.revoked_cursor)
                    return list(found.revokes)

                told = await eventually(news, what="the news")
                assert [(one.task_id, one.takes_back) for one in told] == [("a", True)]

                async def others() -> list[str]:
                    return [one.task_id for one in (await take(broker)).revokes if not one.takes_back]

                assert await others() == []

        run(scenario())
