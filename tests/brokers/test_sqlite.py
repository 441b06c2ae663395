from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.brokers.contract import BrokerContract
from tests.brokers.under_test import BrokerUnderTest
from umbel.brokers.interface import BrokerSettings
from umbel.brokers.sqlite.store import CAPABILITIES


@pytest.fixture
def under_test(tmp_path: Path) -> Iterator[BrokerUnderTest]:
    under_test = BrokerUnderTest(BrokerSettings(f"sqlite:///{tmp_path / 'umbel.db'}"), CAPABILITIES)
    yield under_test
    under_test.close()


class TestSqlite(BrokerContract):
    """The embedded broker keeps every promise."""
