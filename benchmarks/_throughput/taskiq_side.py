"""Taskiq's side: tasks are coroutines, which spares it a thread, and uvloop runs them.

Its broker with a list, which loses tasks in a crash. The one with a stream acknowledges; in five
alternating runs it drained and sent about as quickly, and answered an idle client later.
"""

import asyncio
from collections.abc import Coroutine
from importlib.metadata import version
from typing import Any

import uvloop
from taskiq_redis import ListQueueBroker

from benchmarks._throughput import body

GATHERED = 100  # calls at once: more only wait for one another

broker = ListQueueBroker(body.URL)
_loops: list[asyncio.AbstractEventLoop] = []


async def _noop(number: int) -> None:
    body.noop(number)


async def _probe() -> None:
    body.probe()


noop = broker.task(task_name="noop")(_noop)
probe = broker.task(task_name="probe")(_probe)


def send_each(count: int) -> None:
    async def send() -> None:
        for number in range(count):
            await noop.kiq(number)

    _run(send())


def send_bulk(count: int) -> None:
    async def send() -> None:
        for first in range(0, count, GATHERED):
            await asyncio.gather(*(noop.kiq(number) for number in range(first, min(first + GATHERED, count))))

    _run(send())


def send_probe() -> None:
    _run(probe.kiq())


def describe() -> dict[str, str]:
    return {
        "version": version("taskiq"),
        "bulk": f"kiq(), {GATHERED} gathered",
        "delivery": "at most once",
        "crash": "loses what was fetched and running",
    }


def _run(sending: Coroutine[Any, Any, Any]) -> None:
    if not _loops:
        _loops.append(uvloop.new_event_loop())
    _loops[0].run_until_complete(sending)
