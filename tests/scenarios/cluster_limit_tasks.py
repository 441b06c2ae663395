"""Tasks with limits for the whole cluster. Each run writes into a ledger when it began and when it ended."""

import os
from functools import cache
from pathlib import Path
from threading import Event
from time import monotonic
from typing import Any

from umbel import App, Concurrency, Rate, Task

AT_ONCE, PER_MINUTE = 2, 20
STUCK = "stuck"

app = App("limits", task_ignore_result=True)


@app.task(bind=True, limit=Concurrency(AT_ONCE, key="{customer}"))
def few(self: Task[..., Any], customer: str, number: int) -> None:
    note("begin", self, customer, number)
    while customer == STUCK and not Path("gate").exists():
        Event().wait(0.01)
    note("end", self, customer, number)


@app.task(bind=True, limit=Rate(f"{PER_MINUTE}/m", key="{customer}"))
def paced(self: Task[..., Any], customer: str, number: int) -> None:
    note("begin", self, customer, number)
    note("end", self, customer, number)


@app.task(bind=True)
def plain(self: Task[..., Any], number: int) -> None:
    note("end", self, "", number)


def note(what: str, task: Task[..., Any], customer: str, number: int) -> None:
    """In the worker's directory. One write() of a short line: lines of several processes never mix."""
    assert task.request.hostname
    name, worker = task.name.rpartition(".")[2], task.request.hostname.partition("@")[0]
    os.write(
        _ledger(os.getpid()), f"{what} {name} {customer or '-'} {number} {worker} {monotonic()}\n".encode()
    )


@cache
def _ledger(pid: int) -> int:
    return os.open("ledger.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
