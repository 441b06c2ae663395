"""Probing: how long it takes until a task that was sent to an idle worker runs.

The task says through a named pipe when it ran, by the monotonic clock, which all processes of a
machine share. Only the standard library: both ends run in the peers' environment, too.
"""

import os
import random
import select
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

PAUSE_MAX_S = 0.1  # between probes: longer than a poll of any contender would hide who polls
TIMEOUT_S = 30.0

_PIPE = "probe"
_BYTES = 8


def prepare(home: Path) -> None:
    """Before the first probe is sent."""
    os.mkfifo(home / _PIPE)


def answer(home: Path) -> None:
    """What the task does."""
    now_ns = time.monotonic_ns()
    pipe = os.open(home / _PIPE, os.O_WRONLY)
    os.write(pipe, now_ns.to_bytes(_BYTES))
    os.close(pipe)


def latencies(send: Callable[[], object], home: Path, count: int) -> dict[str, float]:
    """Send one task at a time: the median time from before it was sent until it ran, and its two parts.

    The client's part ends when its call returns. Then the broker has the message for some time, so the
    worker's part is a little too small, for every contender alike.
    """
    pauses = random.Random(1)  # the same pauses for every contender
    # Opened for both directions, so that a writer that closes its end is no end of file for us.
    pipe = os.open(home / _PIPE, os.O_RDWR)
    whole_ms, client_ms, worker_ms = list[float](), list[float](), list[float]()
    for _ in range(count):
        time.sleep(pauses.uniform(0, PAUSE_MAX_S))
        sent_ns = time.monotonic_ns()
        send()
        returned_ns = time.monotonic_ns()
        if not select.select([pipe], [], [], TIMEOUT_S)[0]:
            sys.exit(f"a probe did not run within {TIMEOUT_S:g} s")
        ran_ns = int.from_bytes(os.read(pipe, _BYTES))
        whole_ms.append((ran_ns - sent_ns) / 1e6)
        client_ms.append((returned_ns - sent_ns) / 1e6)
        worker_ms.append((ran_ns - returned_ns) / 1e6)
    os.close(pipe)
    return {
        "p50_ms": median(whole_ms),
        "client_p50_ms": median(client_ms),
        "worker_p50_ms": median(worker_ms),
    }
