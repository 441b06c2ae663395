"""A RabbitMQ user with just the rights that docs/brokers.md names can do what workers and clients do."""

import os
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.brokers.contract import BrokerContract
from tests.brokers.contract_messages import MessagesContract
from tests.brokers.under_test import BrokerUnderTest
from tests.servers.rabbitmq import shared_server
from umbel.brokers.amqp.topology import CAPABILITIES
from umbel.brokers.interface import BrokerSettings

DOCS = Path(__file__).parents[2] / "docs" / "brokers.md"
SOAK = bool(os.environ.get("UMBEL_SOAK"))
QUEUES = r"celery|[a-zäöü0-9 /-]*"  # those of the contract, none of which has a dot
HOSTS_AT_ONCE = 8


def documented_rights(queues: str = "celery") -> list[str]:
    """The three patterns, for these queues."""
    line = next(line for line in DOCS.read_text().splitlines() if "set_permissions -p shop umbel" in line)
    patterns = shlex.split(line)[-3:]
    assert all("celery|" in pattern for pattern in patterns)
    return [pattern.replace("celery|", f"{queues}|", 1) for pattern in patterns]


def _hosts() -> Iterator[str]:
    server = shared_server()
    while True:
        some = [server.new_vhost() for _ in range(HOSTS_AT_ONCE)]
        server.allow([("umbel", vhost, documented_rights(QUEUES)) for vhost in some])
        yield from some


@pytest.fixture(scope="module")
def hosts() -> Iterator[str]:
    return _hosts()


@pytest.fixture
def under_test(hosts: Iterator[str]) -> Iterator[BrokerUnderTest]:
    url = shared_server().url(next(hosts)).replace("guest:guest", "umbel:word")
    made = BrokerUnderTest(BrokerSettings(url), CAPABILITIES)
    yield made
    made.close()


class TestAmqpWithFewRights(BrokerContract if SOAK else MessagesContract):  # type: ignore[misc]
    """All of the contract in a soak, messages always."""
