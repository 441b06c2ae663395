"""Umbel's cluster state."""

from benchmarks._events.history import Wire
from umbel.events.state import ClusterState
from umbel.version import VERSION


class State:
    def __init__(self, tasks_max: int) -> None:
        self._state = ClusterState(tasks_max=tasks_max)

    def take(self, events: list[Wire]) -> None:
        apply = self._state.apply
        for event in events:
            apply(event)

    def ended(self) -> dict[str, int]:
        counts = self._state.counts
        return {"succeeded": counts.get("SUCCESS", 0), "failed": counts.get("FAILURE", 0)}


def make(tasks_max: int) -> State:
    return State(tasks_max)


def prepare(events: list[Wire]) -> list[Wire]:
    return events


def describe() -> dict[str, str]:
    return {"version": VERSION, "state": "umbel.events.state.ClusterState"}
