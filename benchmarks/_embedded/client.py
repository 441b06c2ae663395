"""The client process of one contender: it sends tasks and prints what it measured, as JSON.

python -m benchmarks._embedded.client MODULE enqueue COUNT
python -m benchmarks._embedded.client MODULE probe COUNT
python -m benchmarks._embedded.client MODULE describe
"""

import gc
import json
import sys
import time
from importlib import import_module
from typing import Any, Protocol

from benchmarks._embedded import body
from benchmarks._harness import probing

WARM_UP_MAX = 100


class Side(Protocol):
    def send(self, number: int) -> None: ...
    def send_probe(self) -> None: ...
    def describe(self) -> dict[str, str]: ...


def enqueue(side: Side, count: int) -> dict[str, float]:
    """Send the tasks 0 to count-1, one at a time; the first few, which open the file, are not timed."""
    warm_up = min(WARM_UP_MAX, count // 10)
    for number in range(warm_up):
        side.send(number)
    gc.collect()
    timed = count - warm_up
    began, cpu_began = time.perf_counter(), time.process_time()
    for number in range(warm_up, count):
        side.send(number)
    took_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
    return {"tasks_per_s": timed / took_s, "cpu_us": cpu_s / timed * 1e6}


def main(module: str, what: str, *count: str) -> None:
    side: Any = import_module(module)
    answers = {
        "enqueue": lambda: enqueue(side, int(count[0])),
        "probe": lambda: probing.latencies(side.send_probe, body.HOME, int(count[0])),
        "describe": side.describe,
    }
    print(json.dumps(answers[what]()))


if __name__ == "__main__":
    main(*sys.argv[1:])
