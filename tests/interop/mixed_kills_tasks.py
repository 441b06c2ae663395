"""A Celery project that writes down each run: for workers of both kinds, which are killed."""

import os
from threading import Event
from typing import Any

from celery import Celery

LATE = bool(os.environ["MIXED_ACKS_LATE"])
RESTORED_AFTER_S = float(
    os.environ.get("MIXED_RESTORED_AFTER_S", "3")
)  # by Celery's workers: what a dead one had fetched

app: Any = Celery("mixed", broker=os.environ["MIXED_BROKER"])
app.conf.update(
    broker_transport_options={"visibility_timeout": RESTORED_AFTER_S},
    task_acks_late=LATE,
    task_reject_on_worker_lost=LATE,
    task_ignore_result=True,
    worker_prefetch_multiplier=4,
)


@app.task(name="run")  # type: ignore[untyped-decorator]
def run(number: str) -> None:
    Event().wait(0.005)
    ledger = os.open(os.environ["MIXED_LEDGER"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(ledger, f"{number} {os.environ['MIXED_WORKER']}\n".encode())
    finally:
        os.close(ledger)
