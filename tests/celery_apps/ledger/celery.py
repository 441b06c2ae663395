import os
from threading import Event
from typing import Any

from celery import Celery, chain, chord

BROKER = os.environ["LEDGER_BROKER"]
app = Celery("ledger")
app.conf.update(
    broker_url=BROKER,
    result_backend=os.environ["LEDGER_RESULTS"],
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    broker_connection_retry_on_startup=True,
    worker_prefetch_multiplier=8,
    broker_transport_options={"confirm_publish": True} if BROKER.startswith("amqp") else {},
)
JOURNAL = os.environ["LEDGER_JOURNAL"]
STEP_S, WORK = 0.005, Event()


def note(*words: object) -> None:
    """One line, in one write, so that no kill can cut it."""
    line = " ".join(map(str, words)) + "\n"
    file = os.open(JOURNAL, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(file, line.encode())
    os.close(file)


@app.task(bind=True)
def step(self: Any, number: int, place: int) -> int:
    note("step", number, place, self.request.id)
    WORK.wait(STEP_S)
    return number


@app.task(bind=True)
def part(self: Any, number: int, place: int) -> int:
    note("part", number, place, self.request.id)
    WORK.wait(STEP_S)
    return place


@app.task(bind=True)
def body(self: Any, places: list[int], number: int) -> list[Any]:
    note("body", number, 0, self.request.id)
    return [number, sorted(places)]


def send(count: int, steps: int, parts: int) -> list[str]:
    """A chain and a chord for each number; the ids of their ends."""
    ends: list[str] = []
    for number in range(count):
        chained = chain(step.si(number, place) for place in range(steps)).delay()
        ends.append(chained.id)
        header = [part.s(number, place) for place in range(parts)]
        ends.append(chord(header)(body.s(number)).id)
    return ends
