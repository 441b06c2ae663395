"""Tasks with time limits: not every pool takes them."""

import asyncio
from contextlib import suppress
from pathlib import Path
from threading import Event

from umbel import App

app = App("limits")


async def linger(seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.Event().wait()


@app.task(time_limit=0.5)
def endless() -> None:
    Event().wait(60)


@app.task(time_limit=30, soft_time_limit=0.3)
def interruptible() -> None:
    Event().wait(60)


@app.task(time_limit=30, soft_time_limit=0.3)
async def lingering(marker: str) -> None:
    """Must not go on, when it is over its limit, while the loop runs the next task."""
    await linger(1.0)
    Path(marker).touch()  # noqa: ASYNC240 (one task at a time runs on this loop)


@app.task
async def patient() -> str:
    await linger(1.5)
    return "waited"
