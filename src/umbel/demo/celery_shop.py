"""A small Celery project, which `umbel worker` runs unchanged next to native tasks.

The project itself is configured for RabbitMQ. The demo overrides its broker and backend with the environment
variables UMBEL_BROKER and UMBEL_BACKEND. Only `write_run` belongs to the demo.
"""

from typing import Any

from celery import Celery

from umbel.demo import write_run

app = Celery("shop", broker="amqp://localhost", backend="rpc://")


@app.task(bind=True)
def charge(self: Any, order: int) -> int:
    """Return the order; the first step of the chain."""
    write_run(self)
    return order


@app.task(bind=True, autoretry_for=(ConnectionError,), default_retry_delay=0.2, max_retries=3)
def ship(self: Any, order: int) -> int:
    """Fail at the first attempt, like a service that is just restarting."""
    write_run(self)
    if self.request.retries == 0:
        raise ConnectionError(
            "the carrier is restarting (raised by the demo on purpose; the task is retried)"
        )
    return order
