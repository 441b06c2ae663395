"""Valkey keeps the promises that Redis does. A soak runs the whole contract, other runs that of messages.

Debian 12 has it in its backports (`apt-get install -t bookworm-backports valkey-server`).
"""

import os
import shutil
from collections.abc import Iterator

import pytest

from tests.brokers.contract import BrokerContract
from tests.brokers.contract_messages import MessagesContract
from tests.brokers.test_redis_rights import documented_rights, with_few_rights
from tests.brokers.under_test import BrokerUnderTest, outgoing
from tests.servers.redis import RedisServer
from umbel.brokers.interface import BrokerSettings
from umbel.brokers.registry import open_producer
from umbel.errors import AccessRefused

SOAK = bool(os.environ.get("UMBEL_SOAK"))
PROGRAM = "valkey-server"
pytestmark = pytest.mark.skipif(
    shutil.which(PROGRAM) is None, reason="valkey-server is not installed: Debian 12 has it in its backports"
)


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("valkey"), program=PROGRAM)
    server.start()
    told = server.ask("INFO", "server")
    assert isinstance(told, bytes) and b"server_name:valkey" in told
    yield server
    server.stop()


@pytest.fixture
def under_test(valkey: RedisServer) -> Iterator[BrokerUnderTest]:
    yield from with_few_rights(valkey)


class TestValkey(BrokerContract if SOAK else MessagesContract):  # type: ignore[misc]
    """All of the contract in a soak, messages always."""


def test_a_right_that_is_missing_is_named_as_on_redis(valkey: RedisServer) -> None:
    valkey.ask(*documented_rights(), "-lpush")
    settings = BrokerSettings(valkey.url.replace("redis://", "redis://umbel:word@"))
    producer = open_producer(settings)
    with pytest.raises(
        AccessRefused, match=r"'lpush' to the user 'umbel'; grant it with ACL SETUSER umbel \+lpush"
    ):
        producer.publish(outgoing("a"))
    producer.close()
