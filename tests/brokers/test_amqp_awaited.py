"""What those who await their sends share on RabbitMQ: one connection, and not each other's faults."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.brokers.under_test import BrokerUnderTest, message, outgoing, run, take_in_time, texts
from tests.servers.rabbitmq import amqp_url
from umbel.brokers.amqp import publishing
from umbel.brokers.amqp.confirms import Unanswered
from umbel.brokers.amqp.envelope import Properties, encode_properties
from umbel.brokers.amqp.frames import Method, encode_method, encode_publish
from umbel.brokers.amqp.handshake import BrokerStarting, Undecided, locations_from_url
from umbel.brokers.amqp.link import Channel, Link
from umbel.brokers.amqp.publisher import AmqpAsyncProducer, Publisher
from umbel.brokers.amqp.topology import CAPABILITIES, TaskQueues
from umbel.brokers.interface import Attempt, BrokerSettings
from umbel.errors import BrokerRefused, BrokerUnavailable
from umbel.wire.message import Outgoing

__all__ = ["amqp_url"]

MANY = 50


@pytest.fixture
def under_test(amqp_url: str) -> Iterator[BrokerUnderTest]:
    under_test = BrokerUnderTest(BrokerSettings(amqp_url), CAPABILITIES)
    yield under_test
    under_test.close()


@asynccontextmanager
async def client(under_test: BrokerUnderTest) -> AsyncIterator[AmqpAsyncProducer]:
    """It has sent something: its connection is open."""
    producer = AmqpAsyncProducer(under_test.settings)
    await producer.publish(outgoing("first"), Attempt())
    try:
        yield producer
    finally:
        await producer.close()


def parts(producer: AmqpAsyncProducer) -> tuple[Link, Publisher]:
    assert producer._link is not None and producer._publisher is not None
    return producer._link, producer._publisher


async def arrived(under_test: BrokerUnderTest, number: int) -> list[str]:
    async with under_test.open() as broker:
        return sorted(texts(await take_in_time(broker, number, what="what was sent")))


async def outcomes(*work: Coroutine[Any, Any, object]) -> list[object]:
    return list(await asyncio.gather(*work, return_exceptions=True))


async def close_it(channel: Channel) -> None:
    """Somebody's message that RabbitMQ answers by closing the channel."""
    bad = ("gone", "k", encode_properties(Properties()), b"")
    await channel.answered(
        channel.publish([encode_publish(channel.number, *bad, mandatory=True)], lambda: [bad])
    )


def test_an_exchange_that_was_deleted_concerns_nobody_else(under_test: BrokerUnderTest) -> None:
    async def scenario() -> None:
        async with client(under_test) as producer:
            parts(producer)[1].exchanges.add("gone")  # as it was when it was last used
            astray = [Outgoing("", message("astray"), exchange="gone", routing_key="k")]
            refused, *others = await outcomes(
                producer.publish(astray, Attempt()),
                *(producer.publish(outgoing(f"o{number}"), Attempt()) for number in range(3)),
            )
            assert isinstance(refused, BrokerRefused) and "'gone'" in str(refused)
            assert others == [None] * 3
        assert await arrived(under_test, 4) == ["first", "o0", "o1", "o2"]

    run(scenario())


def test_who_was_under_way_when_another_closed_the_channel_is_not_refused(
    under_test: BrokerUnderTest,
) -> None:
    """It may have been accepted: who awaits it is told so."""

    async def scenario() -> None:
        async with client(under_test) as producer:
            channel, attempt = parts(producer)[1]._channels["/"], Attempt()
            told = await outcomes(close_it(channel), producer.publish(outgoing("lost"), attempt))
            assert [type(one) for one in told] == [Undecided] * 2
            assert attempt.is_out, "so the caller gets SendUnknown"
            assert "no exchange 'gone'" in str(told[1])
            await producer.publish(outgoing("next"), Attempt())
        assert await arrived(under_test, 2) == ["first", "next"]

    run(scenario())


def test_a_worker_sends_it_again_and_knows_whom_a_refusal_concerns(under_test: BrokerUnderTest) -> None:
    async def scenario() -> None:
        async with client(under_test) as producer:
            publisher = Publisher(parts(producer)[0], Unanswered())
            posts = publishing.tasks(outgoing("a", "b"), TaskQueues(under_test.settings), 0.0)
            assert await publisher.try_send(posts[:1]) == {}
            channel = publisher._channels["/"]
            _, refused = await outcomes(close_it(channel), publisher.try_send(posts))
            assert refused == {}
        assert await arrived(under_test, 4) == ["a", "a", "b", "first"]

    run(scenario())


def test_many_first_sends_open_one_channel_and_declare_each_queue_once(
    under_test: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, channel = list[bool](), Link.channel

    async def counted(link: Link, *, confirms: bool = False) -> Channel:
        opened.append(confirms)
        return await channel(link, confirms=confirms)

    monkeypatch.setattr(Link, "channel", counted)

    async def scenario() -> None:
        producer = AmqpAsyncProducer(under_test.settings)
        await asyncio.gather(*(producer.publish(outgoing(str(n)), Attempt()) for n in range(MANY)))
        assert sorted(opened) == [False, False, True]  # the stream of facts, the queue; to publish on
        assert len(parts(producer)[0]._channels) == 1
        await producer.close()

    run(scenario())


def test_what_failed_before_anything_was_written_is_not_out(
    under_test: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a virtual host that nobody has used, whose streams are being made: so it is tried again."""

    async def starts(*_given: object) -> None:
        raise BrokerStarting(locations_from_url(under_test.settings.url)[0], 541, "INTERNAL_ERROR")

    async def scenario() -> None:
        async with client(under_test) as producer:
            attempt = Attempt()
            with monkeypatch.context() as patched:
                patched.setattr(Publisher, "declare", starts)
                with pytest.raises(BrokerStarting):
                    await producer.publish(outgoing("a", queue="new"), attempt)
            assert not attempt.is_out
            await producer.publish(outgoing("a", queue="new"), attempt)

    run(scenario())


def hear(link: Link, method: Method, *fields: Any) -> None:
    """The server says this."""
    frame = encode_method(0, method, *fields)
    link.get_buffer(-1)[: len(frame)] = frame
    link.buffer_updated(len(frame))


def test_nothing_is_written_to_a_server_that_takes_no_messages(under_test: BrokerUnderTest) -> None:
    """It reads nothing more: what is written would pile up here, one send after the other."""

    async def scenario() -> None:
        async with client(under_test) as producer:
            attempt = Attempt()
            hear(parts(producer)[0], Method.CONNECTION_BLOCKED, "low on memory")
            with pytest.raises(BrokerUnavailable, match=r"does not accept messages now \(low on memory\)"):
                await producer.publish(outgoing("never"), attempt)
            assert not attempt.is_out
            hear(parts(producer)[0], Method.CONNECTION_UNBLOCKED)
            await producer.publish(outgoing("now"), attempt)
        assert await arrived(under_test, 2) == ["first", "now"]

    run(scenario())
