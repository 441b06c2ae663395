"""Tasks that must not wait or run twice."""

import os
import signal
from pathlib import Path
from threading import Event
from typing import Any

from umbel import App, Task

app = App("unique")


def write_line(path: Path, line: str) -> None:
    with path.open("a") as file:
        file.write(line + "\n")


def wait_for(gate: str) -> None:
    while not Path(gate).exists():
        Event().wait(0.01)


@app.task(unique_for=600)
def builds(directory: str, name: str) -> str:
    write_line(Path(directory) / "runs.txt", name)
    wait_for(f"{directory}/gate")
    return name


@app.task(bind=True, unique_for=600, max_retries=1)
def tries(self: Task[..., Any], directory: str) -> int:
    write_line(Path(directory) / "runs.txt", f"try {self.request.retries}")
    if self.request.retries == 0:
        self.retry(countdown=0)
    wait_for(f"{directory}/gate")
    return self.request.retries


@app.task(unique_for=600)
def fails() -> None:
    raise ValueError("no")


@app.task(unique_for=600)
def dies_once(directory: str) -> str:
    runs = Path(directory) / "runs.txt"
    write_line(runs, "run")
    if len(runs.read_text().splitlines()) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for(f"{directory}/gate")
    return "survived"
