import pytest

from tests.brokers.contract import BrokerContract
from tests.brokers.under_test import BrokerUnderTest


@pytest.fixture
def under_test(on_redis: BrokerUnderTest) -> BrokerUnderTest:
    return on_redis


class TestRedis(BrokerContract):
    """Redis keeps every promise."""
