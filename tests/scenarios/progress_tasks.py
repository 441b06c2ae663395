"""Tasks that tell how far they are."""

import os
import signal
from pathlib import Path
from threading import Event
from typing import Any

from umbel import App, Task

app = App("progress")


@app.task(bind=True)
def counts(self: Task[..., Any], total: int) -> str:
    for done in range(total):
        self.progress(done + 1, total, what="counting")
    self.send_event("task-counted", total=total)
    return "counted"


@app.task(bind=True)
def waits(self: Task[..., Any], gate: str) -> str:
    self.update_state("HALFWAY", {"percent": 50})
    while not Path(gate).exists():
        Event().wait(0.01)
    return "through"


@app.task(bind=True, max_retries=0)
def tells_and_dies(self: Task[..., Any]) -> None:
    self.progress(1, 2)
    os.kill(os.getpid(), signal.SIGKILL)


@app.task(bind=True)
def moves(self: Task[..., Any]) -> bool:
    return self.send_event("task-moved", blind=True, place="here")
