"""The same workflows for every side that has a canvas; Umbel's words are Celery's."""

from collections.abc import Callable
from typing import Any, Protocol

from benchmarks._throughput import body

WAIT_S = 100.0


class Canvas(Protocol):
    chain: Any
    group: Any
    chord: Any


def step(_number: object = 0) -> int:
    body.noop(0)
    return 1


def runner(canvas: Canvas, task: Any) -> Callable[[str, int], None]:
    """Runs a workflow of that kind and size to its end."""

    def run(kind: str, size: int) -> None:
        parts = [task.si() for _ in range(size)]
        made = canvas.chord(parts, task.s()) if kind == "chord" else getattr(canvas, kind)(parts)
        made.apply_async().get(timeout=WAIT_S)

    return run
