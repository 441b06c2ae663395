"""A subscription cancelled while it opens: its channel is closed, and no link counts as lost."""

import asyncio
from contextlib import suppress

from tests.brokers.under_test import eventually, run
from tests.servers.rabbitmq import shared_server
from umbel.brokers.amqp.broker import AmqpBroker
from umbel.brokers.interface import BrokerSettings
from umbel.brokers.registry import open_broker
from umbel.events.stamp import EVENT_EXCHANGE
from umbel.protocol.shutdown import LinkChange

WRITES = 9  # open, declare, bind, prefetch, consume, and what is written when it is left


def test_a_subscription_cancelled_half_way_closes_its_channel_and_is_not_reported_as_lost() -> None:
    url = shared_server().url(shared_server().new_vhost())
    opened = [run(_cancelled_at(url, write)) for write in range(1, WRITES + 1)]
    assert opened == sorted(opened) and set(opened) == {False, True}, "before, and after it was open"


async def _cancelled_at(url: str, write: int) -> bool:
    """Whether the subscription was open when its task was cancelled at this write on the connection."""
    broker, changes = open_broker(BrokerSettings(url)), list[LinkChange]()
    assert isinstance(broker, AmqpBroker)
    broker.on_link(changes.append)
    await broker.open()
    link = (await broker._sessions.get()).link
    before, writes, opened = set(link._channels), 0, asyncio.Event()

    async def subscribe() -> None:
        async with broker.subscribe(EVENT_EXCHANGE, ["#"]):
            opened.set()

    task, send = asyncio.create_task(subscribe()), link.send

    def count(data: bytes) -> None:
        nonlocal writes
        writes += 1
        send(data)
        if writes == write:
            task.cancel()

    link.send = count  # type: ignore[method-assign]
    with suppress(asyncio.CancelledError):
        await task
    link.send = send  # type: ignore[method-assign]
    what = f"the channel to be closed after write {write}"
    await eventually(lambda: _is(set(link._channels) == before), what=what)
    await broker.close()
    assert changes == [], f"cancelled at write {write}"
    return opened.is_set()


async def _is(answer: bool) -> bool:
    return answer
