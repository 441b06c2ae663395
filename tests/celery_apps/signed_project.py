"""A Celery project, signed where Umbel sends its messages; run as a program, a client that has no key."""

import os
from pathlib import Path
from typing import Any

from celery import Celery, chain

HOME = Path(os.environ.get("SIGNED_HOME", "."))
app = Celery("signed", broker=os.environ.get("SIGNED_BROKER"), backend=os.environ.get("SIGNED_BACKEND"))
app.conf.accept_content = ["json", "pickle"]
app.conf.beat_schedule = {
    "tick": {
        "task": "note",
        "schedule": 0.2,
        "args": ["ticked"],
        "options": {"queue": "internal", "ignore_result": True},
    }
}


@app.task(name="note")
def note(*words: Any) -> str:
    word = str(words[-1])
    with (HOME / "runs.txt").open("a") as file:
        file.write(f"{word}\n")
    return word


@app.task(name="again", bind=True, max_retries=3)
def again(self: Any, word: str) -> str:
    if self.request.retries == 0:
        raise self.retry(countdown=0)
    return str(note(word))


@app.task(name="moves", bind=True)
def moves(self: Any, word: str) -> None:
    if self.request.retries == 0:
        raise self.retry(queue="internal", countdown=0)
    note(word)


@app.task(name="fails")
def fails() -> None:
    raise ValueError("as it should")


@app.task(name="sends")
def sends(word: str) -> None:
    note.apply_async([word], queue="internal")


def send_unsigned() -> None:
    """All the ways in which a message of one queue names what is to run on another."""
    evil = note.si("evil").set(queue="internal")
    legacy = note.s("legacy").set(queue="legacy")
    legacy.clone().apply_async(link=evil)
    chain(legacy.clone(), evil).apply_async()
    # One that took the error itself would be called at once, where the task failed.
    fails.s().set(queue="legacy").apply_async(link_error=again.si("evil").set(queue="internal"))
    for task in (moves, sends):
        task.s("evil").set(queue="legacy").apply_async()
    evil.apply_async()


if __name__ == "__main__":
    send_unsigned()
