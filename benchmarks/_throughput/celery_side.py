"""Celery's side: as its guide on optimizing says for many short tasks, without what nobody asks for.

That is a large prefetch, no results and no rate limits. Sending in bulk holds one producer, which
is quicker than its `group`.
"""

import celery
from celery import Celery

from benchmarks._throughput import body

app = Celery("bench", broker=body.URL)
app.conf.update(
    task_ignore_result=True,
    worker_prefetch_multiplier=128,
    worker_disable_rate_limits=True,
    worker_hijack_root_logger=True,
    broker_connection_retry_on_startup=True,
)
noop = app.task(name="noop")(body.noop)
probe = app.task(name="probe")(body.probe)


def send_each(count: int) -> None:
    for number in range(count):
        noop.delay(number)


def send_bulk(count: int) -> None:
    with app.producer_or_acquire() as producer:
        for number in range(count):
            noop.apply_async((number,), producer=producer)


def send(value: object) -> None:
    noop.delay(value)


def send_probe() -> None:
    probe.delay()


def describe() -> dict[str, str]:
    return {
        "version": celery.__version__,
        "bulk": "apply_async() with one producer",
        "delivery": "at most once (acks_late is off by default); publishing to RabbitMQ is not confirmed",
        "crash": "loses what was running",
    }
