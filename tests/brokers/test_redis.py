import pytest

from tests.brokers.contract import BrokerContract, OtherLoopContract
from tests.brokers.under_test import BrokerUnderTest


@pytest.fixture
def under_test(on_redis: BrokerUnderTest) -> BrokerUnderTest:
    return on_redis


class TestRedis(BrokerContract):
    """Redis keeps every promise."""


@pytest.mark.usefixtures("on_uvloop")
class TestRedisOnUvloop(OtherLoopContract):
    """On the event loop that `umbel[all]` brings, too."""
