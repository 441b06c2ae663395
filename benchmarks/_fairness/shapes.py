"""The shapes of load: one long task among short ones. Only the standard library."""

import os
from collections.abc import Iterator
from dataclasses import dataclass

BEFORE, BEHIND = 100, 200
LONG_S = float(os.environ.get("FAIRNESS_LONG_S", "30"))


@dataclass(frozen=True)
class Shape:
    title: str
    workers: int = 2
    short_s: float = 0.0
    is_singly: bool = False
    is_chord: bool = False
    priorities: int = 1
    has_long: bool = True
    count: int = BEFORE + BEHIND

    def calls(self) -> Iterator[tuple[str, float, int]]:
        """(kind, how long it takes, priority) of each task, in the order in which they are sent."""
        for number in range(self.count + self.has_long):
            is_long = self.has_long and number == BEFORE
            yield (
                "long" if is_long else "short",
                LONG_S if is_long else self.short_s,
                0 if is_long else number % self.priorities * 3,
            )


SHAPES = {
    "warm": Shape("before anything is measured", has_long=False, count=200),
    "short": Shape("short tasks"),
    "singly": Shape("short tasks, sent one by one", is_singly=True),
    "20ms": Shape("tasks of 20 ms", short_s=0.020),
    "eight": Shape("8 workers, tasks of 20 ms", workers=8, short_s=0.020),
    "chord": Shape("parts of a chord", is_chord=True),
    "priorities": Shape("four priorities", priorities=4),
}
