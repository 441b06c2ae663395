"""Tasks of a signed cluster; each run leaves a line in a file."""

import os
from pathlib import Path
from threading import Event
from typing import Any

from umbel import App

app = App("signed")


def ran(directory: str, word: str) -> str:
    with (Path(directory) / "runs.txt").open("a") as file:
        file.write(f"{word}\n")
    return word


@app.task
def note(directory: str, word: str) -> str:
    return ran(directory, word)


@app.task(acks_late=False)
def early(directory: str, word: str) -> str:
    return ran(directory, word)


@app.task(bind=True, max_retries=3, default_retry_delay=0.05)
def second_try(self: Any, directory: str, word: str) -> str:
    if self.request.retries == 0:
        raise self.retry()
    return ran(directory, word)


@app.task
def held_up(directory: str, word: str) -> str:
    """Runs until the gate is open; where it ran is known by its process."""
    (Path(directory) / f"{word}.{os.getpid()}.started").touch()
    while not (Path(directory) / "gate").exists():
        Event().wait(0.01)
    return ran(directory, word)
