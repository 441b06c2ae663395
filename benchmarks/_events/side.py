"""One contender's process: it takes in a history and prints what it measured, as JSON.

    python -m benchmarks._events.side MODULE apply TASKS TASKS_MAX
    python -m benchmarks._events.side MODULE hold TASKS
    python -m benchmarks._events.side MODULE flow TASKS_IN_MEMORY TASKS
    python -m benchmarks._events.side MODULE describe

Events pass through JSON first, as they do over a broker: every one has texts of its own. They are
made and decoded before the clock runs. Time is the process's own CPU time, so that whoever else
is at work on the machine does not count.
"""

import gc
import json
import sys
import time
import tracemalloc
from collections.abc import Iterator
from importlib import import_module
from itertools import islice
from typing import Any, Protocol

from benchmarks._events.history import History, Wire, failures

CHUNK = 20_000


class State(Protocol):
    def take(self, events: list[Wire]) -> None: ...
    def ended(self) -> dict[str, int]:
        """How many tasks in memory succeeded and failed."""
        ...


def apply(side: Any, tasks: int, tasks_max: int) -> dict[str, float]:
    """So many tasks, of which so many stay in memory."""
    state: State = side.make(tasks_max)
    return {"events_per_s": 1 / _take(side, state, History(), tasks)}


def hold(side: Any, tasks: int) -> dict[str, float]:
    """All tasks stay in memory: what each takes up."""
    tracemalloc.start()
    state: State = side.make(tasks)
    _take(side, state, History(), tasks)
    gc.collect()
    taken_bytes, _peak = tracemalloc.get_traced_memory()
    if state.ended() != {"succeeded": tasks - failures(tasks), "failed": failures(tasks)}:
        sys.exit(f"{tasks} tasks ended, and this is what is known of it: {state.ended()}")
    return {"bytes_per_task": taken_bytes / tasks}


def flow(side: Any, in_memory: int, tasks: int) -> dict[str, float]:
    """Tasks come and go while so many are in memory."""
    state, history = side.make(in_memory), History()
    filling = history.events(in_memory)
    while chunk := list(islice(filling, CHUNK)):
        state.take(chunk)
    return {"us_per_event": _take(side, state, history, tasks) * 1e6}


def _take(side: Any, state: State, history: History, tasks: int) -> float:
    """CPU seconds for each event."""
    took_s, count = 0.0, 0
    events = history.events(tasks)
    while chunk := _decoded(events):
        chunk = side.prepare(chunk)
        began = time.process_time()
        state.take(chunk)
        took_s += time.process_time() - began
        count += len(chunk)
    return took_s / count


def _decoded(events: Iterator[Wire]) -> list[Wire]:
    chunk: list[Wire] = json.loads(json.dumps(list(islice(events, CHUNK))))
    return chunk


def main(module: str, what: str, *numbers: str) -> None:
    side: Any = import_module(module)
    answers: dict[str, Any] = {
        "apply": apply,
        "hold": hold,
        "flow": flow,
        "describe": lambda side: side.describe(),
    }
    print(json.dumps(answers[what](side, *map(int, numbers))))


if __name__ == "__main__":
    main(*sys.argv[1:])
