"""What threads that send at the same time share on RabbitMQ: one connection, and not each other's faults."""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from tests.brokers.test_amqp_layout import declare
from tests.brokers.test_amqp_refused_messages import a_stranger
from tests.brokers.under_test import BrokerUnderTest, outgoing, run, take_in_time, texts
from tests.servers.rabbitmq import shared_server
from tests.servers.way import Way
from tests.waiting import DEADLINE_S, wait_until
from umbel.brokers.amqp.blocking import BlockingLink
from umbel.brokers.amqp.confirms import Unconfirmed
from umbel.brokers.amqp.frames import Method
from umbel.brokers.amqp.producer import AmqpProducer
from umbel.brokers.amqp.topology import CAPABILITIES
from umbel.brokers.interface import BrokerSettings
from umbel.errors import BrokerRefused, BrokerUnavailable
from umbel.wire.message import Outgoing

THREADS = 8


@pytest.fixture
def under_test(way: Way) -> Iterator[BrokerUnderTest]:
    url = f"amqp://guest:guest@127.0.0.1:{way.port}/{shared_server().new_vhost()}"
    under_test = BrokerUnderTest(BrokerSettings(url, connect_timeout_s=4.0), CAPABILITIES)
    yield under_test
    under_test.close()


@pytest.fixture
def producer(under_test: BrokerUnderTest) -> AmqpProducer:
    """It has sent something: its connection is open."""
    producer = under_test.producer()
    assert isinstance(producer, AmqpProducer)
    producer.publish(outgoing("first"))
    return producer


def link_of(producer: AmqpProducer) -> BlockingLink:
    assert producer._link is not None
    return producer._link


def under_way(producer: AmqpProducer) -> int:
    unconfirmed: Unconfirmed = link_of(producer)._unconfirmed
    return len(unconfirmed)


@contextmanager
def sending(producer: AmqpProducer, batches: Sequence[Sequence[Outgoing]]) -> Iterator[list[Future[None]]]:
    """Each in a thread of its own."""
    with ThreadPoolExecutor(len(batches)) as threads:
        yield [threads.submit(producer.publish, batch) for batch in batches]


def held_up(way: Way, producer: AmqpProducer, batches: Sequence[Sequence[Outgoing]]) -> list[Future[None]]:
    """All are written before the server has heard of any; how each ended."""
    way.silence()
    with sending(producer, batches) as sent:
        wait_until(lambda: under_way(producer) == len(batches), what="all of them under way")
        way.resume()
    return sent


def arrived(under_test: BrokerUnderTest, number: int, queue: str = "celery") -> list[str]:
    async def scenario() -> list[str]:
        async with under_test.open() as broker:
            taken = await take_in_time(broker, number, what="what was sent", queues=(queue,))
            return sorted(texts(taken))

    return run(scenario())


def test_threads_do_not_wait_for_each_others_confirmations(
    way: Way, under_test: BrokerUnderTest, producer: AmqpProducer
) -> None:
    names = [f"m{nth}" for nth in range(THREADS)]
    for one in held_up(way, producer, [outgoing(name) for name in names]):
        one.result()
    assert under_way(producer) == 0
    assert arrived(under_test, THREADS + 1) == ["first", *names]


def test_a_refusal_concerns_the_thread_that_sent_the_message(
    way: Way, under_test: BrokerUnderTest, producer: AmqpProducer
) -> None:
    with a_stranger(under_test) as link:
        declare(link, "small", max_length=1, overflow="reject-publish")
    producer.publish(outgoing("full", queue="small"))
    batches = [outgoing(f"m{nth}", queue="small" if nth % 2 else "celery") for nth in range(THREADS)]
    sent = held_up(way, producer, batches)
    refused = [nth for nth, one in enumerate(sent) if isinstance(one.exception(), BrokerRefused)]
    assert refused == [nth for nth in range(THREADS) if nth % 2]
    assert all(one.exception() is None for one in sent[::2])


def test_what_comes_back_from_a_deleted_queue_is_sent_again_by_its_thread(
    way: Way, under_test: BrokerUnderTest, producer: AmqpProducer
) -> None:
    with a_stranger(under_test) as link:
        link.call(Method.QUEUE_DELETE, 0, "celery", False, False, False)
    names = [f"m{nth}" for nth in range(THREADS)]
    for one in held_up(way, producer, [outgoing(name) for name in names]):
        one.result()
    assert arrived(under_test, THREADS) == names


def test_a_new_queue_is_made_beside_what_others_send(
    under_test: BrokerUnderTest, producer: AmqpProducer
) -> None:
    """That asks whether it is there, and the server says no by closing the channel."""
    together = threading.Barrier(THREADS)

    def send(nth: int) -> None:
        together.wait()
        for number in range(20):
            producer.publish(outgoing(f"{nth}.{number}"))
            producer.publish(outgoing("new", queue=f"q{nth}.{number % 2}"))

    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(send, range(THREADS)))
    assert len(arrived(under_test, THREADS * 20 + 1)) == THREADS * 20 + 1
    assert arrived(under_test, 10, "q3.1") == ["new"] * 10


def test_every_thread_hears_that_the_connection_was_lost(way: Way, producer: AmqpProducer) -> None:
    way.silence()
    with sending(producer, [outgoing(f"m{nth}") for nth in range(THREADS)]) as sent:
        wait_until(lambda: under_way(producer) == THREADS, what="all of them under way")
        way.hold()
        for one in sent:
            with pytest.raises(BrokerUnavailable, match="was lost"):
                one.result(DEADLINE_S)
    way.resume()
    producer.publish(outgoing("after"))


def test_an_answer_that_is_overdue_ends_the_wait_of_all(
    way: Way, producer: AmqpProducer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who comes when it is given up already finds no other connection."""
    monkeypatch.setattr("umbel.brokers.amqp.blocking.REPLY_TIMEOUT_S", 0.2)
    link = link_of(producer)
    way.silence()
    with sending(producer, [outgoing(f"m{nth}") for nth in range(THREADS)]) as sent:
        for one in sent:
            with pytest.raises(BrokerUnavailable):
                one.result(2 * DEADLINE_S)
    assert "no answer in time" in str(link.error)
    way.resume()
    monkeypatch.undo()
    producer.publish(outgoing("after"))


def test_a_batch_larger_than_the_socket_takes_is_sent_beside_others(
    under_test: BrokerUnderTest, producer: AmqpProducer
) -> None:
    large = [
        [Outgoing("large", one.message, 0.0) for one in outgoing(*[f"{nth}" + "x" * 200] * 4000)]
        for nth in range(2)
    ]
    with sending(producer, [*large, outgoing("small")]) as sent:
        for one in sent:
            one.result()
    assert len(arrived(under_test, 8000, "large")) == 8000


def test_a_link_that_was_closed_says_so_to_who_reads_on(under_test: BrokerUnderTest) -> None:
    with a_stranger(under_test) as link:
        link.abandon()
        with pytest.raises(BrokerUnavailable, match="was lost"):
            link.receive(None)


@contextmanager
def on_signal(work: Callable[[], None]) -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, lambda *_: work())
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_signals_handler_can_send_while_the_thread_it_interrupts_does(
    way: Way, under_test: BrokerUnderTest, producer: AmqpProducer
) -> None:
    """On a connection of its own: what it interrupted cannot go on before it has ended."""
    handled = list[str]()

    def handler() -> None:
        way.resume()
        producer.publish(outgoing("handled"))
        handled.append("done")

    def interrupt() -> None:
        wait_until(lambda: under_way(producer), what="the main thread's message under way")
        os.kill(os.getpid(), signal.SIGUSR1)

    way.silence()
    with on_signal(handler), ThreadPoolExecutor(1) as threads:
        interrupting = threads.submit(interrupt)
        producer.publish(outgoing("interrupted"))
        interrupting.result()
    assert handled == ["done"]
    assert arrived(under_test, 3) == ["first", "handled", "interrupted"]
