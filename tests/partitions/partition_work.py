"""The app of test_soak.py: periodic tasks, work, workflows and elections, each of which leaves a line.

`PARTITION_RECORDS` is set for workers only: there their machines are recorded. `PARTITION_MUTANT` names
the rule that is broken there (`mutants.py`).
"""

import os
from pathlib import Path
from threading import Event
from time import time
from typing import Any

from umbel import App, ElectionContext, Task

app = App("partition_work")
DROPS = os.environ.get("PARTITION_MUTANT") == "drops-the-redelivered"

if os.environ.get("PARTITION_RECORDS"):
    from tests.partitions.mutants import break_rule
    from tests.partitions.recorder import record_machines

    break_rule(os.environ.get("PARTITION_MUTANT", ""))
    record_machines(Path(os.environ["PARTITION_RECORDS"]))


def note(journal: str, line: str) -> None:
    """One whole line, also while other processes write."""
    file = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, f"{line}\n".encode())
    finally:
        os.close(file)


def note_run(task: Task[..., Any], journal: str) -> None:
    """Which task, whether it knows that it runs again, and when."""
    redelivered = int(task.request.delivery_info["redelivered"])
    note(journal, f"{task.request.id} {redelivered} {time()}")


@app.periodic(every=1, catch_up="all", name="beat")
@app.task(bind=True, ignore_result=True)
def beat(self: Task[..., Any]) -> None:
    note_run(self, os.environ["PARTITION_SLOTS"])


@app.task(bind=True)
def work(self: Task[..., Any], journal: str, number: int, seconds: float = 0.0) -> int:
    if DROPS and self.request.delivery_info["redelivered"]:
        return number
    note_run(self, journal)
    Event().wait(seconds)
    return number


@app.task(bind=True)
def add(self: Task[..., Any], before: int, journal: str, number: int) -> int:
    """A step of a chain."""
    note_run(self, journal)
    return before + number


@app.task(bind=True)
def total(self: Task[..., Any], numbers: list[int], journal: str) -> int:
    """The body of a chord."""
    note_run(self, journal)
    return sum(numbers)


@app.election_handler("once", policy="at_most_once")
def once(action: dict[str, Any], context: ElectionContext) -> str:
    Event().wait(action["seconds"])
    return _signature(context)


@app.election_handler("again", policy="at_least_once")
def again(action: dict[str, Any], context: ElectionContext) -> str:
    began = time()
    while context.still_mine() and time() - began < action["seconds"]:
        Event().wait(0.05)
    return _signature(context)


def _signature(context: ElectionContext) -> str:
    """Who ran it and under which term, as the checkers want to read it in the outcome."""
    from tests.partitions.recorder import holders

    return f"{holders[-1]} {context.term}"
