"""The app of test_partitions.py: a periodic task, so that somebody leads, an election, and work."""

import os
from pathlib import Path
from threading import Event

from umbel import App, ElectionContext

app = App("partition_tasks")


def note(journal: str, line: str) -> None:
    """One whole line, also while other processes write."""
    file = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, f"{line}\n".encode())
    finally:
        os.close(file)


@app.periodic(every=1, name="beat")
@app.task(ignore_result=True)
def beat() -> None:
    """Nothing: it is sent by whoever leads."""


@app.task
def work(journal: str, number: int) -> int:
    note(journal, str(number))
    return number


@app.election_handler("cut", policy="at_least_once")
def cut(action: dict[str, str], context: ElectionContext) -> str:
    """The first run goes on until the election is not its own; the next has nothing to wait for."""
    note(action["journal"], f"{context.attempt} began in {os.readlink('/proc/self/ns/net')}")
    while context.attempt == 1 and context.still_mine() and not Path(action["journal"] + ".end").exists():
        Event().wait(0.01)
    note(action["journal"], f"{context.attempt} ended")
    return f"attempt {context.attempt}"
