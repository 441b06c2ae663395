"""Tasks of a signed cluster; each run leaves a line in a file."""

import os
from pathlib import Path
from threading import Event, Thread
from typing import Any

from umbel import App

app = App("signed")


def ran(directory: str, word: str) -> str:
    with (Path(directory) / "runs.txt").open("a") as file:
        file.write(f"{word}\n")
    return word


def runs_of(directory: str) -> list[str]:
    """The words of all runs so far, in their order."""
    file = Path(directory) / "runs.txt"
    return file.read_text().split() if file.exists() else []


@app.task
def note(directory: str, word: str, *_: Any) -> str:
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


@app.task
def fails() -> None:
    raise ValueError("as it should")


@app.task
def sends(queue: str, directory: str, word: str) -> None:
    """Code of the app that sends what it was told to send."""
    note.apply_async([directory, word], queue=queue)


@app.task
def sends_in_a_thread(queue: str, directory: str, word: str) -> None:
    thread = Thread(target=sends, args=(queue, directory, word))
    thread.start()
    thread.join()


@app.task(bind=True)
def moves(self: Any, queue: str, directory: str, word: str) -> None:
    """Retries itself elsewhere, where it does what it is told."""
    if self.request.retries == 0:
        raise self.retry(queue=queue, countdown=0)
    ran(directory, word)


@app.task(bind=True)
def replaces(self: Any, queue: str, directory: str, word: str) -> None:
    self.replace(note.si(directory, word).set(queue=queue))


@app.task
def elects(queue: str, directory: str, word: str) -> None:
    note.si(directory, word).set(queue=queue).election()
