"""Servers as the tests of brokers have them: Redis for each file, empty for each test; a way to RabbitMQ."""

from collections.abc import Iterator

import pytest

from tests.brokers.redis_claims import LEASE_S
from tests.brokers.under_test import BrokerUnderTest
from tests.servers.rabbitmq import shared_server
from tests.servers.redis import redis_server, redis_url
from tests.servers.way import Way
from umbel.brokers.interface import BrokerSettings
from umbel.brokers.redis.keys import CAPABILITIES

__all__ = ["redis_server", "redis_url"]  # fixtures


@pytest.fixture
def on_redis(redis_url: str) -> Iterator[BrokerUnderTest]:
    under_test = BrokerUnderTest(BrokerSettings(redis_url), CAPABILITIES)
    yield under_test
    under_test.close()


@pytest.fixture
def patient(redis_url: str) -> Iterator[BrokerUnderTest]:
    """No lease ends by itself, however slow the machine is."""
    under_test = BrokerUnderTest(BrokerSettings(redis_url, lease_s=LEASE_S), CAPABILITIES)
    yield under_test
    under_test.close()


@pytest.fixture
def way() -> Iterator[Way]:
    """A way to the RabbitMQ of all tests, which a test can break."""
    way = Way(shared_server().port)
    yield way
    way.end()
