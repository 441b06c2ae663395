"""Umbel's side: an app with its default settings, and a client that sends the load."""

import sys

from benchmarks._kills import body
from umbel import App

BATCH = 1000

app = App("kills", broker=body.URL, task_ignore_result=True)
run = app.task(name="run")(body.run)


def main(first: int, count: int, takes_s: float) -> None:
    for start in range(first, first + count, BATCH):
        app.send_many(run.s(number, takes_s) for number in range(start, min(start + BATCH, first + count)))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
