"""From an address to the classes of its broker, and what is loaded for them."""

import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from umbel.brokers.amqp.broker import AmqpBroker
from umbel.brokers.amqp.producer import AmqpProducer
from umbel.brokers.amqp.publisher import AmqpAsyncProducer
from umbel.brokers.gcpubsub.broker import PubsubBroker
from umbel.brokers.gcpubsub.producer import PubsubProducer
from umbel.brokers.gcpubsub.service import PubsubAsyncProducer
from umbel.brokers.interface import AsyncProducer, Broker, BrokerSettings, Capabilities, Producer
from umbel.brokers.redis.async_producer import RedisAsyncProducer
from umbel.brokers.redis.broker import RedisBroker
from umbel.brokers.redis.producer import RedisProducer
from umbel.brokers.registry import open_async_producer, open_broker, open_producer
from umbel.brokers.sqlite.broker import SqliteBroker
from umbel.brokers.sqlite.cluster_store import SqliteProducer
from umbel.brokers.sqlite.thread import SqliteAsyncProducer
from umbel.errors import BadURL

# mypy checks here that each class keeps its Protocol: the registry knows them by name only.
BROKERS: list[Callable[[BrokerSettings], Broker]] = [SqliteBroker, RedisBroker, AmqpBroker, PubsubBroker]
PRODUCERS: list[Callable[[BrokerSettings], Producer]] = [
    SqliteProducer,
    RedisProducer,
    AmqpProducer,
    PubsubProducer,
]
ASYNC_PRODUCERS: list[Callable[[BrokerSettings], AsyncProducer]] = [
    SqliteAsyncProducer,
    RedisAsyncProducer,
    AmqpAsyncProducer,
    PubsubAsyncProducer,
]


@pytest.fixture
def all_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[BrokerSettings]:
    monkeypatch.setenv("PUBSUB_EMULATOR_HOST", "localhost:1")
    places = (
        f"sqlite:///{tmp_path / 'umbel.db'}",
        "redis://localhost",
        "amqp://localhost",
        "gcpubsub://projects/shop",
    )
    return [BrokerSettings(url) for url in places]


def test_an_address_opens_the_classes_of_its_broker(all_settings: list[BrokerSettings]) -> None:
    for opened, classes in (
        (open_broker, BROKERS),
        (open_producer, PRODUCERS),
        (open_async_producer, ASYNC_PRODUCERS),
    ):
        assert [type(opened(settings)) for settings in all_settings] == classes


def test_an_unknown_scheme_is_refused_with_the_known_ones() -> None:
    with pytest.raises(BadURL, match=r"unknown broker scheme 'kafka'; known schemes: .*sqlite.*redis"):
        open_producer(BrokerSettings("kafka://localhost"))


@pytest.mark.parametrize("url", ["sqlite:///{}/umbel.db", "redis://localhost", "amqp://localhost"])
def test_a_producer_of_threads_loads_no_event_loop(url: str, tmp_path: Path) -> None:
    """asyncio takes three megabytes, in every child process that sends a task."""
    program = (
        "import sys\n"
        "from umbel.brokers.interface import BrokerSettings\n"
        "from umbel.brokers.registry import open_producer\n"
        f"open_producer(BrokerSettings({url.format(tmp_path)!r}))\n"
        "print('asyncio' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize("module", ["sqlite.store", "redis.keys", "amqp.topology", "gcpubsub.capabilities"])
def test_every_capability_that_is_off_has_its_reason(module: str) -> None:
    """`reports_nobody` says how a broker answers, and refuses nothing."""
    declared: Capabilities = import_module(f"umbel.brokers.{module}").CAPABILITIES
    off = {name for name in declared.__struct_fields__ if getattr(declared, name) is False}
    assert [name for name in sorted(off - {"reports_nobody"}) if not declared.reasons.get(name)] == []
