"""Tasks that take a known time and write down when they ran, so that history can be compared with it."""

from pathlib import Path
from threading import Event
from time import time
from typing import Any

from umbel import App, Task

app = App("timed")


@app.task(bind=True, max_retries=3)
def works(self: Task[..., Any], directory: str, seconds: float, retry_after: float = 0.0) -> str:
    """With `retry_after`: the first attempt is in vain, and the next is due so many seconds later."""
    began = time()
    Event().wait(seconds)
    is_last = not retry_after or self.request.retries > 0
    ended = time()
    write_down(directory, str(self.request.id), self.request.retries, began, ended)
    if not is_last:
        raise self.retry(countdown=retry_after)
    return str(self.request.id)


@app.task(bind=True)
def gathers(self: Task[..., Any], results: list[str], directory: str, seconds: float) -> list[str]:
    began = time()
    Event().wait(seconds)
    write_down(directory, str(self.request.id), 0, began, time())
    return results


def write_down(directory: str, task_id: str, attempt: int, began: float, ended: float) -> None:
    with (Path(directory) / "ran.txt").open("a") as ledger:
        ledger.write(f"{task_id} {attempt} {began!r} {ended!r}\n")
