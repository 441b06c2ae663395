"""What elections in scenarios do: each sent task and each handler run leaves a line in a journal."""

import os
from pathlib import Path
from threading import Event
from typing import Any

from umbel import App, ElectionContext, Task

app = App("elections")


def note(journal: str, line: str) -> None:
    """One whole line, also while other processes write."""
    file = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, f"{line}\n".encode())
    finally:
        os.close(file)


@app.task(bind=True)
def report(self: Task[Any, Any], journal: str, name: str) -> str:
    note(journal, f"{name} {self.request.id}")
    return name


def write(action: dict[str, str], context: ElectionContext) -> str:
    note(action["journal"], f"{context.election_id} {context.term} {context.attempt}")
    return f"wrote in {Path(action['journal']).name}"


if "CANNOT_WRITE" not in os.environ:  # of a worker of an older release, say
    app.election_handler("write")(write)


@app.election_handler("fail")
def fail(action: Any, context: ElectionContext) -> None:
    raise RuntimeError(f"cannot do {action}")


@app.election_handler("cut", policy="at_least_once")
def cut(action: dict[str, str], context: ElectionContext) -> str:
    """The first run goes on until the election is not its own; the next one has nothing to wait for."""
    note(action["journal"], f"{context.attempt} {context.term}")
    while context.attempt == 1 and context.still_mine():
        Event().wait(0.01)
    note(action["journal"], f"{context.attempt} ended")
    return "done"


@app.election_handler("again", policy="at_least_once")
def again(action: dict[str, str], context: ElectionContext) -> None:
    """The first worker to get it dies of it."""
    note(action["journal"], f"{context.attempt} {context.term}")
    if context.attempt == 1:
        os.kill(os.getpid(), 9)
