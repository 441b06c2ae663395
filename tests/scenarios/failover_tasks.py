"""The app of test_sentinel.py."""

from typing import Any

from tests.scenarios.chaos_tasks import journal_of, write_line
from umbel import App, Task

app = App("failover_tasks")


@app.task(bind=True)
def noted(self: Task[..., Any], directory: str) -> None:
    write_line(journal_of(directory), self.request.id)
