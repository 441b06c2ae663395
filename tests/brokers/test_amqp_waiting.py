"""What a worker on RabbitMQ does not ask for, because what it waits for will come."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tests.brokers.under_test import LONG_S, OWNER, QUEUE, BrokerUnderTest, outgoing, run, take, texts
from tests.servers.rabbitmq import amqp_url
from umbel.brokers.amqp.frames import Method
from umbel.brokers.amqp.link import Channel
from umbel.brokers.amqp.topology import CAPABILITIES
from umbel.brokers.interface import BrokerSettings

__all__ = ["amqp_url"]


@pytest.fixture
def under_test(amqp_url: str) -> Iterator[BrokerUnderTest]:
    under_test = BrokerUnderTest(BrokerSettings(amqp_url), CAPABILITIES)
    yield under_test
    under_test.close()


def test_an_owner_that_waits_between_claims_does_not_ask_after_each_message(
    under_test: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes will wake it. A claim after that one asks, as every claim of who does not wait."""
    asked, ask = list[Method](), Channel.ask

    def counted(channel: Channel, method: Method, *fields: Any) -> Any:
        asked.append(method)
        return ask(channel, method, *fields)

    async def scenario() -> None:
        async with under_test.open() as broker:
            await take(broker, 100)
            waiting = asyncio.create_task(broker.wait_ready([QUEUE], LONG_S, owner=OWNER))
            await broker.publish(outgoing("a"))
            await waiting
            monkeypatch.setattr(Channel, "ask", counted)
            assert texts((await take(broker, 50)).deliveries) == ["a"]
            assert not (await take(broker, 50)).deliveries
            assert asked == []
            assert not (await take(broker, 50)).deliveries
            assert Method.QUEUE_DECLARE in asked, "it asks for the queue"
            await broker.publish(outgoing("b"))
            assert texts((await take(broker, 50)).deliveries) == ["b"]
            await broker.publish(outgoing("c"))
            assert await broker.wait_ready([QUEUE], LONG_S, owner=OWNER)
            assert texts((await take(broker, 50)).deliveries) == ["c"]

    run(scenario())
