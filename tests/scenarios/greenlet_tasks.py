"""Tasks for the gevent pool: plain functions that wait. Each run leaves a line in a journal."""

import os
from pathlib import Path
from time import sleep  # by name: a patch that came after this module would not reach it

from umbel import App
from umbel.app.request import current_request

app = App("greenlets")


@app.task
def stay(directory: str, gate: str) -> str:
    """Its request is still its own when it has waited among many others."""
    request = current_request()
    assert request is not None
    with (Path(directory) / "journal.txt").open("a", encoding="utf-8") as journal:
        journal.write(f"{request.id} {os.getpid()}\n")
    while not Path(gate).exists():
        sleep(0.01)
    now = current_request()
    assert now is not None
    return now.id
