"""A Celery project's own queues on RabbitMQ: whoever starts first, both sides agree and messages arrive."""

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from msgspec.structs import replace

from tests.brokers.under_test import OWNER, eventually, message, outgoing, run, take, texts
from tests.interop.celery_client import CeleryClient
from tests.servers.rabbitmq import RabbitServer, shared_server
from umbel.brokers.interface import (
    Ack,
    Broker,
    BrokerSettings,
    DeclaredBinding,
    DeclaredExchange,
    DeclaredQueue,
    Delivery,
)
from umbel.brokers.registry import open_broker, open_producer
from umbel.errors import BrokerRefused
from umbel.wire.message import Outgoing, delivery_info_of, others_of

ORDERS = DeclaredExchange("orders", "topic")
NEWS = DeclaredExchange("news", "fanout", durable=False)
QUEUES = (
    DeclaredQueue("eu", bindings=(DeclaredBinding(ORDERS, "eu.#"), DeclaredBinding(ORDERS, "*.urgent"))),
    DeclaredQueue(
        "ranked",
        arguments={"x-max-priority": 9},
        bindings=(DeclaredBinding(DeclaredExchange("ranked"), "ranked"),),
    ),
    DeclaredQueue("heard", durable=False, auto_delete=True, bindings=(DeclaredBinding(NEWS),)),
)
QUORUM = DeclaredQueue(
    "sure", arguments={"x-queue-type": "quorum"}, bindings=(DeclaredBinding(ORDERS, "sure.one"),)
)
NAMES = [one.name for one in QUEUES]
# Confirmed, so that a message is in its queues when the call ends.
PROJECT = """
app = Celery(broker=url)
orders, news = Exchange('orders', 'topic'), Exchange('news', 'fanout', durable=False)
app.conf.update(task_ignore_result=True, broker_transport_options={'confirm_publish': True}, task_queues=[
    Queue('eu', bindings=[binding(orders, 'eu.#'), binding(orders, '*.urgent')]),
    Queue('ranked', Exchange('ranked'), 'ranked', max_priority=9),
    Queue('heard', news, durable=False, auto_delete=True),
])
"""
DECLARE = """
with app.connection_for_write() as connection:
    for queue in app.amqp.queues.values():
        queue(connection.default_channel).declare()
"""


@pytest.fixture(scope="module")
def celery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CeleryClient]:
    client = CeleryClient(tmp_path_factory.mktemp("celery") / "client.log")
    yield client
    client.close()


@pytest.fixture
def url() -> str:
    server: RabbitServer = shared_server()
    return server.url(server.new_vhost())


@asynccontextmanager
async def opened(settings: BrokerSettings) -> AsyncIterator[Broker]:
    broker = open_broker(settings)
    await broker.open()
    try:
        yield broker
    finally:
        await broker.close()


async def arrived(broker: Broker, count: int, queues: list[str], limit: int = 10) -> list[Delivery]:
    taken: list[Delivery] = []

    async def enough() -> bool:
        taken.extend((await take(broker, limit, queues=queues)).deliveries)
        return len(taken) >= count

    what = f"{count} messages in {queues}, of which came {taken}"
    await eventually(enough, what=what)
    return taken


@pytest.mark.parametrize("first", ["umbel", "celery"])
def test_both_declare_the_queues_of_a_project_alike(celery: CeleryClient, url: str, first: str) -> None:
    async def scenario() -> None:
        celery(PROJECT, url=url)
        if first == "celery":
            celery(DECLARE)
        async with opened(BrokerSettings(url, declared=QUEUES)) as broker:
            await take(broker, queues=NAMES)
            celery(DECLARE)
            celery("""
app.send_task('t', exchange='orders', routing_key='eu.new', task_id='topic', app_id='shop')
app.send_task('t', exchange='orders', routing_key='us.urgent', task_id='second binding')
app.send_task('t', exchange='orders', routing_key='us.new', task_id='bound by nobody')
app.send_task('t', queue='heard', task_id='fanout')
app.send_task('t', queue='ranked', task_id='direct')
""")
            found = {one.message.correlation_id: one for one in await arrived(broker, 4, NAMES)}
            assert {task_id: one.queue for task_id, one in found.items()} == {
                "topic": "eu",
                "second binding": "eu",
                "fanout": "heard",
                "direct": "ranked",
            }
            by_topic = found["topic"].message
            info = delivery_info_of(by_topic, "eu", redelivered=False)
            assert (info["exchange"], info["routing_key"]) == ("orders", "eu.new")
            assert others_of(by_topic) == {"app_id": "shop"}

    run(scenario())


def test_a_queue_with_priorities_is_served_by_them(celery: CeleryClient, url: str) -> None:
    async def scenario() -> None:
        async with opened(BrokerSettings(url, declared=QUEUES)) as broker:
            await take(broker, 0, queues=["ranked"])
            celery(PROJECT, url=url)
            celery(
                "for rank in (1, 9, 5): app.send_task('t', queue='ranked', priority=rank, task_id=str(rank))"
            )
            served: list[str] = []
            while len(served) < 3:  # one at a time, so that it is the server that chooses
                (delivery,) = await arrived(broker, 1, ["ranked"], limit=1)
                served.append(delivery.message.correlation_id)
                await broker.settle([Ack(delivery.tag)])
            assert served == ["9", "5", "1"]

    run(scenario())


def test_what_clients_delay_for_a_quorum_queue_comes_when_it_is_due(celery: CeleryClient, url: str) -> None:
    async def scenario() -> None:
        async with opened(BrokerSettings(url, declared=(QUORUM,))) as broker:
            await take(broker, queues=["sure"])
            celery(
                """
app = Celery(broker=url)
app.conf.update(task_ignore_result=True, task_queues=[
    Queue('sure', Exchange('orders', 'topic'), 'sure.one', queue_arguments={'x-queue-type': 'quorum'})])
app.send_task('t', queue='sure', task_id='now')
app.send_task('t', queue='sure', countdown=2, task_id='later')
""",
                url=url,
            )
            found = await arrived(broker, 2, ["sure"])
            assert [one.message.correlation_id for one in found] == ["now", "later"]
            later = found[1].message
            assert later.exchange and later.routing_key.endswith(".1.0.sure.one")  # it came by the ladder
            settled = await broker.settle([Ack(one.tag) for one in found])
            assert settled.applied == 2
            celery("""
from kombu.transport.native_delayed_delivery import (
    bind_queue_to_native_delayed_delivery_exchange, declare_native_delayed_delivery_exchanges_and_queues)
with app.connection_for_write() as connection:
    declare_native_delayed_delivery_exchanges_and_queues(connection, 'quorum')
    for queue in app.amqp.queues.values():
        bind_queue_to_native_delayed_delivery_exchange(connection, queue)
""")  # RabbitMQ would refuse what differs from ours

    run(scenario())


def test_a_queue_that_is_there_with_other_properties_is_one_clear_error(
    celery: CeleryClient, url: str
) -> None:
    async def scenario() -> None:
        celery(
            "with Connection(url) as c: Queue('ranked', Exchange('ranked'), 'ranked')(c).declare()", url=url
        )
        async with opened(BrokerSettings(url, declared=QUEUES)) as broker:
            with pytest.raises(BrokerRefused) as refused:
                await take(broker, queues=["ranked"])
            for words in ("'ranked'", "x-max-priority", "rabbitmqctl delete_queue ranked"):
                assert words in str(refused.value)
            await broker.publish(outgoing("a", queue="ranked"))  # what is there still takes messages

    run(scenario())


def test_messages_reach_an_exchange_and_those_that_reach_no_queue_are_refused(
    celery: CeleryClient, url: str
) -> None:
    settings = BrokerSettings(url, declared=QUEUES)
    to_nobody = Outgoing("", message("lost"), exchange="orders", routing_key="us.new")
    to_eu = Outgoing("", message("found"), exchange="orders", routing_key="eu.new")
    nowhere = Outgoing("", message("astray"), exchange="nowhere", routing_key="k")

    async def scenario() -> None:
        producer = open_producer(settings)
        async with opened(settings) as broker:
            await take(broker, queues=["eu", "celery"])
            await broker.publish([*outgoing("work"), to_eu])
            producer.publish([to_eu])
            for refused in (to_nobody, nowhere):
                with pytest.raises(BrokerRefused, match=refused.exchange):
                    await broker.publish([refused])
                with pytest.raises(BrokerRefused, match=refused.exchange):
                    producer.publish([refused])
            (work,) = [one for one in await arrived(broker, 3, ["eu", "celery"]) if one.queue == "celery"]
            settled = await broker.settle([Ack(work.tag, follow_ups=[to_nobody, to_eu, nowhere])])
            assert settled.applied == 1
            assert {one.part for one in settled.refused} == {to_nobody, nowhere}
            assert texts(await arrived(broker, 1, ["eu"])) == ["found"]
            letters = {one.message.body: one for one in await broker.dead_letters()}
            assert letters.keys() == {b"lost", b"astray"}
            celery(
                "with Connection(url) as c: Queue('us', Exchange('orders', 'topic'), 'us.*')(c).declare()",
                url=url,
            )
            assert await broker.requeue_dead([letters[b"lost"].letter_id]) == 1
            assert celery(
                """
with Connection(url) as c:
    got = Queue('us')(c).get()
    answer = got.delivery_info['exchange'], got.delivery_info['routing_key'], got.body
answer""",
                url=url,
            ) == ["orders", "us.new", "lost"]
            producer.close()

    run(scenario())


def test_what_is_sent_to_an_exchange_for_later_waits_with_who_consumes(url: str) -> None:
    async def scenario() -> None:
        async with opened(BrokerSettings(url, declared=QUEUES)) as broker:
            await take(broker, queues=["eu"])
            due = time.time() + 0.5
            await broker.publish([Outgoing("", message("a"), due, exchange="orders", routing_key="eu.new")])
            (delivery,) = await arrived(broker, 1, ["eu"])
            assert time.time() >= due
            info = delivery_info_of(delivery.message, "eu", redelivered=False)
            assert (info["exchange"], info["routing_key"]) == ("orders", "eu.new")

    run(scenario())


def test_a_floor_lets_messages_be_held_that_nobody_has_asked_for(url: str) -> None:
    async def scenario() -> None:
        plain = BrokerSettings(url)
        async with opened(replace(plain, prefetch_floor=4)) as broker:
            await broker.publish(outgoing(*"abcdef"))
            (first,) = (await take(broker, 1)).deliveries

            async def left() -> bool:
                async with opened(plain) as other:
                    depth = (await other.queues()).get("celery")
                return depth is not None and depth.ready == 2

            await eventually(left, what="all but four messages to wait in the queue")
            await broker.settle([Ack(first.tag)])
            assert await broker.forget_owner(OWNER) == 0  # they were held, not claimed
            assert texts((await take(broker)).deliveries) == list("bcdef")

    run(scenario())
