"""SAQ's side: its default settings, jobs removed when they have run."""

import asyncio
from collections.abc import Coroutine
from importlib.metadata import version
from typing import Any

from saq import Queue

from benchmarks._throughput import body
from benchmarks._throughput.places import BATCH

queue = Queue.from_url(body.URL)
_loops: list[asyncio.AbstractEventLoop] = []


async def noop(_context: Any, *, number: int) -> None:
    body.noop(number)


async def probe(_context: Any) -> None:
    body.probe()


settings = {"queue": queue, "functions": [noop, probe]}


def send_each(count: int) -> None:
    async def send() -> None:
        for number in range(count):
            await queue.enqueue("noop", number=number, ttl=-1)

    _run(send())


def send_bulk(count: int) -> None:
    async def send() -> None:
        for first in range(0, count, BATCH):
            numbers = range(first, min(first + BATCH, count))
            await asyncio.gather(*(queue.enqueue("noop", number=number, ttl=-1) for number in numbers))

    _run(send())


def send_probe() -> None:
    _run(queue.enqueue("probe", ttl=-1))


def describe() -> dict[str, str]:
    return {
        "version": version("saq"),
        "bulk": "enqueue(), gathered",
        "delivery": "at most once (retries is 1 by default)",
        "crash": "what was running is found later and called aborted",
    }


def _run(sending: Coroutine[Any, Any, Any]) -> None:
    if not _loops:
        _loops.append(asyncio.new_event_loop())
    _loops[0].run_until_complete(sending)
