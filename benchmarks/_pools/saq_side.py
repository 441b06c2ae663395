"""SAQ's side: coroutines that wait, many at once in one process.

Each of them waits for its next job on a connection of its own, so the default of 100 is not enough.
"""

import asyncio
from typing import Any

from redis.asyncio import Redis
from saq import Queue
from saq.queue.redis import RedisQueue

from benchmarks._pools import body
from benchmarks._pools.places import AT_ONCE
from benchmarks._throughput.body import URL
from benchmarks._throughput.places import BATCH
from benchmarks._throughput.saq_side import _run, describe

__all__ = ["describe", "send_naps", "settings"]

queue: Queue = RedisQueue(Redis.from_url(URL, max_connections=4 * AT_ONCE))


async def nap(_context: Any, *, number: int) -> None:
    await body.nap(number)


settings = {"queue": queue, "functions": [nap], "concurrency": AT_ONCE}


def send_naps(count: int) -> None:
    async def send() -> None:
        for first in range(0, count, BATCH):
            numbers = range(first, min(first + BATCH, count))
            await asyncio.gather(*(queue.enqueue("nap", number=number, ttl=-1) for number in numbers))

    _run(send())
