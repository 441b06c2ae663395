"""A small Celery project, written for Celery alone: `umbel worker` runs it unchanged, next to native tasks.

Where its author runs it, RabbitMQ has its messages. The demo's environment (UMBEL_BROKER, UMBEL_BACKEND) says
where they are here. Only `write_run` is the demo's.
"""

from typing import Any

from celery import Celery

from umbel.demo.writing import write_run

app = Celery("shop", broker="amqp://localhost", backend="rpc://")


@app.task(bind=True)
def charge(self: Any, order: int) -> int:
    """Charge an order; the first step of the chain."""
    write_run(self)
    return order


@app.task(bind=True, autoretry_for=(ConnectionError,), default_retry_delay=0.2, max_retries=3)
def ship(self: Any, order: int) -> int:
    """Fails at the first attempt, as a service that was just being restarted does."""
    write_run(self)
    if self.request.retries == 0:
        raise ConnectionError(
            "the carrier is restarting (raised by the demo on purpose; the task is retried)"
        )
    return order
