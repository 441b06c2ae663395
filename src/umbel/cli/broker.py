"""How a command talks to the broker: open it, ask, close it."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from umbel.brokers.interface import Broker

T = TypeVar("T")


def ask_broker(app_name: str | None, question: Callable[[Broker], Awaitable[T]]) -> T:
    from umbel.app.loading import find_app
    from umbel.brokers.registry import open_broker

    settings = find_app(app_name).app.settings.for_broker()

    async def ask() -> T:
        broker = open_broker(settings)
        await broker.open()
        try:
            return await question(broker)
        finally:
            await broker.close()

    return asyncio.run(ask())
