"""The app of test_outages.py: a task that ends when a file is there, and one that is sent every hour."""

from pathlib import Path
from threading import Event
from typing import Any

from tests.scenarios.chaos_tasks import journal_of, write_line
from umbel import App, Task

app = App("outage_tasks")


@app.periodic(every=3600, name="hourly")
@app.task
def hourly() -> None:
    """Only so that there is a lease to lose."""


@app.task(bind=True)
def waits(self: Task[..., Any], directory: str) -> str:
    write_line(journal_of(directory), self.request.id)
    while not (Path(directory) / "gate").exists():
        Event().wait(0.01)
    return self.request.id
