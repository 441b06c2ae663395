"""The client process of one contender: it sends tasks of a size, at a pace, or workflows, and prints JSON.

python -m benchmarks._growth.client MODULE payload SIZE_BYTES COUNT
python -m benchmarks._growth.client MODULE trickle PER_S COUNT
python -m benchmarks._growth.client MODULE workflow KIND SIZE
"""

import json
import sys
import time
from importlib import import_module
from typing import Any


def payload(side: Any, size_bytes: int, count: int) -> dict[str, float]:
    text = "x" * size_bytes
    side.send(text)
    began, cpu_began = time.perf_counter(), time.process_time()
    for _ in range(count - 1):
        side.send(text)
    took_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
    sent = max(1, count - 1)
    return {"per_s": sent / took_s, "cpu_us": cpu_s / sent * 1e6}


def trickle(side: Any, per_s: int, count: int) -> dict[str, float]:
    """Send at a steady pace; one that is late does not wait."""
    began = time.monotonic()
    for number in range(count):
        time.sleep(max(0.0, began + number / per_s - time.monotonic()))
        side.send(number)
    return {"per_s": count / (time.monotonic() - began)}


def workflow(side: Any, kind: str, size: int) -> dict[str, float]:
    """From sending it until its result is here. A small one opens connections first, and is not timed."""
    side.run(kind, 2)
    began, cpu_began = time.perf_counter(), time.process_time()
    side.run(kind, size)
    took_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
    return {"step_us": took_s / size * 1e6, "cpu_us": cpu_s / size * 1e6}


def main(module: str, what: str, first: str, count: str) -> None:
    side = import_module(module)
    if what == "workflow":
        answer = workflow(side, first, int(count))
    else:
        answer = {"payload": payload, "trickle": trickle}[what](side, int(first), int(count))
    print(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
