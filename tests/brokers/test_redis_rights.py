"""A Redis user with just the rights that docs/brokers.md names can do all that a worker and a client do."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.brokers.contract import BrokerContract
from tests.brokers.contract_messages import MessagesContract
from tests.brokers.under_test import BrokerUnderTest
from tests.servers.redis import RedisServer
from umbel.brokers.interface import BrokerSettings
from umbel.brokers.redis.keys import CAPABILITIES

DOCS = Path(__file__).parents[2] / "docs" / "brokers.md"
SOAK = bool(os.environ.get("UMBEL_SOAK"))


def documented_rights() -> list[str]:
    line = next(line for line in DOCS.read_text().splitlines() if "ACL SETUSER umbel" in line)
    return line.replace("PASSWORD", "word").split()


def with_few_rights(server: RedisServer) -> Iterator[BrokerUnderTest]:
    """With the rights of docs/brokers.md and no others."""
    server.ask("FLUSHALL")
    server.ask(*documented_rights())
    url = server.url.replace("redis://", "redis://umbel:word@")
    made = BrokerUnderTest(BrokerSettings(url), CAPABILITIES)
    yield made
    made.close()


@pytest.fixture
def under_test(redis_server: RedisServer) -> Iterator[BrokerUnderTest]:
    yield from with_few_rights(redis_server)


class TestRedisWithFewRights(BrokerContract if SOAK else MessagesContract):  # type: ignore[misc]
    """All of the contract in a soak, messages always."""
