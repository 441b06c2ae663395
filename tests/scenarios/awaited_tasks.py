"""Tasks for clients that await: each run leaves a line, so that runs can be counted."""

from pathlib import Path
from threading import Event

from umbel import App

app = App("awaited")


def write_line(path: Path, line: str) -> None:
    with path.open("a") as file:
        file.write(line + "\n")


@app.task
def add(a: int, b: int) -> int:
    return a + b


@app.task
def total(numbers: list[int]) -> int:
    return sum(numbers)


@app.task(ignore_result=True)
def note(file: str, line: str) -> None:
    write_line(Path(file), line)


@app.task(unique_for=600)
def build(gate: str) -> str:
    while not Path(gate).exists():
        Event().wait(0.01)
    return "built"


@app.task
def fail(why: str) -> None:
    raise KeyError(why)
