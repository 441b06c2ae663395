"""Google Pub/Sub keeps the promises that it declares, on Google's emulator, and refuses the others."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.brokers.contract import BrokerContract
from tests.brokers.under_test import BrokerUnderTest
from tests.servers.pubsub import pubsub_url
from umbel.brokers.gcpubsub.capabilities import CAPABILITIES
from umbel.brokers.interface import BrokerSettings

__all__ = ["pubsub_url"]


@pytest.fixture
def under_test(pubsub_url: str, tmp_path: Path) -> Iterator[BrokerUnderTest]:
    results = f"sqlite:///{tmp_path / 'results.db'}"
    under_test = BrokerUnderTest(BrokerSettings(pubsub_url), CAPABILITIES, results)
    yield under_test
    under_test.close()


class TestPubsub(BrokerContract):
    """Pub/Sub keeps the promises, or says why not."""
