"""Period: the time that a report shows, cut into steps."""

from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Period:
    """Unix seconds; `step_s` is the length of a time step, from `first` on, up to `end`."""

    start: float
    end: float
    step_s: float

    @property
    def length_s(self) -> float:
        return self.end - self.start

    @property
    def shown(self) -> tuple[float, float]:
        """From the first step's beginning to the last one's end."""
        times = self.times
        return times[0], times[-1] + self.step_s

    @property
    def times(self) -> list[float]:
        first = self.start // self.step_s
        steps = int(-(-self.end // self.step_s) - first)
        return [(first + number) * self.step_s for number in range(max(steps, 1))]
