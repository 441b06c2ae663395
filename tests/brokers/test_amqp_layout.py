"""What stands on RabbitMQ: declarations as Celery has them, and queues that others made differently."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest

from tests.brokers.under_test import OWNER, QUEUE, BrokerUnderTest, eventually, outgoing, run, take, texts
from tests.servers.rabbitmq import RabbitServer, shared_server
from tests.waiting import wait_until
from umbel.brokers.amqp import topology
from umbel.brokers.amqp.blocking import BlockingLink
from umbel.brokers.amqp.envelope import Properties, decode_properties, encode_properties
from umbel.brokers.amqp.frames import Incoming, Method, Table, encode_publish
from umbel.brokers.amqp.handshake import ChannelClosed, locations_from_url
from umbel.brokers.amqp.topology import CAPABILITIES
from umbel.brokers.interface import Ack, Broadcast, BrokerSettings, Bury, Delivery, Evidence
from umbel.errors import BrokerError
from umbel.wire.message import Message, Outgoing


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


def declare(link: BlockingLink, queue: str, **arguments: int | str) -> None:
    link.call(Method.QUEUE_DECLARE, 0, queue, False, True, False, False, False, _table(arguments))


def get(link: BlockingLink, queue: str) -> Incoming:
    return link.call(Method.BASIC_GET, 0, queue, True)


def _table(arguments: dict[str, int | str]) -> Table:
    return {f"x-{name.replace('_', '-')}": value for name, value in arguments.items()}


def test_exchanges_and_queues_are_declared_as_celery_declares_them(
    server: RabbitServer, vhost: str, under_test: BrokerUnderTest
) -> None:
    async def listed(what: str, *columns: str) -> set[str]:
        """Asked beside the loop: a connection that is silent for too long is closed, and its queues go."""
        command = (what, "-p", vhost, *columns, "--no-table-headers")
        lines = (await asyncio.to_thread(server.control, *command)).splitlines()
        return {line for line in lines if "umbel." not in line and "amq." not in line and line.strip()}

    async def scenario() -> None:
        async with (
            under_test.open() as broker,
            broker.subscribe("celeryev", ["worker.#"]),
            broker.subscribe("celery.pidbox", ["ada@here"]),
            broker.subscribe("reply.celery.pidbox", ["an-oid"]),
        ):
            await broker.publish(outgoing("a"))

            async def of_all_queues() -> set[str]:  # one whose process is too busy to answer is left out
                found = await listed(
                    "list_queues", "name", "durable", "auto_delete", "exclusive", "arguments"
                )
                return found if len(found) >= 4 else set()

            queues = await eventually(of_all_queues, what="every queue to be listed")
            exchanges = await listed("list_exchanges", "name", "type", "durable", "auto_delete", "arguments")
            bindings = await listed("list_bindings", "source_name", "destination_name", "routing_key")
        (of_events,) = {line.split("\t")[0] for line in queues if line.startswith("celeryev.")}
        mailbox = '[{"x-expires",10000},{"x-message-ttl",300000}]'
        assert queues == {
            "celery\ttrue\tfalse\tfalse\t[]",
            f'{of_events}\tfalse\ttrue\ttrue\t[{{"x-expires",60000}},{{"x-message-ttl",5000}}]',
            f"ada@here.celery.pidbox\tfalse\ttrue\ttrue\t{mailbox}",
            f"an-oid.reply.celery.pidbox\tfalse\ttrue\ttrue\t{mailbox}",
        }
        assert exchanges >= {
            "celery\tdirect\ttrue\tfalse\t[]",
            "celeryev\ttopic\ttrue\tfalse\t[]",
            "celery.pidbox\tfanout\tfalse\tfalse\t[]",
            "reply.celery.pidbox\tdirect\tfalse\tfalse\t[]",
        }
        assert bindings >= {
            "celery\tcelery\tcelery",
            f"celeryev\t{of_events}\tworker.#",
            "celery.pidbox\tada@here.celery.pidbox\t",
            "reply.celery.pidbox\tan-oid.reply.celery.pidbox\tan-oid",
        }

    run(scenario())


def test_a_task_is_on_the_wire_as_celery_writes_it(
    under_test: BrokerUnderTest, stranger: BlockingLink
) -> None:
    headers = (
        b'{"lang":"py","task":"t","id":"i","retries":0,"timelimit":[null,2.5],"stamps":{},"n":1099511627776}'
    )
    message = Message(headers, b"[[],{},{}]", correlation_id="i", reply_to="me", expiration_ms=60_000)
    under_test.producer().publish([Outgoing(QUEUE, message)])
    incoming = get(stranger, QUEUE)
    assert incoming.body == message.body
    assert decode_properties(incoming.properties) == Properties(
        content_type="application/json",
        content_encoding="utf-8",
        headers={
            "lang": "py",
            "task": "t",
            "id": "i",
            "retries": 0,
            "timelimit": [None, 2.5],
            "stamps": {},
            "n": 2**40,
        },
        delivery_mode=2,
        priority=0,
        correlation_id="i",
        reply_to="me",
        expiration="60000",
    )


def test_an_event_is_on_the_wire_as_celery_writes_it(
    under_test: BrokerUnderTest, stranger: BlockingLink
) -> None:
    for method, fields in topology.Queue(
        "heard", exchange=topology.exchange("celeryev"), keys=("#",)
    ).calls():
        stranger.call(method, *fields)
    event = Broadcast("celeryev", "worker.online", b"{}", b'{"hostname":"ada@here"}')
    under_test.producer().broadcast([event], ttl_s=5.0)
    properties = decode_properties(get(stranger, "heard").properties)
    assert (properties.delivery_mode, properties.priority) == (1, 0)
    assert properties.headers == {"hostname": "ada@here"}


def test_numbers_that_no_table_can_hold_come_back_exactly(under_test: BrokerUnderTest) -> None:
    message = Message(b'{"task":"t","n":[{"deep":123456789012345678901234567890}]}', b"")

    async def scenario() -> None:
        async with under_test.open() as broker:
            await broker.publish([Outgoing(QUEUE, message)])
            (delivery,) = (await take(broker)).deliveries
            assert delivery.message == message

    run(scenario())


def test_stale_json_that_a_celery_worker_handed_on_is_not_believed(
    under_test: BrokerUnderTest, stranger: BlockingLink
) -> None:
    declare(stranger, QUEUE)
    properties = Properties(headers={"task": "t", "retries": 2, "umbel-json": '{"task": "t", "retries": 1}'})
    stranger.publish([encode_publish(1, "", QUEUE, encode_properties(properties), b"")])

    async def scenario() -> None:
        async with under_test.open() as broker:
            (delivery,) = (await take(broker)).deliveries
            assert delivery.message.headers == b'{"task":"t","retries":2}'

    run(scenario())


def test_a_message_that_is_no_amqp_inside_is_handed_over_to_be_buried(
    under_test: BrokerUnderTest, stranger: BlockingLink
) -> None:
    declare(stranger, QUEUE)
    stranger.publish([encode_publish(1, "", QUEUE, encode_properties(Properties(type="umbel:x:y")), b"\xff")])

    async def scenario() -> None:
        async with under_test.open() as broker:
            (delivery,) = (await take(broker)).deliveries
            assert (delivery.message.headers, delivery.message.body) == (b"{}", b"\xff")

    run(scenario())


def test_a_queue_made_with_priorities_is_used_as_it_is_and_orders_everything(
    under_test: BrokerUnderTest, stranger: BlockingLink
) -> None:
    declare(stranger, QUEUE, max_priority=10)

    async def scenario() -> None:
        async with under_test.open() as broker:
            for priority in (1, 5, 9, 5):
                await broker.publish(outgoing(str(priority), priority=priority))
            taken = [texts((await take(broker, 1)).deliveries) for _ in range(4)]
            assert taken == [["9"], ["5"], ["5"], ["1"]]

    run(scenario())


def test_what_is_rejected_goes_where_its_queue_sends_dead_letters_with_all_it_brings(
    under_test: BrokerUnderTest, stranger: BlockingLink
) -> None:
    """And the others of the batch are acknowledged."""
    declare(stranger, "graves")
    declare(stranger, QUEUE, dead_letter_exchange="", dead_letter_routing_key="graves")

    async def scenario() -> None:
        async with under_test.open() as broker:
            await broker.publish(outgoing("a", "b", "c"))
            a, b, c = (await take(broker)).deliveries
            errback = outgoing("errback", queue="other")
            burial = Bury(b.tag, "why", follow_ups=errback, by_queue=True)
            settled = await broker.settle([Ack(a.tag), burial, Ack(c.tag)])
            assert (settled.applied, settled.conflicts) == (3, frozenset())
            assert texts((await take(broker, queues=["other"])).deliveries) == ["errback"]
            assert await broker.dead_letters() == []

    run(scenario())
    wait_until(lambda: get(stranger, "graves").body == b"b", what="the dead letter")
    assert get(stranger, "graves").body == b""


def test_a_quorum_queue_serves_a_demand_that_grows(
    under_test: BrokerUnderTest, stranger: BlockingLink
) -> None:
    declare(stranger, QUEUE, queue_type="quorum")
    sent = [str(number) for number in range(30)]

    async def scenario() -> None:
        async with under_test.open() as broker:
            await broker.publish(outgoing(*sent))
            seen: list[Delivery] = []

            async def all_seen() -> bool:
                seen.extend((await take(broker, 1 + len(seen))).deliveries)
                return len(seen) == len(sent)

            await eventually(all_seen, what="every message")
            assert texts(seen) == sent
            assert (await broker.settle([Ack(one.tag) for one in seen])).applied == len(sent)
            assert await broker.forget_owner(OWNER) == 0

    run(scenario())


def test_a_queue_deleted_by_somebody_is_made_again_and_the_message_kept(
    under_test: BrokerUnderTest, stranger: BlockingLink
) -> None:
    producer = under_test.producer()
    producer.publish(outgoing("gone"))
    stranger.call(Method.QUEUE_DELETE, 0, QUEUE, False, False, False)
    producer.publish(outgoing("kept"))

    async def scenario() -> None:
        async with under_test.open() as broker:
            assert texts((await take(broker)).deliveries) == ["kept"]
            stranger.call(Method.QUEUE_DELETE, 0, QUEUE, False, False, False)
            await broker.publish(outgoing("kept too"))

            async def taken() -> Sequence[str]:
                return texts((await take(broker)).deliveries)

            assert await eventually(taken, what="the message after the deletion") == ["kept too"]

    run(scenario())


def test_a_message_that_comes_back_is_found_by_who_sent_it_and_not_by_who_publishes_beside(
    under_test: BrokerUnderTest, stranger: BlockingLink
) -> None:
    """What comes back names no batch: the events that a worker sends at the same time must not take it."""
    event = Broadcast("celeryev", "task.sent", b"{}")

    async def scenario() -> None:
        async with under_test.open() as broker:
            await broker.publish(outgoing("gone"))
            for _ in range(20):
                stranger.call(Method.QUEUE_DELETE, 0, QUEUE, False, False, False)
                await asyncio.gather(
                    broker.broadcast([event], ttl_s=5.0),
                    broker.publish(outgoing("kept")),
                    *(broker.broadcast([event], ttl_s=5.0) for _ in range(5)),
                )
                method, fields = topology.passive(QUEUE)
                assert stranger.call(method, *fields).fields[1] == 1

    run(scenario())


def test_a_queue_deleted_under_its_consumer_is_made_again(
    under_test: BrokerUnderTest, stranger: BlockingLink
) -> None:
    async def scenario() -> None:
        async with under_test.open() as broker:
            await take(broker)
            stranger.call(Method.QUEUE_DELETE, 0, QUEUE, False, False, False)

            async def there() -> bool:
                try:
                    await take(broker)
                except BrokerError:
                    return False
                method, fields = topology.passive(QUEUE)
                try:
                    stranger.call(method, *fields)
                except ChannelClosed:
                    stranger.reopen_channel()
                    return False
                return True

            await eventually(there, what="the queue")
            await broker.publish(outgoing("a"))
            assert texts((await take(broker)).deliveries) == ["a"]

    run(scenario())


def test_delays_are_the_longest_steps_that_do_not_overshoot() -> None:
    assert topology.delay_step_ms(0.049) is None
    assert topology.delay_step_ms(0.05) == 50
    assert topology.delay_step_ms(0.9) == 800
    assert topology.delay_step_ms(10 * 365 * 86_400.0) == topology.DELAY_STEPS_MS[-1]
    assert all(later == 4 * step for step, later in pairwise(topology.DELAY_STEPS_MS))


def test_a_delayed_message_goes_down_the_ladder_and_is_never_early(under_test: BrokerUnderTest) -> None:
    async def scenario() -> None:
        async with under_test.open() as broker:
            due = time.time() + 0.5  # 200 ms twice, 50 ms, and the rest is held
            await broker.publish(outgoing("later", not_before=due))

            async def claimed() -> Sequence[Delivery]:
                deliveries = (await take(broker)).deliveries
                if not deliveries:
                    await broker.wait_ready([QUEUE], 1.0)
                return deliveries

            (delivery,) = await eventually(claimed, what="the delayed message")
            assert due <= time.time() < due + 2.0
            assert not delivery.redelivered
            assert delivery.message == outgoing("later")[0].message

    run(scenario())


def test_a_node_is_gone_when_its_mailbox_is_and_silent_when_nobody_listens_there(
    under_test: BrokerUnderTest, stranger: BlockingLink
) -> None:
    mailbox = topology.mailbox("old@celery")  # not exclusive, as Celery before 5.7 had it

    async def scenario() -> None:
        async with under_test.open() as broker:
            assert await broker.probe("nobody@here") is Evidence.GONE
            stranger.call(Method.QUEUE_DECLARE, 0, mailbox, False, False, False, True, False, {})
            assert await broker.probe("old@celery") is Evidence.UNKNOWN
            stranger.call(Method.BASIC_CONSUME, 0, mailbox, "c", False, False, False, False, {})
            assert await broker.probe("old@celery") is Evidence.ALIVE

    run(scenario())
