"""Celery's cluster state, the one behind its own monitors and Flower."""

from collections import Counter

from celery import VERSION_BANNER
from celery.events.state import State as CeleryState

from benchmarks._events.history import Wire


class State:
    def __init__(self, tasks_max: int) -> None:
        self._state = CeleryState(max_tasks_in_memory=tasks_max)

    def take(self, events: list[Wire]) -> None:
        apply = self._state.event
        for event in events:
            apply(event)

    def ended(self) -> dict[str, int]:
        counts = Counter(task.state for task in self._state.tasks.values())
        return {"succeeded": counts["SUCCESS"], "failed": counts["FAILURE"]}


def make(tasks_max: int) -> State:
    return State(tasks_max)


def prepare(events: list[Wire]) -> list[Wire]:
    """What its receiver adds to every event."""
    return [{**event, "local_received": event["timestamp"]} for event in events]


def describe() -> dict[str, str]:
    return {"version": VERSION_BANNER, "state": "celery.events.state.State"}
