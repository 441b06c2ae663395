"""What RabbitMQ carries and a task message cannot be: it is handed on, and can be buried (N1)."""

from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests.brokers.under_test import QUEUE, BrokerUnderTest, outgoing, run, take_one
from tests.servers.rabbitmq import RabbitServer, shared_server
from umbel.brokers.amqp.blocking import BlockingLink
from umbel.brokers.amqp.envelope import Properties, encode_properties
from umbel.brokers.amqp.frames import encode_publish
from umbel.brokers.amqp.handshake import locations_from_url
from umbel.brokers.amqp.topology import CAPABILITIES
from umbel.brokers.interface import BrokerSettings, Bury
from umbel.errors import BadMessage, TooLarge, WireError
from umbel.wire.call import read_headers
from umbel.wire.message import Message, Outgoing
from umbel.wire.task import to_v2

HEADERS = {"task": "t", "id": "1"}
DEEP = '{"task":"t","id":"1","x":' + "[" * 5000 + "]" * 5000 + "}"


@pytest.fixture
def server() -> RabbitServer:
    return shared_server()


@pytest.fixture
def vhost(server: RabbitServer) -> str:
    return server.new_vhost()


@pytest.fixture
def under_test(server: RabbitServer, vhost: str) -> Iterator[BrokerUnderTest]:
    under_test = BrokerUnderTest(BrokerSettings(server.url(vhost)), CAPABILITIES)
    yield under_test
    under_test.close()


@pytest.fixture
def stranger(server: RabbitServer, vhost: str) -> Iterator[BlockingLink]:
    """Somebody else on the same broker."""
    link = BlockingLink(locations_from_url(server.url(vhost))[0], timeout_s=4.0, name="stranger")
    yield link
    link.close()


@pytest.mark.parametrize(
    "properties",
    [
        pytest.param(Properties(headers={**HEADERS, "x": b"\xff\xfe"}), id="a header that is no text"),
        pytest.param(
            Properties(headers={**HEADERS, "argsrepr": "x" * 128_000}), id="headers that fill a frame"
        ),
        pytest.param(Properties(headers={**HEADERS, "timelimit": [2**62, None]}), id="a time limit of ages"),
        pytest.param(Properties(headers={"umbel-json": DEEP}), id="an exact copy that is too deep"),
        pytest.param(Properties(headers=HEADERS, type="umbel:nan:1"), id="a mark that is no moment"),
        pytest.param(Properties(headers=HEADERS, type="umbel:1e308:0"), id="a mark of ages"),
        pytest.param(Properties(), id="no headers"),
    ],
)
def test_whatever_comes_is_handed_on_and_can_be_buried(
    under_test: BrokerUnderTest, stranger: BlockingLink, properties: Properties
) -> None:
    async def scenario() -> None:
        async with under_test.open() as broker:
            await broker.publish(outgoing("before"))
            await broker.settle([Bury((await take_one(broker)).tag, "to have the queue declared")])
            stranger.publish([encode_publish(1, "", QUEUE, encode_properties(properties), b"body")])
            delivery = await take_one(broker)
            with suppress(WireError):  # and nothing else
                read_headers(to_v2(delivery.message))
            assert (await broker.settle([Bury(delivery.tag, "r" * 4096)])).applied == 1
            letters = {one.reason[:4096]: one for one in await broker.dead_letters()}
            assert letters["r" * 4096].message.body == b"body"

    run(scenario())


def test_a_message_that_lives_longer_than_rabbitmq_can_say_is_taken(under_test: BrokerUnderTest) -> None:
    async def scenario() -> None:
        async with under_test.open() as broker:
            under_test.producer().publish(
                [Outgoing(QUEUE, Message(b'{"task":"t","id":"1"}', b"", expiration_ms=2**40))]
            )
            assert (await take_one(broker)).message.body == b""

    run(scenario())


def test_headers_that_no_frame_holds_are_refused_with_figures(under_test: BrokerUnderTest) -> None:
    headers = b'{"task":"t","id":"1","x":"%b"}' % (b"x" * 140_000)
    with pytest.raises(TooLarge, match=r"the headers have 14\d+ bytes"):
        under_test.producer().publish([Outgoing(QUEUE, Message(headers, b""))])


def test_headers_that_are_no_map_are_refused(under_test: BrokerUnderTest) -> None:
    with pytest.raises(BadMessage):
        under_test.producer().publish([Outgoing(QUEUE, Message(b"[]", b""))])
