"""Taskiq's side: coroutines that wait, many at once in one process."""

import asyncio

from benchmarks._pools import body
from benchmarks._throughput.taskiq_side import GATHERED, _run, broker, describe

__all__ = ["broker", "describe", "send_naps"]

nap = broker.task(task_name="nap")(body.nap)


def send_naps(count: int) -> None:
    async def send() -> None:
        for first in range(0, count, GATHERED):
            await asyncio.gather(*(nap.kiq(number) for number in range(first, min(first + GATHERED, count))))

    _run(send())
