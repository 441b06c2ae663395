"""`app.steps`: bootsteps of the user's own, which start and stop with the worker.

    @app.steps.add
    class Cache:
        name = "cache"
        requires = ("connection",)

        def start(self, worker): ...
        def stop(self, worker): ...

`worker` is what control commands get (`control/state.py`).
"""

from collections.abc import Iterator
from typing import Any, TypeVar

from umbel.control.step_description import described

StepT = TypeVar("StepT", bound=type[Any])


class Steps:
    def __init__(self) -> None:
        self._kinds: list[type[Any]] = []

    def add(self, kind: StepT) -> StepT:
        """Have the worker start one of these; usable as a decorator of the class."""
        described(kind)
        self._kinds.append(kind)
        return kind

    def __iter__(self) -> Iterator[type[Any]]:
        return iter(tuple(self._kinds))
