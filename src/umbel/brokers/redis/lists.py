"""The lists of a queue: one for each step of priority, and what their names end in.

Celery's transport options `priority_steps` and `sep` name them, and all that share a queue must agree.
The scripts are given the same names in front of their text, so that they are defined here alone.
"""

from bisect import bisect
from dataclasses import dataclass

from umbel.brokers.interface.settings import DEFAULT_PRIORITY_STEPS, DEFAULT_SEP

PRIORITY_MAX = 9


@dataclass(frozen=True, slots=True)
class Lists:
    """`steps` begin with 0 and rise; 0 is served first."""

    steps: tuple[int, ...] = DEFAULT_PRIORITY_STEPS
    sep: str = DEFAULT_SEP

    @property
    def suffixes(self) -> list[str]:
        """What follows the queue's name in each, in the order in which they are served."""
        return [self.suffix(step) for step in self.steps]

    def suffix(self, step: int) -> str:
        return f"{self.sep}{step}" if step else ""

    def step_of(self, priority: int) -> int:
        """The step whose list holds a priority: the next one below, in the range there is."""
        return self.steps[bisect(self.steps, min(max(priority, 0), PRIORITY_MAX)) - 1]

    def lua(self) -> bytes:
        """The same for the scripts."""
        suffixes = ", ".join(map(_quoted, self.suffixes))
        return f"local SEP, SUFFIXES = {_quoted(self.sep)}, {{{suffixes}}}\n".encode()


def steps_problem(steps: tuple[int, ...]) -> str:
    """Why these steps cannot be used; "" if they can."""
    if not steps or steps[0] != 0 or list(steps) != sorted(set(steps)):
        return (
            f"priority_steps is {list(steps)!r}: write rising numbers that begin with 0, as in [0, 3, 6, 9]"
        )
    return ""


def _quoted(text: str) -> str:
    """As Lua writes any bytes."""
    return "'" + "".join(f"\\{byte:03d}" for byte in text.encode()) + "'"


DEFAULT_LISTS = Lists()
