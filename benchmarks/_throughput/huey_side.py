"""Huey's side: its Redis storage with blocking pops, its default, and no results."""

import huey as peer

from benchmarks._throughput import body
from benchmarks._throughput.places import BATCH

huey = peer.RedisHuey("bench", url=body.URL, results=False)
noop = huey.task()(body.noop)
probe = huey.task()(body.probe)


def send_each(count: int) -> None:
    for number in range(count):
        noop(number)


def send_bulk(count: int) -> None:
    for first in range(0, count, BATCH):
        noop.map(range(first, min(first + BATCH, count)))


def send(value: object) -> None:
    noop(value)


def send_probe() -> None:
    probe()


def describe() -> dict[str, str]:
    return {
        "version": peer.__version__,
        "bulk": "map()",
        "delivery": "at most once",
        "crash": "loses what was running",
    }
