"""Load: what the demo sends, and how each task must end."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import cos, tau
from pathlib import Path
from typing import Any

from umbel.app.canvas.chain import chain
from umbel.app.canvas.group import group
from umbel.app.canvas.open_chord import chord
from umbel.app.canvas.signature import Signature
from umbel.app.cluster.elections import ElectionOutcome
from umbel.app.results import AsyncResult, GroupResult
from umbel.app.sending.prepare import new_id
from umbel.demo import tasks

BATCHES_PER_S = 2
GROUP_SIZE = 4
CANVAS_EVERY = 4  # batches
CRASHES_AT = (3, 9)  # batches
CHARGES = 4  # a batch
SLOW_S = 0.05
LONG_S = 0.3
DELAY_S = 2.0
HELD = 6  # as many as all children of the demo
SWELL = 240  # gentle batches from one ebb to the next
GENTLE_CANVAS_EVERY = 20  # gentle batches

KINDS: Mapping[str, tuple[str, str]] = {
    "quick": ("SUCCESS", "adds two numbers"),
    "slow": ("SUCCESS", "takes 50 ms"),
    "held": ("SUCCESS", "runs while a worker dies"),
    "awaited": ("SUCCESS", "async def, awaits 10 ms"),
    "failing": ("FAILURE", "raises ValueError"),
    "retried": ("SUCCESS", "fails once, is retried"),
    "delayed": ("SUCCESS", "is due two seconds later"),
    "crashing": ("SUCCESS", "kills its process once"),
    "chain": ("SUCCESS", "three steps in a row"),
    "group": ("SUCCESS", "four at once"),
    "chord": ("SUCCESS", "four at once, then their sum"),
    "never": ("REVOKED", "is revoked before it is due"),
    "elected": ("SUCCESS", "is sent by an elected worker"),
    "charge": ("SUCCESS", "a Celery app's task"),
    "order": ("SUCCESS", "a Celery app's chain, retried"),
}
"""By kind: how its tasks must end, and what they do."""
OF_CELERY = ("charge", "order")  # kinds


@dataclass(slots=True)
class Sent:
    """The kind of everything that was sent, by task id."""

    kinds: dict[str, str] = field(default_factory=dict)

    def add(self, kind: str, result: Any) -> None:
        for task_id in _ids(result):
            self.kinds[task_id] = kind

    def __len__(self) -> int:
        return len(self.kinds)


def send_batch(sent: Sent, number: int, home: Path, *, celery: bool) -> None:
    """Half a second's worth of mixed load, in as few steps as it takes."""
    calls = list(_singles(number, home))
    if celery:
        calls += [("charge", _of_celery("charge", number)) for _ in range(CHARGES)]
    results = tasks.app.send_many(call for _, call in calls)
    for (kind, _), result in zip(calls, results, strict=True):
        sent.add(kind, result)
    if number % CANVAS_EVERY == 0:
        _send_canvas(sent, number)
        if celery:
            sent.add("order", _celery_chain(number))


def send_gently(number: int, *, celery: bool) -> None:
    """A second's worth of load that leaves the machine to others."""
    tasks.app.send_many(gentle(number))
    if celery:
        _of_celery("charge", number).apply_async()
    if number % GENTLE_CANVAS_EVERY == 0:
        _send_canvas(Sent(), number)
        if celery:
            _celery_chain(number)


def gentle(number: int) -> Iterator[Signature[Any]]:
    """It swells and ebbs, between four and twenty tasks, so that charts show more than a line."""
    share = (1 - cos(tau * number / SWELL)) / 2
    mixed: list[Signature[Any]] = [
        tasks.quick.s(number, 1),
        tasks.slow.s(round(LONG_S * (1 + share), 2)),
        tasks.quick.s(number, 2),
        tasks.retried.s(number),
        tasks.awaited.s(LONG_S),
        tasks.quick.s(number, 3),
        tasks.delayed.s(number).set(countdown=DELAY_S),
        tasks.failing.s(number),
        tasks.quick.s(number, 4),
    ]
    for place in range(4 + round(16 * share)):
        yield mixed[(4 * number + place) % len(mixed)]


def elect(number: int, *, timeout_s: float) -> tuple[str, ElectionOutcome]:
    """One worker of all is elected to send a task; its id, and how the election ended."""
    call = tasks.elected.s().set(task_id=new_id())
    name = f"{tasks.RUN}-report-{number}"
    return call.options["task_id"], tasks.app.control.election(name, "task", call.to_map(), timeout=timeout_s)


def send_held(sent: Sent, release: Path) -> None:
    """Tasks that run until that file is there."""
    for result in tasks.app.send_many(tasks.held.s(str(release)) for _ in range(HELD)):
        sent.add("held", result)


def _send_canvas(sent: Sent, number: int) -> None:
    steps = [tasks.step.s(one) for one in range(GROUP_SIZE)]
    sent.add("chain", chain(tasks.step.s(number), tasks.step.s(2), tasks.step.s(3)).apply_async())
    sent.add("group", group(steps).apply_async())
    sent.add("chord", chord(steps, tasks.total.s()).apply_async())


def _celery_chain(number: int) -> Any:
    return chain(_of_celery("charge", number), _of_celery("ship")).apply_async()


def _of_celery(name: str, *args: int) -> Signature[Any]:
    """By name, as one who has not the Celery app's code sends."""
    return tasks.app.signature(f"umbel.demo.celery_shop.{name}", args, queue=tasks.CELERY_QUEUE)


def _singles(number: int, home: Path) -> Iterator[tuple[str, Signature[Any]]]:
    for one in range(40):
        yield "quick", tasks.quick.s(number, one)
    for _ in range(3):
        yield "slow", tasks.slow.s(SLOW_S)
        yield "awaited", tasks.awaited.s(0.01)
    yield "failing", tasks.failing.s(number)
    yield "retried", tasks.retried.s(number)
    yield "delayed", tasks.delayed.s(number).set(countdown=DELAY_S)
    if number in CRASHES_AT:
        yield "crashing", tasks.crashing.s(str(home / f"crash-{number}"))


def _ids(result: Any) -> Iterator[str]:
    """Of a result, of all members of a group, and of what came before it."""
    if isinstance(result, GroupResult):
        for one in result.results:
            yield from _ids(one)
    elif isinstance(result, AsyncResult):
        yield result.id
    if getattr(result, "parent", None) is not None:
        yield from _ids(result.parent)
