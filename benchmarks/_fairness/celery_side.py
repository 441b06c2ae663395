"""Celery's side: its default settings, and a client that sends one shape of load."""

import sys
import time

from celery import Celery, chord

from benchmarks._fairness import body
from benchmarks._fairness.shapes import SHAPES

app = Celery("fairness", broker=body.URL)
app.conf.update(broker_connection_retry_on_startup=True, worker_hijack_root_logger=True)
if body.URL.startswith("redis"):
    app.conf.result_backend = body.URL
run = app.task(name="run")(body.run)
total = app.task(name="total")(body.total)
long = app.task(name="long")(body.run)


def main(name: str) -> None:
    shape = SHAPES[name]
    signatures = [
        (long if kind == "long" else run).s(kind, takes_s).set(priority=priority)
        for kind, takes_s, priority in shape.calls()
    ]
    print(time.monotonic(), flush=True)
    if shape.is_chord:
        chord(signatures)(total.s())
    else:
        for signature in signatures:
            signature.apply_async(ignore_result=True)


if __name__ == "__main__":
    main(sys.argv[1])
