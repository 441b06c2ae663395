"""Tasks that write down when they ran and when they sent, so that events can be compared with it."""

from collections.abc import Sequence
from pathlib import Path
from time import time
from typing import Any

from umbel import App, Task

app = App("ledger")


@app.task(bind=True)
def runs(self: Task[..., Any], directory: str, sends: str = "") -> None:
    """With `sends`: it sends one more, under that id."""
    started = time()
    if sends:
        send(app, directory, sends)
    write_down("ran.txt", directory, str(self.request.id), started, time())


def send(sender: App, directory: str, task_id: str, sends: str = "") -> None:
    """Between the two times it was sent: from the second on a worker could take it."""
    producer, before, handed = sender.producer, time(), 0.0
    publish = producer.publish

    def noted(batch: Sequence[Any]) -> None:
        nonlocal handed
        handed = time()
        publish(batch)

    producer.publish = noted  # type: ignore[method-assign]
    try:
        sender.send_task("ledger_tasks.runs", (directory, sends), task_id=task_id)
    finally:
        producer.publish = publish  # type: ignore[method-assign]
    write_down("sent.txt", directory, task_id, before, handed)


def write_down(file: str, directory: str, task_id: str, began: float, ended: float) -> None:
    with (Path(directory) / file).open("a") as ledger:
        ledger.write(f"{task_id} {began!r} {ended!r}\n")
