"""The client process of one contender: it sends tasks and prints what it measured, as JSON.

python -m benchmarks._throughput.client MODULE fill ONE_AT_A_TIME IN_BULK [AT_ONCE]
python -m benchmarks._throughput.client MODULE probe COUNT
python -m benchmarks._throughput.client MODULE describe
"""

import gc
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any, Protocol

from benchmarks._harness import probing
from benchmarks._throughput import body

WARM_UP_MAX = 100
SENDERS = 8


class Side(Protocol):
    """What a module for one contender offers. Loops are its own, so that each can be as quick as it is."""

    def send_each(self, count: int) -> None: ...
    def send_bulk(self, count: int) -> None: ...
    def send_awaited(self, count: int, senders: int) -> None: ...  # where it can be awaited
    def send_probe(self) -> None: ...
    def describe(self) -> dict[str, str]: ...


def fill(side: Side, count: int, each: int, at_once: int = 0) -> dict[str, float]:
    """Send `count` tasks: `each` one at a time, `at_once` from threads, and as many awaited if they can be,
    the others in bulk.

    The first few, which open connections, are not timed.
    """
    warm_up = min(WARM_UP_MAX, each // 10)
    side.send_each(warm_up)
    filled = _timed("each", side.send_each, each - warm_up)
    awaited = at_once if hasattr(side, "send_awaited") else 0
    filled |= _timed("bulk", side.send_bulk, count - each - at_once - awaited)
    if at_once:
        filled |= _threads(side, at_once)
    if awaited:
        filled |= _timed("awaited", lambda count: side.send_awaited(count, SENDERS), awaited)
    return filled


def _threads(side: Side, count: int) -> dict[str, float]:
    shares = [count // SENDERS + (nth < count % SENDERS) for nth in range(SENDERS)]
    with ThreadPoolExecutor(SENDERS) as threads:
        return _timed("threads", lambda _: list(threads.map(side.send_each, shares)), count)


def _timed(name: str, send: Callable[[int], object], count: int) -> dict[str, float]:
    gc.collect()
    began, cpu_began = time.perf_counter(), time.process_time()
    send(count)
    took_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
    return {f"{name}_per_s": count / took_s, f"{name}_cpu_us": cpu_s / count * 1e6}


def main(module: str, what: str, *counts: str) -> None:
    side: Any = import_module(module)
    numbers = [int(count) for count in counts]
    answers: dict[str, Callable[[], dict[str, Any]]] = {
        "fill": lambda: fill(side, *numbers),
        "probe": lambda: probing.latencies(side.send_probe, body.HOME, *numbers),
        "describe": side.describe,
    }
    print(json.dumps(answers[what]()))


if __name__ == "__main__":
    main(*sys.argv[1:])
