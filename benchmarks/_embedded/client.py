"""The client process of one contender: it sends tasks and prints what it measured, as JSON.

python -m benchmarks._embedded.client MODULE enqueue COUNT
python -m benchmarks._embedded.client MODULE probe COUNT
python -m benchmarks._embedded.client MODULE describe
"""

import gc
import json
import os
import random
import select
import sys
import time
from importlib import import_module
from statistics import median
from typing import Any, Protocol

from benchmarks._embedded import body
from benchmarks._embedded.places import PROBE_BYTES, PROBE_PIPE

WARM_UP_MAX = 100
PAUSE_MAX_S = 0.1  # between probes: longer than a poll of any contender would hide who polls
PROBE_TIMEOUT_S = 30.0


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


def probe(side: Side, count: int) -> dict[str, float]:
    """Send one task at a time to an idle worker: how long until it runs."""
    pauses = random.Random(1)  # the same pauses for every contender
    # Opened for both directions, so that a writer that closes its end is no end of file for us.
    pipe = os.open(body.HOME / PROBE_PIPE, os.O_RDWR)
    latencies_ms = []
    for _ in range(count):
        time.sleep(pauses.uniform(0, PAUSE_MAX_S))
        sent_ns = time.monotonic_ns()
        side.send_probe()
        if not select.select([pipe], [], [], PROBE_TIMEOUT_S)[0]:
            sys.exit(f"a probe did not run within {PROBE_TIMEOUT_S:g} s")
        ran_ns = int.from_bytes(os.read(pipe, PROBE_BYTES))
        latencies_ms.append((ran_ns - sent_ns) / 1e6)
    os.close(pipe)
    return {"p50_ms": median(latencies_ms)}


def main(module: str, what: str, *count: str) -> None:
    side: Any = import_module(module)
    answers = {
        "enqueue": lambda: enqueue(side, int(count[0])),
        "probe": lambda: probe(side, int(count[0])),
        "describe": side.describe,
    }
    print(json.dumps(answers[what]()))


if __name__ == "__main__":
    main(*sys.argv[1:])
