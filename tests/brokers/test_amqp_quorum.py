"""Work queues that are quorum queues, as a project declares them: the contract holds, priorities are refused.

A soak runs all of it, everyday tests what concerns messages and verdicts.
"""

import os
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from tests.brokers.contract import BrokerContract
from tests.brokers.contract_messages import MessagesContract
from tests.brokers.under_test import QUEUE, BrokerUnderTest, message, outgoing, run, take, texts
from tests.servers.rabbitmq import amqp_url
from umbel.brokers.amqp.topology import CAPABILITIES
from umbel.brokers.interface import BrokerSettings, Bury, DeclaredQueue
from umbel.errors import BrokerRefused

__all__ = ["amqp_url"]
SOAK = bool(os.environ.get("UMBEL_SOAK"))
QUORUM = DeclaredQueue(QUEUE, arguments={"x-queue-type": "quorum"})


@pytest.fixture
def under_test(amqp_url: str) -> Iterator[BrokerUnderTest]:
    # Celery's ladder of delays comes with it: 28 queues, which need not be quorum queues too.
    settings = BrokerSettings(amqp_url, declared=(QUORUM,), delayed_delivery="classic")
    under_test = BrokerUnderTest(settings, CAPABILITIES, pace=10.0)  # making those queues takes a while
    yield under_test
    under_test.close()


class TestAmqpQuorum(BrokerContract if SOAK else MessagesContract):  # type: ignore[misc]
    """What is promised of a queue is promised of this one, but for the order of what was looked at."""

    def test_peeking_takes_nothing(self, under_test: BrokerUnderTest) -> None:
        async def scenario() -> None:
            async with under_test.open() as broker:
                await broker.publish(outgoing("a", "b", "c"))
                for _ in range(2):
                    seen = await broker.peek(QUEUE, 2)
                    # A look is a return to the queue, which writes its count into the headers.
                    assert len(seen) == 2 and seen[0].message == message(*texts(seen[:1]))
                assert sorted(texts((await take(broker)).deliveries)) == ["a", "b", "c"]

        run(scenario())


def test_what_is_buried_from_a_quorum_queue_is_a_dead_letter_and_comes_back(
    under_test: BrokerUnderTest,
) -> None:
    async def scenario() -> None:
        async with under_test.open() as broker:
            await broker.publish(outgoing("a"))
            (held,) = (await take(broker)).deliveries
            assert (await broker.settle([Bury(held.tag, "no use")])).applied == 1
            (letter,) = await broker.dead_letters()
            assert (letter.queue, letter.reason) == (QUEUE, "no use")
            assert await broker.requeue_dead([letter.letter_id]) == 1
            (again,) = (await take(broker)).deliveries
            assert again.message.body == b"a"

    run(scenario())


def test_a_quorum_queue_with_priorities_is_refused_by_name(under_test: BrokerUnderTest) -> None:
    wrong = replace(QUORUM, arguments={**QUORUM.arguments, "x-max-priority": 9})
    settings = replace(under_test.settings, declared=(wrong,))

    async def scenario() -> None:
        async with BrokerUnderTest(settings, CAPABILITIES).open() as broker:
            with pytest.raises(BrokerRefused, match=f"{QUEUE!r}.*x-max-priority"):
                await take(broker)

    run(scenario())
