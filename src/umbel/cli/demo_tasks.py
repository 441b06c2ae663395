"""The tasks that `umbel demo` runs: quick, slow, async, failing, retried, crashing."""

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

from umbel.app.app import App
from umbel.app.task import Task

app = App("demo")


@app.task
def quick(x: int, y: int) -> int:
    return x + y


@app.task
def slow(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


@app.task
async def awaited(seconds: float) -> float:
    await asyncio.sleep(seconds)
    return seconds


@app.task
def failing(order: int) -> None:
    raise ValueError(f"order {order} has no customer")


@app.task(bind=True, max_retries=3)
def retried(self: Task[..., Any], order: int) -> int:
    """Fails at the first attempt, as a service that was just being restarted does."""
    if self.request.retries == 0:
        self.retry(ConnectionError("the service restarts"), countdown=0.2)
    return order


@app.task
def crashing(marker: str) -> str:
    """Kills its own process the first time, as a bug in a C library would."""
    try:
        Path(marker).touch(exist_ok=False)
    except FileExistsError:
        return "survived"
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a killed process does not get here")
