"""Google Pub/Sub keeps the promises that it declares, on Google's emulator, and refuses the others."""

import asyncio
import json
import os
import socket
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.brokers.contract import BrokerContract
from tests.brokers.under_test import (
    LONG_S,
    OWNER,
    QUEUE,
    BrokerUnderTest,
    eventually,
    message,
    outgoing,
    run,
    take,
    take_in_time,
    texts,
)
from tests.servers.pubsub import pubsub_url, subscriptions
from tests.waiting import until
from umbel.brokers.gcpubsub.api import look_at
from umbel.brokers.gcpubsub.broker import PubsubBroker
from umbel.brokers.gcpubsub.capabilities import CAPABILITIES
from umbel.brokers.gcpubsub.http import EMULATOR_VARIABLE, Answer
from umbel.brokers.gcpubsub.producer import PubsubProducer
from umbel.brokers.gcpubsub.service import Link, Service
from umbel.brokers.interface import Broadcast, Broker, BrokerSettings, DeadLetter, Refused
from umbel.errors import BrokerRefused
from umbel.wire.control import REPLY_EXCHANGE, REQUEST_EXCHANGE
from umbel.wire.message import Outgoing

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


@pytest.mark.parametrize("cut_off", [1, 2, 3])
def test_a_listener_leaves_nothing_behind_whenever_it_is_cancelled(
    cut_off: int, under_test: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is in the middle of its first, second or third request; the broker is closed at once."""
    listening: list[asyncio.Task[None]] = []
    calls = 0

    async def read_or_cancel(link: Link, reader: asyncio.StreamReader) -> Answer:
        nonlocal calls
        if listening:  # the request is on its way
            calls += 1
            if calls == cut_off:
                listening[0].cancel()
        return await read(link, reader)

    async def listen(broker: Broker) -> None:
        async with broker.subscribe(REPLY_EXCHANGE, ["somebody"]) as heard:
            async for _ in heard:
                pass

    async def scenario() -> None:
        async with under_test.open() as broker:
            before = await asyncio.to_thread(subscriptions, under_test.settings.url)
            listening.append(asyncio.create_task(listen(broker)))
            await until(lambda: calls >= cut_off, "the listener to be cancelled")
        assert await asyncio.to_thread(subscriptions, under_test.settings.url) == before

    read = Link._read
    monkeypatch.setattr(Link, "_read", read_or_cancel)
    run(scenario())


def test_a_listener_that_goes_on_is_removed_when_its_broker_is_closed(under_test: BrokerUnderTest) -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as kept:
            async with under_test.open() as broker:
                before = await asyncio.to_thread(subscriptions, under_test.settings.url)
                await kept.enter_async_context(broker.subscribe(REPLY_EXCHANGE, ["somebody"]))
                assert await asyncio.to_thread(subscriptions, under_test.settings.url) > before
            assert await asyncio.to_thread(subscriptions, under_test.settings.url) == before

    run(scenario())


@pytest.mark.parametrize("leaves", [True, False])
def test_a_broker_that_is_closed_leaves_no_pull_waiting_for_a_message(
    leaves: bool, under_test: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The emulator would hand it the next message, which then waits for its deadline."""
    cut_off: list[str] = []

    def note(link: Link, streams: Any, answer: Answer | None) -> None:
        if answer is None:
            cut_off.append("pull")
        put_back(link, streams, answer)

    async def scenario() -> None:
        async with under_test.open() as stopping:
            assert not (await take(stopping)).deliveries
            waiting = asyncio.create_task(stopping.wait_ready([QUEUE], LONG_S, owner=OWNER))
            await until(lambda: pulls_waiting(stopping), "a pull that waits")
            waiting.cancel()
            if leaves:
                await stopping.leave_queue(OWNER, QUEUE)
        assert cut_off == []
        async with under_test.open() as other:
            await other.publish(outgoing("next"))
            assert texts(await take_in_time(other, 1, what="the next message")) == ["next"]

    put_back = Link._put_back
    monkeypatch.setattr(Link, "_put_back", note)
    run(scenario())


def test_what_a_waiting_pull_brings_to_a_worker_that_has_left_goes_back_at_once(
    under_test: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_back: list[int] = []

    async def note(service: Service, subscription: str, ids: Sequence[str], deadline_s: int) -> Any:
        given_back.append(deadline_s)
        return await set_deadline(service, subscription, ids, deadline_s)

    async def scenario() -> None:
        async with under_test.open() as stopping, under_test.open() as sender:
            assert not (await take(stopping)).deliveries
            waiting = asyncio.create_task(stopping.wait_ready([QUEUE], LONG_S, owner=OWNER))
            await until(lambda: pulls_waiting(stopping), "a pull that waits")
            waiting.cancel()
            await stopping.leave_queue(OWNER, QUEUE)
            await sender.publish(outgoing("late"))
            await until(lambda: not pulls_waiting(stopping), "the pull to end")
            assert given_back in ([], [0])  # the pull had ended, or brought it
        async with under_test.open() as other:
            assert texts(await take_in_time(other, 1, what="the message")) == ["late"]

    set_deadline = Service.set_deadline
    monkeypatch.setattr(Service, "set_deadline", note)
    run(scenario())


def test_letters_that_are_refused_are_all_counted_and_the_others_requeued(
    under_test: BrokerUnderTest,
) -> None:
    buried = [Refused(Outgoing(queue, message(queue)), "why") for queue in ("umbel.a", "umbel.b", QUEUE)]

    async def scenario() -> None:
        async with under_test.open() as broker:
            await broker.bury(buried)

            async def all_letters() -> Sequence[DeadLetter] | None:
                letters = await broker.dead_letters()
                return letters if len(letters) == len(buried) else None

            letters = await eventually(all_letters, what="the dead letters")
            ids = [letter.letter_id for letter in sorted(letters, key=lambda letter: letter.queue)]
            with pytest.raises(BrokerRefused, match="1 dead letters requeued, 2 refused") as raised:
                await broker.requeue_dead(ids)
            assert sorted(raised.value.places) == [1, 2]
            assert texts(await take_in_time(broker, 1, what="the requeued one")) == [QUEUE]

    run(scenario())


def pulls_waiting(broker: Broker) -> bool:
    assert isinstance(broker, PubsubBroker)
    return any(consumer.waiting is not None for consumer in broker._claims._consumers.values())


async def delete(under_test: BrokerUnderTest, part: str) -> None:
    """Delete a topic or subscription at the emulator."""
    project = under_test.settings.url.rpartition("/")[2]
    address = f"http://{os.environ[EMULATOR_VARIABLE]}/v1/projects/{project}/{part}"
    asked = urllib.request.Request(address, method="DELETE")
    await asyncio.to_thread(lambda: urllib.request.urlopen(asked, timeout=10).close())


def test_a_queue_that_was_deleted_is_made_again(under_test: BrokerUnderTest) -> None:
    producer = under_test.producer()

    async def scenario() -> list[str]:
        async with under_test.open() as broker:
            for kind, send in (("broker", broker.publish), ("producer", None)):
                if send is not None:
                    await send(outgoing(kind))
                else:
                    await asyncio.to_thread(producer.publish, outgoing(kind))
                await delete(under_test, "subscriptions/kombu-celery")
                await delete(under_test, "topics/celery")
            await broker.publish(outgoing("again"))
            await asyncio.to_thread(producer.publish, outgoing("and again"))
        async with under_test.open() as other:
            return sorted(texts(await take_in_time(other, 2, what="what was sent afterwards")))

    assert run(scenario()) == ["again", "and again"]


def test_an_exchange_that_was_deleted_is_made_again(under_test: BrokerUnderTest) -> None:
    async def scenario() -> None:
        request = Broadcast(REQUEST_EXCHANGE, "", b"{}", b"{}")
        async with under_test.open() as broker:
            await broker.broadcast([request], ttl_s=LONG_S)
            await delete(under_test, f"topics/{REQUEST_EXCHANGE}")
            await broker.broadcast([request], ttl_s=LONG_S)

    run(scenario())


def test_a_signal_handler_can_publish_while_the_thread_it_interrupts_does(
    under_test: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = under_test.producer()
    assert isinstance(producer, PubsubProducer)
    producer.publish(outgoing("first"))
    link, read = producer._link, producer._link._read

    def interrupted(connection: socket.socket) -> Answer:
        monkeypatch.setattr(link, "_read", read)
        producer.publish(outgoing("handler"))
        return read(connection)

    monkeypatch.setattr(link, "_read", interrupted)
    assert b"ackDeadlineSeconds" in link.call(look_at(link.address.project, "kombu-celery"))

    async def scenario() -> list[str]:
        async with under_test.open() as broker:
            return sorted(texts(await take_in_time(broker, 2, what="both messages")))

    assert run(scenario()) == ["first", "handler"]
