from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from tests.backends.contract import BackendContract, Stores, closing
from tests.backends.contract_chords import ChordContract
from tests.servers.redis import redis_server, redis_url
from umbel.backends.interface import Backend
from umbel.backends.registry import open_backend
from umbel.brokers.interface import BrokerSettings

__all__ = ["redis_server", "redis_url"]  # fixtures


@pytest.fixture
def stores(redis_url: str) -> Iterator[Stores]:
    opened: list[Backend] = []
    yield closing(
        opened, lambda **changes: open_backend(redis_url, replace(BrokerSettings(redis_url), **changes))
    )
    for backend in opened:
        backend.close()


class TestRedis(BackendContract, ChordContract):
    """Redis keeps every promise."""
