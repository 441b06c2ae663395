"""An app whose hooks hang, as the environment says: `HANGS` names the signals, with commas."""

import os
from pathlib import Path
from threading import Event
from typing import Any

from tests.scenarios.chaos_tasks import write_line
from umbel import App

app = App("hooks")
HANGS = os.environ.get("HANGS", "").split(",")


def hang(where: str) -> None:
    write_line(Path("began.txt"), where)
    if where in HANGS:
        Event().wait(600)


@app.signals.worker_init.connect
def at_init(**_: Any) -> None:
    hang("worker_init")


@app.signals.worker_ready.connect
def when_ready(**_: Any) -> None:
    hang("worker_ready")


@app.signals.worker_shutdown.connect
def at_the_end(**_: Any) -> None:
    hang("worker_shutdown")


@app.signals.worker_process_init.connect
def in_each_child(**_: Any) -> None:
    hang("worker_process_init")


hang("import")


@app.task
def is_stuck_here() -> None:
    write_line(Path("began.txt"), "task")
    Event().wait(600)
