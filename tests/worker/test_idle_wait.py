"""The wait for messages ends when somebody says so, in whatever thread."""

import asyncio
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from umbel.worker.delivery.take import IdleWait


class Silent:
    """A broker at which nothing ever happens."""

    capabilities = SimpleNamespace(idle_wait_s=60.0)

    def __init__(self) -> None:
        self.waits = asyncio.Event()

    async def wait_ready(self, _queues: Sequence[str], _timeout_s: float, *, owner: str) -> bool:
        self.waits.set()
        await asyncio.Event().wait()
        return bool(owner)


@pytest.mark.parametrize("in_thread", [False, True])
def test_a_wait_is_ended_from_any_thread(*, in_thread: bool) -> None:
    async def scenario() -> None:
        broker = Silent()
        idle = IdleWait(cast(Any, broker), "me")
        idle.end()  # nobody waits
        async with asyncio.timeout(30):
            waiting = asyncio.create_task(idle.until_ready(["celery"]))
            await broker.waits.wait()
            if in_thread:
                thread = threading.Thread(target=idle.end)
                thread.start()
                await asyncio.to_thread(thread.join)
            else:
                idle.end()
                idle.end()  # twice is as once
            await waiting

    asyncio.run(scenario())
