"""Google Pub/Sub keeps the promises that it declares, on Google's emulator, and refuses the others."""

import asyncio
import json
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.brokers.contract import BrokerContract
from tests.brokers.under_test import BrokerUnderTest, outgoing, run, take_in_time, texts
from tests.servers.pubsub import pubsub_url
from umbel.brokers.gcpubsub.address import EMULATOR_VARIABLE
from umbel.brokers.gcpubsub.capabilities import CAPABILITIES
from umbel.brokers.interface import BrokerSettings
from umbel.cli.cluster.status import FEATURES

__all__ = ["pubsub_url"]
PACE = 4.0
SLOW = pytest.mark.skipif(not os.environ.get("UMBEL_SOAK"), reason="ends with an ack deadline of ten seconds")


@pytest.fixture
def under_test(pubsub_url: str, tmp_path: Path) -> Iterator[BrokerUnderTest]:
    results = f"sqlite:///{tmp_path / 'results.db'}"
    under_test = BrokerUnderTest(BrokerSettings(pubsub_url), CAPABILITIES, PACE, results)
    yield under_test
    under_test.close()


class TestPubsub(BrokerContract):
    """Pub/Sub keeps the promises, or says why not."""

    @SLOW
    def test_messages_of_a_killed_process_return_within_its_lease(self, under_test: BrokerUnderTest) -> None:
        super().test_messages_of_a_killed_process_return_within_its_lease(under_test)

    @SLOW
    def test_claimers_in_several_processes_share_the_queue_without_loss_or_double(
        self, under_test: BrokerUnderTest
    ) -> None:
        super().test_claimers_in_several_processes_share_the_queue_without_loss_or_double(under_test)


def test_every_ability_that_is_off_has_its_reason() -> None:
    for feature, ability in FEATURES.items():
        assert getattr(CAPABILITIES, ability) or CAPABILITIES.reasons[ability], feature


def test_the_layout_is_that_of_celery(under_test: BrokerUnderTest) -> None:
    """As `docs/wire.md` has it."""
    under_test.producer().publish(outgoing("a", queue="mail.eu"))
    project = under_test.settings.url.rpartition("/")[2]
    base = f"http://{os.environ[EMULATOR_VARIABLE]}/v1/projects/{project}"
    with urllib.request.urlopen(f"{base}/subscriptions/kombu-mail-eu", timeout=10) as answer:
        found = json.load(answer)
    assert found["topic"] == f"projects/{project}/topics/mail.eu"
    assert found["filter"] == 'attributes.routing_key="mail.eu"'
    assert (found["expirationPolicy"]["ttl"], found["messageRetentionDuration"]) == ("86400s", "86400s")
    assert found["deadLetterPolicy"]["deadLetterTopic"].endswith("/topics/umbel.dead")


def test_a_queue_that_was_deleted_is_made_again(under_test: BrokerUnderTest) -> None:
    project = under_test.settings.url.rpartition("/")[2]
    base = f"http://{os.environ[EMULATOR_VARIABLE]}/v1/projects/{project}"
    producer = under_test.producer()

    async def scenario() -> list[str]:
        async with under_test.open() as broker:
            for kind, send in (("broker", broker.publish), ("producer", None)):
                if send is not None:
                    await send(outgoing(kind))
                else:
                    await asyncio.to_thread(producer.publish, outgoing(kind))
                for part in ("subscriptions/kombu-celery", "topics/celery"):
                    asked = urllib.request.Request(f"{base}/{part}", method="DELETE")
                    await asyncio.to_thread(lambda it: urllib.request.urlopen(it, timeout=10).close(), asked)
            await broker.publish(outgoing("again"))
            await asyncio.to_thread(producer.publish, outgoing("and again"))
        async with under_test.open() as other:
            return sorted(texts(await take_in_time(other, 2, what="what was sent afterwards")))

    assert run(scenario()) == ["again", "and again"]
