from collections.abc import Iterator

import pytest

from tests.brokers.contract import BrokerContract, OtherLoopContract
from tests.brokers.under_test import LONG_S, BrokerUnderTest
from tests.servers.rabbitmq import amqp_url
from umbel.brokers.amqp.topology import CAPABILITIES
from umbel.brokers.interface import BrokerSettings

__all__ = ["amqp_url"]


@pytest.fixture
def under_test(amqp_url: str) -> Iterator[BrokerUnderTest]:
    under_test = BrokerUnderTest(BrokerSettings(amqp_url, connect_timeout_s=LONG_S), CAPABILITIES)
    yield under_test
    under_test.close()


class TestAmqp(BrokerContract):
    """RabbitMQ keeps the promises, or says why not."""


@pytest.mark.usefixtures("on_uvloop")
class TestAmqpOnUvloop(OtherLoopContract):
    """On the event loop that `umbel[all]` brings, too."""
