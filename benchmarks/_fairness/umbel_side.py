"""Umbel's side: an app with its default settings, and a client that sends one shape of load."""

import sys
import time

from benchmarks._fairness import body
from benchmarks._fairness.shapes import SHAPES
from umbel import App, chord

app = App("fairness", broker=body.URL, backend=body.RESULTS)
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
    elif shape.is_singly:
        for signature in signatures:
            signature.delay()
    else:
        app.send_many(signatures)


if __name__ == "__main__":
    main(sys.argv[1])
