"""Umbel's workflows, with results in the same Redis."""

import umbel
from benchmarks._growth import workflows
from benchmarks._throughput import body

app = umbel.App("bench", broker=body.URL, backend=body.URL)
step = app.task(workflows.step)
run = workflows.runner(umbel, step)


def describe() -> dict[str, str]:
    return {}
