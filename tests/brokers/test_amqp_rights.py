"""A RabbitMQ user with just the rights that docs/brokers.md names can do what workers and clients do."""

import os
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.brokers.contract import BrokerContract
from tests.brokers.contract_messages import MessagesContract
from tests.brokers.under_test import BrokerUnderTest
from tests.servers.rabbitmq import amqp_url, shared_server
from umbel.brokers.amqp.topology import CAPABILITIES
from umbel.brokers.interface import BrokerSettings

__all__ = ["amqp_url"]
DOCS = Path(__file__).parents[2] / "docs" / "brokers.md"
SOAK = bool(os.environ.get("UMBEL_SOAK"))
QUEUES = r"celery|[a-zäöü0-9 /-]*"  # those of the contract, none of which has a dot


def documented_rights(queues: str = "celery") -> list[str]:
    """The three patterns, for these queues."""
    line = next(line for line in DOCS.read_text().splitlines() if "set_permissions -p shop umbel" in line)
    patterns = shlex.split(line)[-3:]
    assert all("celery|" in pattern for pattern in patterns)
    return [pattern.replace("celery|", f"{queues}|", 1) for pattern in patterns]


@pytest.fixture
def under_test(amqp_url: str) -> Iterator[BrokerUnderTest]:
    shared_server().allow([("umbel", amqp_url.rpartition("/")[2], documented_rights(QUEUES))])
    made = BrokerUnderTest(BrokerSettings(amqp_url.replace("guest:guest", "umbel:word")), CAPABILITIES)
    yield made
    made.close()


class TestAmqpWithFewRights(BrokerContract if SOAK else MessagesContract):  # type: ignore[misc]
    """All of the contract in a soak, messages always."""
