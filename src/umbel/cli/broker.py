"""How a command talks to the broker: open it, ask, close it."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from umbel.brokers.interface import Broker, BrokerSettings

if TYPE_CHECKING:
    from umbel.wire.signing import Keyring

T = TypeVar("T")


def ask_broker(
    app_name: str | None, question: Callable[[Broker], Awaitable[T]], *, url: str | None = None
) -> T:
    """Ask the broker at the address, or that of the app, which need not be loaded where one is given."""
    from umbel.brokers.registry import open_broker

    settings = BrokerSettings(url, keyring=_keyring()) if url else _settings_of(app_name)

    async def ask() -> T:
        broker = open_broker(settings)
        await broker.open()
        try:
            return await question(broker)
        finally:
            await broker.close()

    return asyncio.run(ask())


def _settings_of(app_name: str | None) -> BrokerSettings:
    from umbel.app.loading import find_app

    return find_app(app_name).app.settings.for_broker()


def _keyring() -> "Keyring | None":
    """The keys of the environment or the project, where no app is loaded."""
    from umbel.app.settings import assemble

    return assemble({}).keyring
