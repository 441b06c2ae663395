"""What RabbitMQ does in several steps, and leaders that die between two of them."""

import asyncio
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.brokers.under_test import OWNER, PEER, BrokerUnderTest, outgoing, run, take
from tests.servers.rabbitmq import amqp_url
from umbel.brokers.amqp import verdicts
from umbel.brokers.amqp.session import write_facts
from umbel.brokers.amqp.streams import QueueFact
from umbel.brokers.amqp.topology import CAPABILITIES
from umbel.brokers.interface import Broker, BrokerSettings
from umbel.brokers.registry import open_broker
from umbel.errors import BrokerUnavailable
from umbel.protocol.leadership.coordination import Closed, ElectionRequest, ElectionState, Granted, Policy

__all__ = ["amqp_url"]  # a fixture

ROUNDS = 20
AT_ONCE = 16  # the more is under way, the later readers are


@pytest.fixture
def under_test(amqp_url: str) -> Iterator[BrokerUnderTest]:
    under_test = BrokerUnderTest(BrokerSettings(amqp_url), CAPABILITIES)
    yield under_test
    under_test.close()


def test_what_one_node_has_finished_no_other_node_is_granted(amqp_url: str) -> None:
    """An entry of a stream is confirmed a moment before its readers get it; nobody decides in between."""

    async def scenario() -> list[object]:
        brokers = [open_broker(BrokerSettings(amqp_url)) for _ in range(3)]
        for broker in brokers:
            await broker.open()
        try:
            return [
                reply
                for number in range(ROUNDS)
                for reply in await asyncio.gather(
                    *(run_once_then_claim(brokers, f"{number}-{one}") for one in range(AT_ONCE))
                )
            ]
        finally:
            for broker in brokers:
                await broker.close()

    replies = asyncio.run(scenario())
    states = {reply.state if isinstance(reply, Closed) else reply for reply in replies}
    assert states == {ElectionState.DONE}


def test_a_fact_that_rabbitmq_has_confirmed_is_looked_for_every_two_milliseconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []
    awaited: dict[str, Callable[[], None]] = {}

    async def sleep(pause_s: float) -> None:
        pauses.append(pause_s)
        if len(pauses) == 3:
            for read in awaited.values():
                read()

    async def nothing(*_: object) -> None: ...

    session = SimpleNamespace(
        views=SimpleNamespace(facts=SimpleNamespace(awaited=awaited)),
        publisher=SimpleNamespace(send=nothing),
        catch_up=nothing,
    )
    monkeypatch.setattr(asyncio, "sleep", sleep)
    asyncio.run(write_facts(cast(Any, session), QueueFact("celery"), timeout_s=5.0))
    assert pauses == [0.002] * 3


async def run_once_then_claim(brokers: list[Broker], key: str) -> object:
    """The answer to a claim that comes right after another node has run the election."""
    client, first, second = (broker.coordination for broker in brokers)
    request = ElectionRequest(key, "task", b"{}", Policy.AT_MOST_ONCE, asked_at=0.0)
    opened = await client.open_election(key, request)
    granted = await first.claim_election(key, "ada.1.1", opened.request, ttl_s=30.0)
    assert isinstance(granted, Granted)
    assert await first.start_election(key, "ada.1.1", granted.term)
    assert await first.finish_election(key, "ada.1.1", granted.term, "ok")
    return await second.claim_election(key, "bob.2.2", opened.request, ttl_s=30.0)


@pytest.mark.parametrize("was_sent", [False, True])
def test_what_a_dead_leader_may_have_sent_is_sent_again_as_redelivered(
    was_sent: bool, under_test: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RabbitMQ cannot publish and change a lease in one step; the leader dies between the two."""
    send = verdicts.send_or_bury

    async def dies(*given: object) -> None:
        if was_sent:
            await send(*given)  # type: ignore[arg-type]
        raise BrokerUnavailable("killed")

    async def scenario() -> None:
        async with under_test.open() as new:
            async with under_test.open() as old:
                won = await old.coordination.acquire_lease("beat", OWNER, ttl_s=60.0)
                assert await old.coordination.update_lease("beat", OWNER, won.term, b"before")
                with monkeypatch.context() as patched:
                    patched.setattr(verdicts, "send_or_bury", dies)
                    with pytest.raises(BrokerUnavailable):
                        await publish(old, OWNER, won.term, "slot", b"after")
                await old.coordination.release_lease("beat", OWNER, won.term)
            taken = await new.coordination.acquire_lease("beat", PEER, ttl_s=60.0)
            assert (taken.granted, taken.data) == (True, b"before"), "the slot is not sent for certain"
            assert await publish(new, PEER, taken.term, "slot", b"after")
            assert await publish(new, PEER, taken.term, "next", b"next")
            assert (await new.coordination.read_lease("beat")).data == b"next"
            deliveries = (await take(new)).deliveries
            found = [(delivery.message.correlation_id, delivery.redelivered) for delivery in deliveries]
        assert found == [("slot", False)] * was_sent + [("slot", True), ("next", False)]

    run(scenario())


def test_a_leader_that_got_no_answer_sends_again_as_redelivered(
    under_test: BrokerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lost(*_given: object) -> None:
        raise BrokerUnavailable("the connection was lost")

    async def scenario() -> None:
        async with under_test.open() as broker:
            won = await broker.coordination.acquire_lease("beat", OWNER, ttl_s=60.0)
            with monkeypatch.context() as patched:
                patched.setattr(verdicts, "send_or_bury", lost)
                with pytest.raises(BrokerUnavailable):
                    await publish(broker, OWNER, won.term, "slot", b"after")
            assert (await broker.coordination.read_lease("beat")).data == b""
            assert await publish(broker, OWNER, won.term, "slot", b"after")
            (found,) = (await take(broker)).deliveries
            assert found.redelivered

    run(scenario())


async def publish(broker: Broker, holder: str, term: int, text: str, data: bytes) -> bool:
    return await broker.coordination.fenced_publish("beat", holder, term, outgoing(text), data=data)
