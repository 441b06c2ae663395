"""Tasks for the scenarios in which the broker's data is replaced under a worker."""

from pathlib import Path
from threading import Event

from umbel import App

app = App("replaced")
WAIT_MAX_S = 240.0


@app.task
def add(x: int, y: int) -> int:
    return x + y


@app.task
def waits_for(gate: str, started: str) -> str:
    """Runs until a file is there."""
    Path(started).touch()
    pause = Event()
    for _ in range(int(WAIT_MAX_S / 0.02)):
        if Path(gate).exists():
            return "went on"
        pause.wait(0.02)
    return "gave up"


@app.task
def note(text: str, path: str) -> None:
    with Path(path).open("a") as file:
        file.write(f"{text}\n")
