"""Umbel's side: the app of `_throughput`, with the tasks of this benchmark."""

from benchmarks._pools import body
from benchmarks._throughput.places import BATCH
from benchmarks._throughput.umbel_side import app, describe, send_bulk, send_each, send_probe

__all__ = ["app", "describe", "send_bulk", "send_each", "send_naps", "send_probe", "send_timed"]

timed = app.task(name="timed")(body.timed)
nap = app.task(name="nap")(body.nap)


def send_timed(now_ns: int) -> None:
    timed.delay(now_ns)


def send_naps(count: int) -> None:
    for first in range(0, count, BATCH):
        app.send_many(nap.s(number) for number in range(first, min(first + BATCH, count)))
