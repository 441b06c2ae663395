"""The project's people, as one process: each line of input names what to do, each line of output answers."""

import json
import os
import sys
from typing import Any

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "shop.settings")
django.setup()

from celery import chord  # noqa: E402 (after the set-up, as everywhere in Django)
from django.test import Client  # noqa: E402
from django_celery_beat.models import IntervalSchedule, PeriodicTask  # noqa: E402
from django_celery_results.models import TaskResult  # noqa: E402
from orders import tasks  # noqa: E402
from orders.models import Order, Tick  # noqa: E402

WAIT_S = 60.0


def order(item: str) -> Any:
    """A request of the web site; the worker gets its task when the order is committed."""
    return Client().get("/orders/", {"item": item}).json()["order"]


def order_state(number: int) -> Any:
    return Order.objects.get(pk=number).state


def results(task: str) -> Any:
    """The rows that the admin shows."""
    return list(TaskResult.objects.filter(task_name=f"orders.tasks.{task}").values_list("status", "result"))


def fail(text: str) -> str:
    """The row that a failed task leaves."""
    found = tasks.fail.delay(text)
    found.get(timeout=WAIT_S, propagate=False)
    row = TaskResult.objects.get(task_id=found.id)
    return f"{row.status} {row.traceback.strip().splitlines()[-1]}"


def squares(count: int) -> Any:
    return chord([tasks.square.s(number) for number in range(count)], tasks.total.s())().get(timeout=WAIT_S)


def inherited_connections(count: int) -> int:
    """How many children had the connection of another process."""
    found = [tasks.which_connection.delay() for _ in range(count)]
    return sum(one.get(timeout=WAIT_S)[1] for one in found)


def tick_every(milliseconds: int, name: str) -> None:
    every, _ = IntervalSchedule.objects.get_or_create(every=milliseconds * 1000, period="microseconds")
    values = {"task": "orders.tasks.tick", "interval": every, "args": json.dumps([name])}
    PeriodicTask.objects.update_or_create(name="tick", defaults=values)


def stop_ticks() -> None:
    PeriodicTask.objects.filter(name="tick").update(enabled=False)
    PeriodicTask.objects.get(name="tick").save(update_fields=["enabled"])


def ticks() -> Any:
    """By name, how many tasks ran; and how many were sent, as the schedule's own table has it."""
    ran = dict[str, int]()
    for name, _ in set(Tick.objects.values_list("name", "task_id")):
        ran[name] = ran.get(name, 0) + 1
    return ran, PeriodicTask.objects.get(name="tick").total_run_count


if __name__ == "__main__":
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(globals()[name](*arguments)), flush=True)
