"""Tasks of a signed cluster; each run leaves a line in a file."""

import os
import time
from pathlib import Path
from typing import Any

from umbel import App

app = App("signed")


@app.task
def note(directory: str, word: str) -> str:
    with (Path(directory) / "runs.txt").open("a") as file:
        file.write(f"{word}\n")
    return word


@app.task(acks_late=False)
def early(directory: str, word: str) -> str:
    return note.run(directory, word)


@app.task(bind=True, max_retries=3, default_retry_delay=0.05)
def second_try(self: Any, directory: str, word: str) -> str:
    if self.request.retries == 0:
        raise self.retry()
    return note.run(directory, word)


@app.task
def held_up(directory: str, word: str) -> str:
    """Runs until the gate is open; where it ran is known by its process."""
    (Path(directory) / f"{word}.{os.getpid()}.started").touch()
    while not (Path(directory) / "gate").exists():
        time.sleep(0.01)
    return note.run(directory, word)
