"""Tasks for the corpus: a neighbour that must run once, and one that takes whatever it is given."""

import os
from pathlib import Path
from typing import Any

from umbel import App, Task

app = App("corpus")


def ledger_of(directory: str) -> Path:
    return Path(directory) / "ledger.txt"


@app.task(bind=True)
def neighbour(self: Task[..., Any], directory: str) -> None:
    """Leaves its id in the ledger: one write() of a short line, so lines never mix."""
    descriptor = os.open(ledger_of(directory), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, self.request.id.encode() + b"\n")
    finally:
        os.close(descriptor)


@app.task
def take(*args: Any, **kwargs: Any) -> None:
    return None


@app.task
def strict(number: int) -> int:
    return number
