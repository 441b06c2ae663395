"""Celery's workflows, with results in the same Redis."""

from celery import Celery, chain, chord, group

from benchmarks._throughput import body

WAIT_S = 100.0
app = Celery("bench", broker=body.URL, backend=body.URL)
app.conf.update(worker_prefetch_multiplier=128, broker_connection_retry_on_startup=True)


def _step(_number: object = 0) -> int:
    body.noop(0)
    return 1


step = app.task(name="step")(_step)


def run(kind: str, size: int) -> None:
    if kind == "chain":
        chain(step.si() for _ in range(size)).apply_async().get(timeout=WAIT_S)
    elif kind == "group":
        group(step.si() for _ in range(size)).apply_async().get(timeout=WAIT_S)
    else:
        chord([step.si() for _ in range(size)], step.s()).apply_async().get(timeout=WAIT_S)


def describe() -> dict[str, str]:
    return {}
