"""The demo's app: tasks of every kind. Each task writes a line to the ledger when it runs."""

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

from umbel.app.app import App
from umbel.app.task import Task
from umbel.demo import write_run

HELD_MAX_S = 30.0
RUN = os.environ.get("DEMO_RUN", "demo")  # separates this run from data of earlier runs at the broker
TICK = f"{RUN}_tick"
CELERY_QUEUE = f"{RUN}_celery"  # consumed by the worker of the Celery app
app = App("demo", task_send_sent_event=True)
Bound = Task[..., Any]


@app.task(bind=True)
def quick(self: Bound, x: int, y: int) -> int:
    """Add two numbers."""
    write_run(self)
    return x + y


@app.task(bind=True)
def slow(self: Bound, seconds: float) -> float:
    """Block for this many seconds."""
    write_run(self)
    time.sleep(seconds)
    return seconds


@app.task(bind=True)
def held(self: Bound, release: str) -> None:
    """Run until the file `release` exists, which the demo creates after it has killed a worker."""
    write_run(self)
    deadline = time.monotonic() + HELD_MAX_S
    while not Path(release).exists() and time.monotonic() < deadline:
        time.sleep(0.02)


@app.task(bind=True)
async def awaited(self: Bound, seconds: float) -> float:
    """Sleep for this many seconds in an async task."""
    write_run(self)
    await asyncio.sleep(seconds)
    return seconds


@app.task(bind=True)
def failing(self: Bound, order: int) -> None:
    """Raise ValueError, which is not retried."""
    write_run(self)
    raise ValueError(f"order {order} has no customer")


@app.task(bind=True, max_retries=3)
def retried(self: Bound, order: int) -> int:
    """Fail at the first attempt, like a service that is just restarting."""
    write_run(self)
    if self.request.retries == 0:
        error = ConnectionError(
            "the service is restarting (raised by the demo on purpose; the task is retried)"
        )
        self.retry(error, countdown=0.2)
    return order


@app.task(bind=True)
def delayed(self: Bound, order: int) -> int:
    """Return the order; the demo sends this task with a countdown."""
    write_run(self)
    return order


@app.task(bind=True)
def crashing(self: Bound, marker: str) -> str:
    """Kill the own process in the first run, like a bug in a C library."""
    write_run(self)
    try:
        Path(marker).touch(exist_ok=False)
    except FileExistsError:
        return "survived"
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("SIGKILL did not end this process")


@app.task(bind=True)
def step(self: Bound, number: int, more: int = 1) -> int:
    """Return a sum; a step of a chain, a member of a group, or the header of a chord."""
    write_run(self)
    return number + more


@app.task(bind=True)
def total(self: Bound, numbers: list[int]) -> int:
    """Return the sum of the numbers; the body of a chord."""
    write_run(self)
    return sum(numbers)


@app.task(bind=True)
def never(self: Bound) -> None:
    """Do nothing; the demo revokes this task before it is due, so it must never run."""
    write_run(self)


@app.task(bind=True)
def elected(self: Bound) -> str:
    """Return the worker's name; an elected worker sends this task."""
    write_run(self)
    return str(self.request.hostname)


@app.periodic(every=1, catch_up="all", name=TICK)
@app.task(bind=True)
def tick(self: Bound) -> None:
    """Run once a second, as a periodic task."""
    write_run(self)
