"""Mingle: says hello to the others at the start and after a lost connection (S2)."""

from umbel.worker.bootsteps import Step
from umbel.worker.context import WorkerContext
from umbel.worker.steps.events import Events


class Mingle(Step):
    name = "mingle"
    requires = ("events",)

    def __init__(self, context: WorkerContext, events: Events) -> None:
        super().__init__()
        self._context = context
        self._events = events
