"""Celery's side: the app of `_throughput`, with the task of this benchmark."""

from benchmarks._pools import body
from benchmarks._throughput.celery_side import app, describe, send_bulk, send_each, send_probe

__all__ = ["app", "describe", "send_bulk", "send_each", "send_probe", "send_timed"]

timed = app.task(name="timed")(body.timed)


def send_timed(now_ns: int) -> None:
    timed.delay(now_ns)
