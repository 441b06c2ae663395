"""Celery's workflows, with results in the same Redis."""

import celery

from benchmarks._growth import workflows
from benchmarks._throughput import body

app = celery.Celery("bench", broker=body.URL, backend=body.URL)
app.conf.update(worker_prefetch_multiplier=128, broker_connection_retry_on_startup=True)
step = app.task(name="step")(workflows.step)
run = workflows.runner(celery, step)


def describe() -> dict[str, str]:
    return {}
