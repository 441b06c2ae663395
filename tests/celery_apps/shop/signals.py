"""What happens around tasks and in the life of a worker. Handlers of processes write to `SHOP_JOURNAL`."""

# mypy: disable-error-code="untyped-decorator"

import os
from typing import Any

from celery import signals


def journal(line: str) -> None:
    if path := os.environ.get("SHOP_JOURNAL"):
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{line}\n")


@signals.task_prerun.connect
def before_task(task_id: str, task: Any, **_: Any) -> None:
    journal(f"prerun {task.name}")


@signals.task_failure.connect
def after_failure(exception: Any, **_: Any) -> None:
    journal(f"failure {exception!r}")


@signals.worker_process_init.connect
def open_connections(**_: Any) -> None:
    journal("process_init")


@signals.worker_ready.connect
def say_ready(sender: Any, **_: Any) -> None:
    journal(f"ready {sender.hostname}")


@signals.after_setup_logger.connect
def quieten(logger: Any, **_: Any) -> None:
    journal("after_setup_logger")
    logger.getChild("noisy").setLevel("ERROR")


@signals.after_setup_task_logger.connect
def task_logger_is_there(**_: Any) -> None:
    journal("after_setup_task_logger")


@signals.celeryd_init.connect
def configure(sender: str, conf: Any, **_: Any) -> None:
    journal(f"init {sender}")
    conf.worker_max_tasks_per_child = 400
    conf.task_default_rate_limit = "2000/s"


@signals.celeryd_after_setup.connect
def add_own_queue(sender: str, instance: Any, **_: Any) -> None:
    instance.app.amqp.queues.select_add(f"only.{sender.partition('@')[0]}")
