"""Tasks with limits of time and rate; tasks that die or take too long, with every setting of acks."""

# mypy: disable-error-code="untyped-decorator, misc"

import os
import signal
from typing import Any

from tests.celery_apps.project.celery import app
from tests.celery_apps.project.journal import note, store, wait_at


@app.task(soft_time_limit=1, time_limit=30)
def softly(key: str) -> str:
    wait_at(f"never-{key}")
    return "was let through"


@app.task(time_limit=1)
def hardly(key: str) -> str:
    note(key, "began")
    wait_at(f"never-{key}")
    return "was let through"


@app.task(bind=True)
def limits_of(self: Any) -> Any:
    return [self.request.timelimit, self.soft_time_limit, self.time_limit]


@app.task(rate_limit="10/s")
def seldom(key: str, number: int) -> int:
    note(key, number)
    return number


def _run(task: Any, key: str, how: str) -> Any:
    """The first time it dies, takes too long or fails; then it returns how often it ran."""
    runs = int(store().incr(f"count:{key}"))
    note(key, "run", runs)
    if runs > 1:
        return runs
    if how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit":
        os._exit(5)
    if how == "wait":
        wait_at(f"never-{key}")
    raise ValueError(how)


def _made(name: str, **options: Any) -> Any:
    @app.task(bind=True, name=f"limited.{name}", **options)
    def run(self: Any, key: str, how: str) -> Any:
        return _run(self, key, how)

    return run


early = _made("early")
late = _made("late", acks_late=True)
late_lost = _made("late_lost", acks_late=True, reject_on_worker_lost=True)
late_no_ack = _made("late_no_ack", acks_late=True, acks_on_failure_or_timeout=False)
late_lost_no_ack = _made(
    "late_lost_no_ack", acks_late=True, reject_on_worker_lost=True, acks_on_failure_or_timeout=False
)
early_lost = _made("early_lost", reject_on_worker_lost=True)
