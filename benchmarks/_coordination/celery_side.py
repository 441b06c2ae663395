"""Celery's side: an app with its default settings; every node is a process with the solo pool.

python -m benchmarks._coordination.celery_side elect NUMBER PAUSE_S
"""

import os
import sys
import time

from celery import Celery

app = Celery("bench", broker=os.environ["BENCH_BROKER"])
app.conf.update(task_ignore_result=True, broker_connection_retry_on_startup=True)


def do_nothing(number: int) -> None:
    """What the elected node sends."""


noop = app.task(name="noop")(do_nothing)


def elect(number: int, pause_s: float) -> None:
    app.control.election(f"bench-{number}", "task", noop.s(number))
    print("{}")  # nobody is told how it ended
    time.sleep(pause_s)


if __name__ == "__main__":
    elect(int(sys.argv[2]), float(sys.argv[3]))
