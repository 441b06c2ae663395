"""How a command talks to the broker: open it, ask, close it."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Protocol, TypeVar

from msgspec.structs import replace

from umbel.app.configuration.settings import assemble
from umbel.brokers.interface import Broker, BrokerConnection, BrokerSettings, ClusterRecord, FanOut
from umbel.brokers.registry import open_broker
from umbel.errors import BrokerUnavailable
from umbel.launch.loading import find_app
from umbel.wire.signing import Keyring

T = TypeVar("T")
SLACK_S, SLACK = (
    0.05,
    0.05,
)  # and that part of the time: a question ends by itself, on a busy machine a little late


class ClusterBroker(FanOut, ClusterRecord, Protocol):
    """What commands about the cluster ask: its nodes, and the store that they share."""


def ask_broker(
    app_name: str | None, question: Callable[[Broker], Awaitable[T]], *, url: str | None = None
) -> T:
    """Ask the broker at the address, or that of the app, which need not be loaded where one is given."""

    settings = BrokerSettings(url, keyring=_keyring()) if url else find_app(app_name).app.broker_settings()

    async def ask() -> T:
        broker = open_broker(settings)
        await broker.open()
        try:
            return await question(broker)
        finally:
            await broker.close()

    return asyncio.run(ask())


def ask_in_time(
    app_name: str | None,
    question: Callable[[Broker, float], Awaitable[T]],
    timeout_s: float,
    *,
    url: str | None = None,
) -> T:
    """The same with a timeout that covers connecting; the question gets the time that is left."""

    settings = BrokerSettings(url, keyring=_keyring()) if url else find_app(app_name).app.broker_settings()

    async def ask() -> T:
        ends = asyncio.get_running_loop().time() + timeout_s
        broker = open_broker(replace(settings, connect_timeout_s=timeout_s))
        limit = asyncio.timeout_at(ends + SLACK_S + SLACK * timeout_s)
        try:
            async with limit:  # the part that watches the time ends by itself
                await broker.open()
                left_s = ends - asyncio.get_running_loop().time()
                if left_s <= 0:
                    raise BrokerUnavailable(f"the broker did not answer within {timeout_s:g} s")
                return await question(broker, left_s)
        except TimeoutError:
            if not limit.expired():  # the question's own
                raise
            raise BrokerUnavailable(f"the broker did not answer within {timeout_s:g} s") from None
        finally:
            await _close(broker, ends)

    return asyncio.run(ask())


async def _close(broker: BrokerConnection, ends: float) -> None:
    """Skip the closing handshake with a broker that is silent when the time is over."""
    left_s = max(SLACK_S, ends - asyncio.get_running_loop().time())
    with suppress(TimeoutError):
        async with asyncio.timeout(left_s):
            await broker.close()


def _keyring() -> "Keyring | None":
    """The keys of the environment or the project, where no app is loaded."""

    return assemble({}).keyring
