import os
from typing import Any

from celery import shared_task
from django.db import connection, transaction

from orders.models import Order, Tick


@shared_task
def pack(order_id: int) -> str:
    """Sent when the order is committed: it must be there."""
    with transaction.atomic():
        order = Order.objects.select_for_update().get(pk=order_id)
        order.state = "packed"
        order.save()
    return str(order.item)


@shared_task
def fail(text: str) -> None:
    raise ValueError(text)


@shared_task
def total(numbers: list[int]) -> int:
    return sum(numbers)


@shared_task
def square(number: int) -> int:
    return number * number


@shared_task(bind=True)
def tick(self: Any, name: str) -> None:
    Tick.objects.create(name=name, task_id=self.request.id)


@shared_task
def which_connection() -> tuple[int, int]:
    """The process, and whether it began with the connection of the process it was forked from."""
    inherited = connection.connection is not None
    connection.ensure_connection()
    return os.getpid(), int(inherited)
