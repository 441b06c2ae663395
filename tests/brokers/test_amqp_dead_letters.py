"""Dead letters on RabbitMQ: looked at and requeued in portions, however many there are."""

import os
from collections.abc import Iterator, Sequence
from time import time
from typing import Any

import pytest

from tests.brokers.under_test import QUEUE, BrokerUnderTest, eventually, message, outgoing, run, take, texts
from tests.servers.rabbitmq import shared_server
from umbel.brokers.amqp import dead_letters, publishing
from umbel.brokers.amqp.producer import AmqpProducer
from umbel.brokers.amqp.publishing import Post, Refusals
from umbel.brokers.amqp.session import Session
from umbel.brokers.amqp.topology import CAPABILITIES
from umbel.brokers.interface import Ack, Broker, BrokerSettings, Refused
from umbel.errors import BrokerRefused, BrokerUnavailable

MANY = 10_000 if os.environ.get("UMBEL_SOAK") else 500


@pytest.fixture
def under_test() -> Iterator[BrokerUnderTest]:
    server = shared_server()
    under_test = BrokerUnderTest(BrokerSettings(server.url(server.new_vhost())), CAPABILITIES)
    yield under_test
    under_test.close()


async def bury(broker: Broker, *names: str, queue: str = QUEUE) -> None:
    await broker.bury([Refused(one, "why") for one in outgoing(*names, queue=queue)])


async def letters_of(broker: Broker) -> list[str]:
    return [letter.message.body.decode() for letter in await broker.dead_letters()]


async def ids_of(broker: Broker, *names: str) -> list[int | str]:
    letters = await broker.dead_letters(MANY)
    return [one.letter_id for one in letters if not names or one.message.body.decode() in names]


def test_what_a_cut_leaves_between_two_portions_is_requeued_later_and_nothing_twice(
    under_test: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letters, "PORTION", 3)
    portions: list[int] = []
    try_send = Session.try_send

    async def cut_the_third(session: Session, posts: Sequence[Post]) -> Refusals:
        portions.append(len(posts) // 2)  # each letter sends a record of its starts, too
        if len(portions) == 3:
            session.link.abort("cut by the test")
            raise BrokerUnavailable("cut by the test")
        return await try_send(session, posts)

    async def scenario() -> None:
        async with under_test.open() as broker:
            await bury(broker, *"abcdefgh")
            ids = await ids_of(broker)
            monkeypatch.setattr(Session, "try_send", cut_the_third)
            with pytest.raises(BrokerUnavailable):
                await broker.requeue_dead(ids)
            assert portions == [3, 3, 2]

            async def left() -> bool | None:
                return await letters_of(broker) == ["g", "h"] or None

            await eventually(left, what="what was not requeued is a dead letter again")
            assert await broker.requeue_dead(ids) == 2
            assert texts((await take(broker, 20)).deliveries) == list("abcdefgh")

    run(scenario())


def test_letters_that_are_not_named_stay_in_their_order(
    under_test: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letters, "PORTION", 3)

    async def scenario() -> None:
        async with under_test.open() as broker:
            await bury(broker, *"abcdefgh")
            assert await broker.requeue_dead(await ids_of(broker, "c", "h")) == 2
            assert await letters_of(broker) == list("abdefg")
            assert texts((await take(broker, 20)).deliveries) == ["c", "h"]

    run(scenario())


def test_a_letter_that_its_queue_refuses_stays_and_the_others_are_requeued(
    under_test: BrokerUnderTest,
) -> None:
    async def scenario() -> None:
        async with under_test.open() as broker:
            await bury(broker, "refused", queue="amq.closed")
            await bury(broker, "good")
            with pytest.raises(BrokerRefused, match="1 dead letters requeued, 1 refused") as raised:
                await broker.requeue_dead(await ids_of(broker))
            assert raised.value.places == (0,)
            assert await letters_of(broker) == ["refused"]
            assert texts((await take(broker, 20)).deliveries) == ["good"]

    run(scenario())


def test_a_letter_with_headers_that_nobody_of_ours_wrote_is_listed_with_the_others(
    under_test: BrokerUnderTest,
) -> None:
    odd: list[tuple[Any, Any]] = [("many", "x"), (-1, -1.0), (2**62, 1e300), (None, None), ([], {})]
    stranger = under_test.producer()
    assert isinstance(stranger, AmqpProducer)
    letters = [
        publishing.dead_letter(QUEUE, message(f"odd {place}"), "why", starts, at)
        for place, (starts, at) in enumerate(odd)
    ]
    stranger.send(letters)

    async def scenario() -> None:
        async with under_test.open() as broker:
            await bury(broker, "good")
            found = await broker.dead_letters()
            assert {one.message.body.decode() for one in found} == {"good", *(f"odd {n}" for n in range(5))}
            assert {one.starts for one in found} == {0}
            assert all(0 <= one.buried_at < time() + 60 for one in found)
            assert await broker.requeue_dead(await ids_of(broker, "good", "odd 0")) == 2

    run(scenario())


def test_many_letters_are_listed_and_requeued_at_once(under_test: BrokerUnderTest) -> None:
    """10,000 that were put back by their names kept RabbitMQ silent for 38 s, and the link was given up."""
    names = [str(number) for number in range(MANY)]

    async def scenario() -> None:
        async with under_test.open() as broker:
            await bury(broker, *names)
            assert len(await broker.dead_letters(MANY)) == MANY
            assert await broker.requeue_dead(await ids_of(broker)) == MANY
            assert await broker.dead_letters() == []
            taken: list[str] = []
            while deliveries := (await take(broker, 500)).deliveries:
                taken += texts(deliveries)
                await broker.settle([Ack(one.tag) for one in deliveries])
            assert taken == names

    run(scenario())
