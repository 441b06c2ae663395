"""A Celery project's own layout on Redis: its lists, prefixes, exchanges, as the real client uses them."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.brokers.under_test import OWNER, message, outgoing, result, run, take, texts
from tests.interop.celery_client import CeleryClient
from tests.servers.redis import RedisServer, redis_server, redis_url
from umbel.backends.registry import open_backend
from umbel.brokers.interface import (
    Ack,
    Broker,
    BrokerSettings,
    DeclaredBinding,
    DeclaredExchange,
    DeclaredQueue,
    Return,
)
from umbel.brokers.registry import open_broker, open_producer
from umbel.errors import BrokerRefused, NotSupported
from umbel.wire.message import Outgoing, delivery_info_of, others_of

__all__ = ["redis_server", "redis_url"]  # fixtures

ORDERS = DeclaredExchange("orders", "topic")
QUEUES = (
    DeclaredQueue("eu", bindings=(DeclaredBinding(ORDERS, "eu.#"), DeclaredBinding(ORDERS, "*.urgent"))),
    DeclaredQueue("all", bindings=(DeclaredBinding(ORDERS, "#"),)),
    DeclaredQueue("post", bindings=(DeclaredBinding(DeclaredExchange("mail"), "letter"),)),
    DeclaredQueue("heard", bindings=(DeclaredBinding(DeclaredExchange("news", "fanout")),)),
)
NAMES = ["eu", "all", "post"]
LAYOUT: dict[str, Any] = {
    "priority_steps": tuple(range(10)),
    "sep": ":",
    "key_prefix": "shop:",
    "result_key_prefix": "results_",
}
PROJECT = """
app = Celery(broker=url, backend=url)
app.conf.update(broker_transport_options=options, result_backend_transport_options=result_options)
orders = Exchange('orders', 'topic')
app.conf.task_queues = [
    Queue('eu', bindings=[binding(orders, 'eu.#'), binding(orders, '*.urgent')]),
    Queue('all', orders, '#'), Queue('post', Exchange('mail'), 'letter'),
    Queue('celery', Exchange('celery'), 'celery'), Queue('a:b', Exchange('a'), 'a'),
]
"""
OPTIONS = {"priority_steps": list(range(10)), "sep": ":", "global_keyprefix": "shop:"}
GET = """
with app.connection_for_read() as connection:
    got = Queue(name)(connection.default_channel).get(no_ack=True)
    answer = got and [got.properties['correlation_id'], got.delivery_info['exchange'], got.delivery_info['routing_key']]
answer
"""  # noqa: E501


@pytest.fixture(scope="module")
def celery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CeleryClient]:
    client = CeleryClient(tmp_path_factory.mktemp("celery") / "client.log")
    yield client
    client.close()


@asynccontextmanager
async def opened(settings: BrokerSettings) -> AsyncIterator[Broker]:
    broker = open_broker(settings)
    await broker.open()
    try:
        yield broker
    finally:
        await broker.close()


@pytest.mark.parametrize("first", ["umbel", "celery"])
def test_what_a_client_publishes_to_an_exchange_reaches_the_queues(
    celery: CeleryClient, redis_url: str, redis_server: RedisServer, first: str
) -> None:
    async def scenario() -> None:
        celery(PROJECT, url=redis_url, options={}, result_options={})
        if first == "celery":
            celery("""
with app.connection_for_write() as connection:
    for queue in app.amqp.queues.values():
        if queue.name != 'a:b':
            queue(connection.default_channel).declare()
""")
        async with opened(BrokerSettings(redis_url, declared=QUEUES)) as broker:
            await take(broker, queues=NAMES)
            celery("""
with app.connection_for_write() as connection:
    channel = connection.default_channel
    orders(channel).declare()  # the client knows its type; no queue of its own
    Exchange('mail')(channel).declare()
    producer = kombu.Producer(channel)
    producer.publish([], exchange='orders', routing_key='us.urgent', correlation_id='urgent', app_id='shop')
    producer.publish([], exchange='orders', routing_key='us.new', correlation_id='new')
    producer.publish([], exchange='mail', routing_key='letter', correlation_id='letter')
    producer.publish([], exchange='mail', routing_key='parcel', correlation_id='dropped')
""")
            found = (await take(broker, queues=NAMES)).deliveries
            assert sorted((one.queue, one.message.correlation_id) for one in found) == [
                ("all", "new"),
                ("all", "urgent"),
                ("eu", "urgent"),
                ("post", "letter"),
            ]
            (urgent,) = [one for one in found if one.queue == "eu"]
            assert others_of(urgent.message) == {"app_id": "shop"}
            info = delivery_info_of(urgent.message, "eu", redelivered=False)
            assert (info["exchange"], info["routing_key"]) == ("orders", "us.urgent")
        if first == "celery":  # we bind in its own words
            members = redis_server.ask("SMEMBERS", "_kombu.binding.orders")
            assert isinstance(members, list)
            assert len(members) == 3

    run(scenario())


def test_ten_steps_another_separator_and_two_prefixes(celery: CeleryClient, redis_url: str) -> None:
    settings = BrokerSettings(redis_url, **LAYOUT)

    async def scenario() -> None:
        celery(PROJECT, url=redis_url, options=OPTIONS, result_options={"global_keyprefix": "results"})
        celery("""
for step in (7, 4, 0, 9): app.send_task('t', queue='celery', priority=step, task_id=str(step))
app.send_task('t', queue='a:b', priority=5, task_id='odd name')
""")
        async with opened(settings) as broker:
            found = (await take(broker, queues=["celery", "a:b"])).deliveries
            assert [(one.queue, one.message.correlation_id) for one in found] == [
                ("celery", "0"),
                ("celery", "4"),
                ("a:b", "odd name"),
                ("celery", "7"),
                ("celery", "9"),
            ]
            odd, seven = found[2], found[3]
            await broker.settle([Return(odd.tag, not_before=0.001), Return(seven.tag)])
            depths = await broker.queues()
            assert (depths["a:b"].ready, depths["celery"].ready, depths["celery"].claimed) == (1, 1, 3)
            await broker.settle([Ack(found[0].tag, results=[result("0", value="42")])])
            await broker.forget_owner(OWNER)
        producer = open_producer(settings)
        producer.publish(outgoing("ours", queue="celery", priority=8))
        producer.close()
        assert celery("app.AsyncResult('0').get(timeout=10)") == "42"
        left = [celery(GET, name="celery")[0] for _ in range(4)]
        assert left == ["4", "7", "ours", "9"]

    run(scenario())
    backend = open_backend(redis_url, settings)
    assert backend.read(["0"])["0"].status == "SUCCESS"
    backend.close()


def test_messages_reach_an_exchange_and_those_that_reach_no_queue_are_refused(
    celery: CeleryClient, redis_url: str
) -> None:
    settings = BrokerSettings(redis_url, declared=QUEUES)
    both = Outgoing("", message("both"), exchange="orders", routing_key="eu.new")
    lost = Outgoing("", message("lost"), exchange="mail", routing_key="parcel")
    heard = Outgoing("", message("heard"), exchange="news")

    async def scenario() -> None:
        producer = open_producer(settings)
        async with opened(settings) as broker:
            await take(broker, queues=NAMES)
            await broker.publish([*outgoing("work"), both])
            producer.publish([both])
            for refused in (lost, heard):
                with pytest.raises(BrokerRefused, match=refused.exchange):
                    await broker.publish([both, refused])
                with pytest.raises(BrokerRefused, match=refused.exchange):
                    producer.publish([refused])
            found = (await take(broker, queues=[*NAMES, "celery"])).deliveries
            assert sorted(one.queue for one in found) == ["all", "all", "celery", "eu", "eu"]
            (work,) = [one for one in found if one.queue == "celery"]
            settled = await broker.settle([Ack(work.tag, follow_ups=[lost, both])])
            assert settled.applied == 1
            assert [one.part for one in settled.refused] == [lost]
            assert texts((await take(broker, queues=["eu"])).deliveries) == ["both"]
            (letter,) = await broker.dead_letters()
            celery(PROJECT, url=redis_url, options={}, result_options={})
            celery("""
with app.connection_for_write() as connection:
    Queue('parcels', Exchange('mail'), 'parcel')(connection.default_channel).declare()
""")
            assert await broker.requeue_dead([letter.letter_id]) == 1
            assert celery(GET, name="parcels") == ["lost", "mail", "parcel"]
            with pytest.raises(NotSupported, match="fanout exchange 'news'"):
                await take(broker, queues=["heard"])
        producer.close()

    run(scenario())
