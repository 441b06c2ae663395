"""How RabbitMQ says no to messages, and what becomes of them (N2)."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.brokers.test_amqp_layout import declare
from tests.brokers.under_test import (
    BrokerUnderTest,
    message,
    outgoing,
    run,
    take,
    take_in_time,
    take_one,
    texts,
)
from tests.servers.rabbitmq import amqp_url
from umbel.brokers.amqp import publishing, topology
from umbel.brokers.amqp.blocking import BlockingLink
from umbel.brokers.amqp.envelope import PROPERTIES_MAX_BYTES, Properties, encode_properties
from umbel.brokers.amqp.frames import encode_publish
from umbel.brokers.amqp.handshake import locations_from_url
from umbel.brokers.amqp.topology import CAPABILITIES
from umbel.brokers.interface import Ack, BrokerSettings, Refused
from umbel.control.queue_pauses import move_messages
from umbel.errors import BrokerRefused
from umbel.wire.message import Message, Outgoing

__all__ = ["amqp_url"]

TOO_LARGE = 129 * 1024 * 1024  # RabbitMQ's own limit is 128 MiB, or 16 from version 4 on


@pytest.fixture
def under_test(amqp_url: str) -> Iterator[BrokerUnderTest]:
    under_test = BrokerUnderTest(BrokerSettings(amqp_url), CAPABILITIES)
    yield under_test
    under_test.close()


@contextmanager
def a_stranger(under_test: BrokerUnderTest) -> Iterator[BlockingLink]:
    """Somebody else on the same server."""
    (location,) = locations_from_url(under_test.settings.url)
    link = BlockingLink(location, timeout_s=10, name="stranger")
    yield link
    link.close()


@pytest.fixture
def full(under_test: BrokerUnderTest) -> str:
    """A queue that holds one message and refuses more."""
    with a_stranger(under_test) as link:
        declare(link, "small", max_length=1, overflow="reject-publish")
    under_test.producer().publish(outgoing("first", queue="small"))
    return "small"


def test_a_full_queue_refuses_each_message_and_no_other(under_test: BrokerUnderTest, full: str) -> None:
    async def scenario() -> None:
        async with under_test.open() as broker:
            await broker.publish(outgoing("a"))
            delivery = await take_one(broker)
            sent = [*outgoing("x", "y", queue=full), *outgoing("z")]
            settled = await broker.settle([Ack(delivery.tag, (), sent)])
            assert sorted(part.part.message.body for part in settled.refused) == [b"x", b"y"]  # type: ignore[union-attr]
            assert all("reject-publish" in part.reason for part in settled.refused)
            assert texts(await take_in_time(broker, 1, what="the other one")) == ["z"]
            assert sorted(one.message.body for one in await broker.dead_letters()) == [b"x", b"y"]

    run(scenario())


def test_a_sender_is_told_which_messages_a_full_queue_refused(under_test: BrokerUnderTest, full: str) -> None:
    batch = [*outgoing("a"), *outgoing("x", queue=full), *outgoing("b")]
    with pytest.raises(BrokerRefused, match="'small'") as told:
        under_test.producer().publish(batch)
    assert told.value.places == (1,)

    async def scenario() -> None:
        async with under_test.open() as broker:
            assert sorted(texts(await take_in_time(broker, 2, what="the others"))) == ["a", "b"]

    run(scenario())


def test_failures_that_are_refused_where_they_are_kept_are_dead_letters(
    under_test: BrokerUnderTest, caplog: pytest.LogCaptureFixture
) -> None:
    """By a verdict or alone; and where there is no room for dead letters either, that is said."""
    with a_stranger(under_test) as link:
        declare(link, topology.FAILED, max_length=1, overflow="reject-publish")
        declare(link, topology.DEAD, max_length=2, overflow="reject-publish")

    async def scenario() -> None:
        async with under_test.open() as broker:
            await broker.publish(outgoing("a", "b"))
            taken = await take_in_time(broker, 2, what="the messages")
            settled = await broker.settle([Ack(one.tag, keep="broke") for one in taken])
            assert (settled.applied, settled.refused) == (2, ())
            await broker.keep_failed([Refused(one, "broke") for one in outgoing("c", "d")])
            assert [one.message.body for one in await broker.failed(9)] == [b"a"]
            letters = {one.message.body: one for one in await broker.dead_letters()}
            assert sorted(letters) == [b"b", b"c"]
            assert letters[b"b"].queue == "celery" and letters[b"b"].reason.startswith(
                "broke; it cannot be stored"
            )

    run(scenario())
    told = [one.message for one in caplog.records if one.levelno == logging.ERROR]
    moved = "broker refused a message; moved to dead letters"
    assert told == [moved, moved, "cannot store failed tasks; `umbel task retry` cannot retry them"]


def test_a_full_queue_takes_what_it_can_of_a_move_and_the_rest_stays(
    under_test: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("umbel.brokers.amqp.dead_letters.PORTION", 2)
    names = [f"m{number}" for number in range(5)]
    with a_stranger(under_test) as link:
        declare(link, "small", max_length=3, overflow="reject-publish")

    async def scenario() -> None:
        async with under_test.open() as broker:
            await broker.publish(outgoing(*names))
            said = "after 2 messages were moved: 1 of the last 2 .* 'small', .*: its queue is full"
            with pytest.raises(BrokerRefused, match=said):
                await move_messages(broker, "celery", "small")
            places = [await broker.peek(queue, 10) for queue in ("small", "celery")]
            assert [texts(one) for one in places] == [names[:3], names[3:]]

    run(scenario())


def test_a_message_that_cannot_be_written_anew_moves_as_it_is(under_test: BrokerUnderTest) -> None:
    properties = encode_properties(Properties(headers={"task": "t", "id": "1", "x": ""}))
    filled = Properties(headers={"task": "t", "id": "1", "x": "x" * (PROPERTIES_MAX_BYTES - len(properties))})
    with a_stranger(under_test) as link:
        declare(link, "celery")
        link.publish([encode_publish(1, "", "celery", encode_properties(filled), b"large")])

    async def scenario() -> None:
        async with under_test.open() as broker:
            await broker.publish(outgoing("after"))
            assert len(await broker.peek("celery", 2)) == 2  # so that there is more to write: a mark
            assert await broker.move("celery", "other", 10) == 2
            assert texts(await broker.peek("other", 10)) == ["large", "after"]

    run(scenario())


def test_a_message_over_the_servers_limit_is_refused_alone(under_test: BrokerUnderTest) -> None:
    async def scenario() -> None:
        async with under_test.open() as broker:
            await broker.publish(outgoing("a"))
            delivery = await take_one(broker)
            large = Outgoing("celery", Message(b'{"task": "t"}', bytes(TOO_LARGE), correlation_id="large"))
            settled = await broker.settle([Ack(delivery.tag, (), [*outgoing("b"), large, *outgoing("c")])])
            (refused,) = settled.refused
            assert refused.part is large and "larger" in refused.reason
            assert sorted(texts(await take_in_time(broker, 2, what="the others"))) == ["b", "c"]

    run(scenario())


def test_a_queue_that_cannot_be_consumed_does_not_stop_the_others(under_test: BrokerUnderTest) -> None:
    async def scenario() -> None:
        async with under_test.open() as broker:
            await broker.publish(outgoing("a"))
            queues = ("amq.reserved", "celery")
            assert texts((await take(broker, 1, queues=queues)).deliveries) == ["a"]
            with pytest.raises(BrokerRefused, match=r"amq\.reserved"):
                await take(broker, 1, queues=("amq.reserved",))

    run(scenario())


@pytest.mark.parametrize(
    "unwritable",
    [
        Message(b"", b"no headers"),
        Message(b"[1]", b"no map"),
        Message(b'{"task": "t"}', b"", correlation_id="i" * 300),
        Message(b'{"task": "t"}', b"", reply_to="r" * 300),
        message("\N{SNOWMAN}"),
    ],
)
def test_any_message_can_be_a_dead_letter(unwritable: Message) -> None:
    """N1: what cannot be written as it is goes with its headers as text."""
    letter = publishing.dead_letter("celery", unwritable, "why", 2, 1.0)
    assert letter.body == unwritable.body and letter.frames(1)
