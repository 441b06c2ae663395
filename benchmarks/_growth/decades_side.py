"""What grows with the number of tasks: the app for the decades, and its client.

python -m benchmarks._growth.decades_side KIND SIZE TIMES   # prints JSON
"""

import itertools
import json
import os
import resource
import sys
import time

import umbel
from benchmarks._growth.decades import FIRST, RESULTS_VARIABLE
from benchmarks._throughput import body

WAIT_S = 1800.0
REVOKED_AT_ONCE = 100
names = itertools.count()

app = umbel.App("bench", broker=body.URL, backend=os.environ.get(RESULTS_VARIABLE), failed_keep=100_000)


@app.task
def step(_number: object = 0) -> int:
    body.noop(0)
    return 1


@app.task
def total(values: list[int]) -> int:
    return sum(values)


if not body.URL.startswith("amqp"):  # RabbitMQ can do neither

    @app.task(unique_for=3600, ignore_result=True)
    def once(_name: str) -> None:
        body.noop(0)

    @app.task(limit=umbel.Concurrency(2), ignore_result=True)
    def limited(_number: int) -> None:
        body.noop(0)


@app.task(ignore_result=True)
def fails(_number: int) -> None:
    body.noop(0)
    raise ValueError("as it must")


@app.task(ignore_result=True)
def plain(_number: int = 0) -> None:
    body.noop(0)


def group(size: int) -> None:
    assert umbel.group([step.si() for _ in range(size)]).apply_async().get(timeout=WAIT_S) == [1] * size


def chord(size: int) -> None:
    assert umbel.chord([step.si() for _ in range(size)], total.s()).apply_async().get(timeout=WAIT_S) == size


def unique(size: int) -> None:
    for _ in range(size):
        once.delay(f"{os.getpid()} {next(names)}")


def limits(size: int) -> None:
    app.send_many(limited.s(number) for number in range(size))


def failures(size: int) -> None:
    app.send_many(fails.s(number) for number in range(size))


def revokes(size: int) -> None:
    """The worker reads them before it takes the task that comes last."""
    ids = [f"{os.getpid()} {next(names)}" for _ in range(size)]
    for first in range(0, size, REVOKED_AT_ONCE):
        app.control.revoke(ids[first : first + REVOKED_AT_ONCE])
    plain.delay()


KINDS = {one.__name__: one for one in (chord, group, unique, limits, revokes, failures)}


def main(kind: str, size: str, times: str) -> None:
    run = KINDS[kind]
    run(FIRST)  # opens the connections
    began, cpu_began = time.perf_counter(), time.process_time()
    for _ in range(int(times)):
        run(int(size))
    cpu_s = time.process_time() - cpu_began
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"cpu_s": cpu_s, "took_s": time.perf_counter() - began, "peak_mib": peak_mib}))


if __name__ == "__main__":
    main(*sys.argv[1:])
