"""What the tasks of this benchmark do beside those of `_throughput`, the same for every contender.

`timed` waits as a task does that calls a service, and notes how long it was on its way before that;
`nap` does the waiting only, as a coroutine. Only the standard library: this file is imported in the
peers' environment, too.
"""

import asyncio
import os
import time
from pathlib import Path

from benchmarks._throughput.body import HOME, noop

NAP_S = 0.010
WAYS = "ways"  # a folder: for each process, how long tasks were on their way, in nanoseconds
_BYTES = 8


def timed(sent_ns: int) -> None:
    way_ns = time.monotonic_ns() - sent_ns
    file = os.open(HOME / WAYS / str(os.getpid()), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(file, way_ns.to_bytes(_BYTES))
    os.close(file)
    time.sleep(NAP_S)


async def nap(number: int) -> None:
    await asyncio.sleep(NAP_S)
    noop(number)


def ways_ns(home: Path) -> list[int]:
    """How long each task was on its way, of those that have come."""
    data = b"".join(file.read_bytes() for file in (home / WAYS).iterdir())
    return [int.from_bytes(data[start : start + _BYTES]) for start in range(0, len(data), _BYTES)]
