"""Tasks that write down when they ran and when they sent, so that events can be compared with it."""

from pathlib import Path
from time import time
from typing import Any

from umbel import App, Task

app = App("ledger")


def write_down(file: str, directory: str, task_id: str, began: float) -> None:
    """What began then has ended now."""
    with (Path(directory) / file).open("a") as ledger:
        ledger.write(f"{task_id} {began!r} {time()!r}\n")


@app.task(bind=True)
def runs(self: Task[..., Any], directory: str, sends: str = "") -> None:
    """With `sends`: it sends one more, under that id."""
    started = time()
    if sends:
        before = time()
        runs.apply_async((directory,), task_id=sends)
        write_down("sent.txt", directory, sends, before)
    write_down("ran.txt", directory, str(self.request.id), started)
