"""Links that heal: what becomes of calls, claims and listeners when RabbitMQ or the way to it fails."""

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.brokers.under_test import (
    OWNER,
    PEER,
    QUEUE,
    BrokerUnderTest,
    eventually,
    outgoing,
    run,
    take,
    take_one,
    texts,
)
from tests.servers.ports import free_ports
from tests.servers.rabbitmq import RabbitServer, amqp_url, shared_server
from tests.servers.way import Way
from tests.waiting import DEADLINE_S
from umbel.brokers.amqp.topology import CAPABILITIES
from umbel.brokers.interface import Ack, Broadcast, Broker, BrokerSettings, Delivery
from umbel.brokers.registry import open_broker, open_producer
from umbel.errors import BadURL, BrokerError, BrokerUnavailable

__all__ = ["amqp_url"]


@pytest.fixture
def under_test(way: Way) -> Iterator[BrokerUnderTest]:
    url = f"amqp://guest:guest@127.0.0.1:{way.port}/{shared_server().new_vhost()}"
    under_test = BrokerUnderTest(BrokerSettings(url, lease_s=2.0, connect_timeout_s=1.0), CAPABILITIES)
    yield under_test
    under_test.close()


async def take_when_it_heals(broker: Broker, *, owner: str = OWNER) -> Sequence[Delivery]:
    async def taken() -> Sequence[Delivery] | None:
        try:
            return (await take(broker, owner=owner)).deliveries or None
        except BrokerError:
            return None

    return await eventually(taken, what="messages over a new link")


def test_after_a_cut_consuming_goes_on_and_old_claims_are_refused(
    way: Way, under_test: BrokerUnderTest
) -> None:
    async def scenario() -> None:
        async with under_test.open() as broker:
            await broker.publish(outgoing("a"))
            held = await take_one(broker)
            assert await broker.renew(OWNER)
            way.cut()
            again = await take_when_it_heals(broker)
            assert texts(again) == ["a"] and again[0].redelivered
            assert (await broker.settle([Ack(held.tag, (), outgoing("never"))])).conflicts == {held.tag}
            assert (await broker.settle([Ack(again[0].tag)])).applied == 1
            assert await broker.queues() == {}

    run(scenario())


def test_an_owner_learns_that_its_link_was_lost_when_it_renews(way: Way, under_test: BrokerUnderTest) -> None:
    async def scenario() -> None:
        async with under_test.open() as broker:
            await broker.renew(OWNER)
            assert await broker.renew(OWNER)
            way.cut()

            async def lost() -> bool:
                try:
                    return not await broker.renew(OWNER)
                except BrokerUnavailable:
                    return False

            await eventually(lost, what="the news that the lease had ended")
            assert await broker.renew(OWNER)

    run(scenario())


def test_whoever_waits_for_messages_is_woken_by_the_end_of_the_link(
    way: Way, under_test: BrokerUnderTest
) -> None:
    async def scenario() -> None:
        async with under_test.open() as broker:
            await take(broker)
            waiting = asyncio.create_task(broker.wait_ready([QUEUE], 4 * DEADLINE_S))
            await asyncio.wait([waiting], timeout=0.05)
            way.cut()
            async with asyncio.timeout(DEADLINE_S):
                await waiting

    run(scenario())


def test_a_black_hole_is_noticed_by_the_heartbeats(way: Way, under_test: BrokerUnderTest) -> None:
    async def scenario() -> None:
        async with under_test.open() as broker:
            await broker.publish(outgoing("a"))
            await take(broker)
            way.silence()
            async with asyncio.timeout(DEADLINE_S):
                with pytest.raises(BrokerUnavailable, match="heartbeats"):
                    await broker.publish(outgoing("b"))
            way.close()
            way.open()
            assert texts(await take_when_it_heals(broker))[:1] == ["a"]

    run(scenario())


def test_five_flaps_in_a_row_are_survived(way: Way, under_test: BrokerUnderTest) -> None:
    async def scenario() -> None:
        async with under_test.open() as broker:
            await broker.publish(outgoing("a", "b"))

            async def cut_off() -> bool:
                try:
                    await broker.publish([])
                except BrokerUnavailable:
                    return True
                return False

            for _ in range(5):
                assert texts(await take_when_it_heals(broker)) == ["a", "b"]
                way.close()
                await eventually(cut_off, what="the end of the link")
                way.open()
            again = await take_when_it_heals(broker)
            assert (await broker.settle([Ack(one.tag) for one in again])).applied == 2

    run(scenario())


def test_a_subscription_listens_again_after_a_cut(way: Way, under_test: BrokerUnderTest) -> None:
    async def scenario() -> None:
        async with under_test.open() as broker, broker.subscribe("celeryev", ["#"]) as subscription:
            heard = asyncio.ensure_future(anext(aiter(subscription)))
            way.cut()

            async def arrived() -> bool:
                try:
                    await broker.broadcast([Broadcast("celeryev", "worker.online", b"{}")], ttl_s=5.0)
                except BrokerError:
                    return False
                return heard.done()

            await eventually(arrived, what="a broadcast after the cut")

    run(scenario())


def test_a_lost_link_loses_the_leases_that_were_held_on_it(way: Way, under_test: BrokerUnderTest) -> None:
    async def scenario() -> None:
        async with under_test.open() as broker:
            won = await broker.coordination.acquire_lease("beat", OWNER, ttl_s=60.0)
            way.cut()

            async def gone() -> bool:
                try:
                    return not await broker.coordination.renew_lease("beat", OWNER, won.term, ttl_s=60.0)
                except BrokerUnavailable:
                    return False

            await eventually(gone, what="the end of the lease")

            async def acquired() -> bool:
                try:
                    return (await broker.coordination.acquire_lease("beat", PEER, ttl_s=60.0)).granted
                except BrokerError:
                    return False

            await eventually(acquired, what="the lease over a new link")

    run(scenario())


def test_a_producer_opens_a_new_connection_after_a_cut(way: Way, under_test: BrokerUnderTest) -> None:
    producer = under_test.producer()
    producer.publish(outgoing("a"))
    way.cut()

    async def published() -> bool:
        try:
            producer.publish(outgoing("b"))
        except BrokerUnavailable:
            return False
        return True

    async def scenario() -> None:
        await eventually(published, what="a new connection")
        async with under_test.open() as broker:
            assert texts(await take_when_it_heals(broker))[:2] == ["a", "b"]

    run(scenario())


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RabbitServer]:
    options = {"consumer_timeout": 1000, "channel_tick_interval": 500}
    server = RabbitServer(tmp_path, options=options)
    server.start()
    yield server
    server.stop()


async def acknowledge(broker: Broker, held: Sequence[Delivery]) -> None:
    """What is held for longer than the node allows comes again, so this may take several tries."""

    async def acknowledged() -> bool:
        nonlocal held
        try:
            if (await broker.settle([Ack(one.tag) for one in held])).applied:
                return True
            held = await take_when_it_heals(broker)
        except BrokerError:
            return False
        return False

    await eventually(acknowledged, what="the message to be acknowledged")


def test_a_restart_in_the_middle_loses_nothing_and_a_late_ack_is_explained(
    server: RabbitServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Both need a node of their own, and one takes seconds to start: so they share it."""
    settings = BrokerSettings(server.url(server.new_vhost()), connect_timeout_s=1.0)

    async def late_ack(broker: Broker) -> None:
        await broker.publish(outgoing("slow"))
        held = await take_one(broker)
        with caplog.at_level(logging.WARNING, logger="umbel.brokers.amqp"):
            again = await take_when_it_heals(broker)
        assert texts(again) == ["slow"] and again[0].redelivered
        assert "consumer_timeout" in caplog.text
        assert (await broker.settle([Ack(held.tag)])).conflicts == {held.tag}
        await acknowledge(broker, again)

    async def opened_early() -> None:
        """The port is open before the streams are back: not one worker may end for that."""

        async def opened() -> bool:
            early = open_broker(settings)
            try:
                await early.open()
            except BrokerUnavailable as error:
                if "cannot reach RabbitMQ" not in str(error):
                    raise
                return False
            await early.close()
            return True

        await eventually(opened, what="a broker at the first moment")

    async def published_early() -> None:
        producer = open_producer(settings)

        async def published() -> bool:
            try:
                await asyncio.to_thread(producer.publish, outgoing("early"))
            except BrokerUnavailable as error:
                if "cannot reach RabbitMQ" not in str(error):
                    raise
                return False
            return True

        await eventually(published, what="a message at the first moment")
        producer.close()

    async def restart(broker: Broker) -> None:
        sent = [str(number) for number in range(50)]
        await broker.publish(outgoing(*sent[:25]))
        await broker.publish(outgoing(*sent[25:], not_before=time.time() + 0.5))
        held = (await take(broker, 10)).deliveries
        await asyncio.to_thread(server.stop)
        with pytest.raises(BrokerUnavailable, match="cannot reach RabbitMQ"):
            await broker.publish([])
        starting = asyncio.create_task(asyncio.to_thread(server.start))
        await asyncio.gather(opened_early(), published_early(), starting)
        seen: list[str] = []

        async def all_seen() -> bool:
            try:
                deliveries = (await take(broker)).deliveries
                settled = await broker.settle([Ack(one.tag) for one in deliveries])
            except BrokerError:
                return False
            seen.extend(texts([one for one in deliveries if one.tag not in settled.conflicts]))
            return len(seen) >= 51

        await eventually(all_seen, what="every message after the restart")
        assert sorted(seen) == sorted([*sent, "early"])
        assert (await broker.settle([Ack(held[0].tag)])).conflicts == {held[0].tag}

    async def scenario() -> None:
        broker = open_broker(settings)
        await broker.open()
        await late_ack(broker)
        await restart(broker)
        await broker.close()

    run(scenario())


def test_a_wrong_address_is_one_clear_line_without_the_password(amqp_url: str) -> None:
    refused = free_ports(1)[0]
    right = amqp_url.rpartition("/")[0]
    for url, words in (
        (right.replace("guest:guest", "guest:secret") + "/t0", "user and password"),
        (f"{right}/nowhere", "no virtual host 'nowhere'"),
        (f"amqp://guest:secret@127.0.0.1:{refused}//", "cannot reach RabbitMQ"),
        ("amqp://guest:secret@no-such-host.invalid//", "cannot reach RabbitMQ"),
    ):
        for text in _errors(url):
            assert words in text and "secret" not in text and "\n" not in text


def test_a_host_that_does_not_answer_is_given_up_at_the_time_out() -> None:
    way = Way(shared_server().port)
    way.silence()
    began = time.monotonic()
    for text in _errors(f"amqp://guest:guest@127.0.0.1:{way.port}//", connect_timeout_s=0.3):
        assert "no answer within the connect time-out" in text
    assert time.monotonic() - began < DEADLINE_S
    way.end()


@pytest.mark.parametrize(
    "url",
    [
        "amqp:/localhost",
        "amqp://",
        "amqp://h:port/",
        "amqp://h:0/",
        "amqp://h/v?heartbeat=1",
        "amqp://ada:s3cret/word@h//",
    ],
)
def test_a_mistyped_address_is_refused_before_anything_is_tried(url: str) -> None:
    with pytest.raises(BadURL) as caught:
        open_producer(BrokerSettings(url))
    assert "s3cret" not in str(caught.value)


def test_the_next_address_is_tried_when_the_first_is_down(amqp_url: str) -> None:
    settings = BrokerSettings(f"amqp://guest:guest@127.0.0.1:{free_ports(1)[0]}//;{amqp_url}")

    async def scenario() -> None:
        broker = open_broker(settings)
        await broker.open()
        await broker.publish(outgoing("a"))
        assert texts((await take(broker)).deliveries) == ["a"]
        await broker.close()

    run(scenario())


def _errors(url: str, **changes: float) -> Iterator[str]:
    """What both faces say to an address."""
    settings = BrokerSettings(url, connect_timeout_s=changes.get("connect_timeout_s", 2.0))
    with pytest.raises(BrokerUnavailable) as caught:
        open_producer(settings).publish(outgoing("a"))
    yield str(caught.value)
    with pytest.raises(BrokerUnavailable) as caught:
        run(open_broker(settings).open())
    yield str(caught.value)
