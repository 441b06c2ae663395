"""Work on a channel that is cancelled half-way: the channel is closed, and what it has goes back."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from tests.brokers.under_test import QUEUE, eventually, outgoing, run
from tests.servers.rabbitmq import shared_server
from umbel.brokers.amqp.broker import AmqpBroker
from umbel.brokers.amqp.link import Link
from umbel.brokers.amqp.locks import is_locked
from umbel.brokers.amqp.session import Session
from umbel.brokers.interface import BrokerSettings
from umbel.brokers.registry import open_broker
from umbel.events.stamp import EVENT_EXCHANGE
from umbel.protocol.shutdown import LinkChange

WRITES = 9  # open, declare, bind, prefetch, consume, and what is written when it is left
WAITING = 3
Work = Callable[[AmqpBroker, Session], Awaitable[object]]
WORK: dict[str, Work] = {
    "one call": lambda _, session: session.look_at(QUEUE),
    "a lock": lambda _, session: is_locked(session, "nobody has it"),
    "a look at messages": lambda broker, _: broker.peek(QUEUE, 10),
    "dead letters": lambda broker, _: broker.dead_letters(),
    "recorders": lambda broker, _: broker.recorders(),
}


def test_a_subscription_cancelled_half_way_closes_its_channel_and_is_not_reported_as_lost() -> None:
    async def subscribe(broker: AmqpBroker, _: Session) -> None:
        async with broker.subscribe(EVENT_EXCHANGE, ["#"]):
            opened.append(broker)

    opened: list[AmqpBroker] = []
    ended = []
    for write in range(1, WRITES + 1):
        opened.clear()
        run(_cancelled_at(subscribe, write))
        ended.append(bool(opened))
    assert ended == sorted(ended) and set(ended) == {False, True}, "before, and after it was open"


@pytest.mark.parametrize("work", WORK)
def test_work_cancelled_half_way_closes_its_channel_and_gives_back_what_it_took(work: str) -> None:
    cancelled = [run(_cancelled_at(WORK[work], write)) for write in range(1, WRITES + 1)]
    assert cancelled[0], "it writes something"


async def _cancelled_at(work: Work, write: int) -> bool:
    """Cancel the work at this write on the connection; whether it came that far."""
    url = shared_server().url(shared_server().new_vhost())
    changes: list[LinkChange] = []
    async with _opened(url, changes) as broker:
        await broker.publish(outgoing(*map(str, range(WAITING))))
        session = await broker._sessions.get()
        link = session.link
        before, writes = set(link._channels), 0
        task, send = asyncio.ensure_future(work(broker, session)), link.send

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
        await eventually(lambda: _has(link, before), what=f"the channel to be closed after write {write}")
        await eventually(lambda: _waits(session), what=f"all messages to wait after write {write}")
    assert changes == [], f"cancelled at write {write}"
    return writes >= write


@asynccontextmanager
async def _opened(url: str, changes: list[LinkChange]) -> AsyncIterator[AmqpBroker]:
    broker = open_broker(BrokerSettings(url))
    assert isinstance(broker, AmqpBroker)
    broker.on_link(changes.append)
    await broker.open()
    yield broker
    await broker.close()


async def _has(link: Link, channels: set[int]) -> bool:
    return set(link._channels) == channels


async def _waits(session: Session) -> bool:
    waiting, _ = await session.look_at(QUEUE)
    return waiting == WAITING
