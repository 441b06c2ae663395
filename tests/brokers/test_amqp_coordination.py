"""RabbitMQ confirms an entry of a stream a moment before its readers get it; nobody decides in between."""

import asyncio

from tests.servers.rabbitmq import amqp_url
from umbel.brokers.interface import Broker, BrokerSettings
from umbel.brokers.registry import open_broker
from umbel.protocol.leadership.coordination import Closed, ElectionRequest, ElectionState, Granted, Policy

__all__ = ["amqp_url"]  # a fixture

ROUNDS = 20
AT_ONCE = 16  # the more is under way, the later readers are


def test_what_one_node_has_finished_no_other_node_is_granted(amqp_url: str) -> None:
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
