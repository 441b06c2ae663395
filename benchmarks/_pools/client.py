"""The client process of one contender: it sends tasks and prints what it measured, as JSON.

python -m benchmarks._pools.client MODULE naps COUNT
python -m benchmarks._pools.client MODULE load COUNT PER_SECOND
"""

import json
import sys
import time
from importlib import import_module
from typing import Any

from benchmarks._pools import body
from benchmarks._throughput.body import HOME

TIMEOUT_S = 60.0


def load(side: Any, count: int, per_second: int) -> dict[str, float]:
    """Send tasks evenly, and wait until all have come: the median and the 99th percentile of their way."""
    (HOME / body.WAYS).mkdir()
    began_ns = time.monotonic_ns()
    for number in range(count):
        due_ns = began_ns + number * 1_000_000_000 // per_second
        time.sleep(max(0.0, (due_ns - time.monotonic_ns()) / 1e9))
        side.send_timed(time.monotonic_ns())
    ends = time.monotonic() + TIMEOUT_S
    while len(ways := body.ways_ns(HOME)) < count:
        if time.monotonic() > ends:
            sys.exit(f"{count - len(ways)} of {count} tasks did not run within {TIMEOUT_S:g} s")
        time.sleep(0.01)
    ways.sort()
    return {"p50_ms": ways[len(ways) // 2] / 1e6, "p99_ms": ways[len(ways) * 99 // 100] / 1e6}


def main(module: str, what: str, *counts: str) -> None:
    side: Any = import_module(module)
    numbers = [int(count) for count in counts]
    if what == "load":
        print(json.dumps(load(side, *numbers)))
    else:
        side.send_naps(*numbers)
        print(json.dumps({}))


if __name__ == "__main__":
    main(*sys.argv[1:])
