"""Google Pub/Sub with a coordination store keeps the promises that it cannot keep alone."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.brokers.contract_marks import MarksContract
from tests.brokers.contract_messages import MessagesContract
from tests.brokers.contract_sharing import (
    EventLogContract,
    FanoutContract,
    LeadershipContract,
    RevokesContract,
)
from tests.brokers.contract_unique import UniqueContract
from tests.brokers.contract_verdicts import VerdictsContract
from tests.brokers.under_test import (
    OWNER,
    PEER,
    QUEUE,
    BrokerUnderTest,
    eventually,
    outgoing,
    run,
)
from tests.servers.pubsub import pubsub_url
from umbel.brokers.composed.producer import composed
from umbel.brokers.gcpubsub.capabilities import CAPABILITIES
from umbel.brokers.interface import Ack, Broker, BrokerSettings, Delivery
from umbel.brokers.redis.keys import CAPABILITIES as OF_REDIS
from umbel.brokers.registry import open_broker, open_producer
from umbel.errors import BadURL

__all__ = ["pubsub_url"]
PACE = 4.0


@pytest.fixture
def under_test(pubsub_url: str, redis_url: str, tmp_path: Path) -> Iterator[BrokerUnderTest]:
    results = f"sqlite:///{tmp_path / 'results.db'}"
    settings = BrokerSettings(pubsub_url, coordination_store=redis_url)
    under_test = BrokerUnderTest(settings, composed(CAPABILITIES, OF_REDIS), PACE, results)
    yield under_test
    under_test.close()


class TestComposed(
    MessagesContract,
    VerdictsContract,
    FanoutContract,
    EventLogContract,
    RevokesContract,
    LeadershipContract,
    MarksContract,
    UniqueContract,
):
    """Messages by Pub/Sub; leases, elections, events, revokes, unique and delayed tasks by Redis."""


def test_an_owner_that_stops_leaves_the_claims_of_other_owners(under_test: BrokerUnderTest) -> None:
    async def claim_one(broker: Broker, owner: str) -> Delivery:
        async def claimed() -> Delivery | None:
            return next(iter((await broker.claim(owner, [QUEUE], 1)).deliveries), None)

        return await eventually(claimed, what=f"a message for {owner}")

    async def scenario() -> None:
        async with under_test.open() as broker:
            await broker.publish(outgoing("a", "b"))
            await claim_one(broker, OWNER)
            other = await claim_one(broker, PEER)
            assert await broker.forget_owner(OWNER) == 1
            settled = await broker.settle([Ack(other.tag)])
            assert (settled.applied, settled.conflicts) == (1, frozenset())

    run(scenario())


def test_only_pubsub_needs_a_store_and_cannot_be_one(pubsub_url: str) -> None:
    with pytest.raises(BadURL, match="only gcpubsub"):
        open_broker(BrokerSettings("redis://localhost/0", coordination_store="redis://localhost/1"))
    with pytest.raises(BadURL, match="cannot be a coordination store"):
        open_producer(BrokerSettings(pubsub_url, coordination_store=pubsub_url))
