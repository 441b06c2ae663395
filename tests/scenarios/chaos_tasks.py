"""Tasks for the scenarios. Each run leaves a line in a journal, so that a test can count runs."""

import logging
import os
import signal
from pathlib import Path
from threading import Event
from typing import Any

from umbel import App, Reject, Task, group
from umbel.errors import SoftTimeLimitExceeded

app = App("chaos")


def journal_of(directory: str) -> Path:
    return Path(directory) / "journal.txt"


def write_line(path: Path, line: str) -> None:
    """One write() of a short line with O_APPEND: lines of several processes never mix."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, line.encode() + b"\n")
    finally:
        os.close(descriptor)


@app.task(bind=True)
def work(self: Task[..., Any], directory: str, seconds: float) -> int:
    redelivered = int(self.request.delivery_info["redelivered"])
    write_line(journal_of(directory), f"{self.request.id} {redelivered} {os.getpid()}")
    Event().wait(seconds)
    return os.getpid()


@app.task(bind=True)
def waits_for_file(self: Task[..., Any], directory: str, name: str) -> None:
    redelivered = int(self.request.delivery_info["redelivered"])
    write_line(journal_of(directory), f"{self.request.id} {redelivered} {os.getpid()}")
    while not (Path(directory) / name).exists():
        Event().wait(0.01)


@app.task(bind=True)
def tidies_up(self: Task[..., Any], directory: str, how: str) -> str:
    """Runs until it is interrupted, and says so; what then becomes of it is up to the caller."""
    write_line(journal_of(directory), self.request.id)
    try:
        Event().wait(60)
    except SoftTimeLimitExceeded:
        write_line(Path(directory) / "tidied.txt", self.request.id)
        if how == "return":
            return "tidied"
        raise
    return "was not interrupted"


@app.task
def add(x: int, y: int) -> int:
    return x + y


@app.task
def total(numbers: list[int]) -> int:
    return sum(numbers)


@app.task(bind=True)
def splits(self: Task[..., Any], *numbers: int) -> None:
    """Is replaced by several tasks."""
    self.replace(group(add.s(number, 0) for number in numbers))


@app.task
def writes_down(request: Any, error: Exception, traceback: str, *, directory: str) -> None:
    """An errback that takes the error itself."""
    write_line(journal_of(directory), f"{request.id} {type(error).__name__} {error.__cause__!r}")


@app.task(bind=True)
def counts_up(self: Task[..., Any], directory: str, name: str) -> None:
    """Leaves a line for each run, with whether the run knows that it is a repetition."""
    redelivered = int(self.request.delivery_info["redelivered"])
    write_line(Path(directory) / "bodies.txt", f"{name} {redelivered}")


@app.task
def deadly(directory: str, times: int) -> str:
    """Kills its process the first `times` times."""
    write_line(journal_of(directory), "deadly")
    if len(journal_of(directory).read_text().splitlines()) <= times:
        os.kill(os.getpid(), signal.SIGKILL)
    return "survived"


@app.task(acks_early=True)
def deadly_early() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@app.task
def refusing() -> None:
    raise Reject("not today")


@app.task
def talks(text: str) -> None:
    logging.getLogger("shop").info(text)


@app.task
def prints(text: str) -> None:
    print(text)


@app.task
def breaks() -> None:
    raise ValueError("it broke here")


@app.task(rate_limit="20/s")
def limited(directory: str) -> None:
    write_line(journal_of(directory), "limited")


@app.task
def waits_for_another() -> int:
    return add.delay(1, 2).get(timeout=5)


@app.task
def sends_another() -> str:
    return add.delay(20, 22).id


@app.task(bind=True)
def sends_work(self: Task[..., Any], directory: str, name: str) -> str:
    """Sends another when the file is there; its id."""
    write_line(
        journal_of(directory),
        f"{self.request.id} {int(self.request.delivery_info['redelivered'])} {os.getpid()}",
    )
    while not (Path(directory) / name).exists():
        Event().wait(0.01)
    return work.delay(directory, 0.0).id


@app.task
def count_all(values: list[object]) -> int:
    return len(values)
