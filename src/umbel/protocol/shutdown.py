"""Shutdown: how a worker comes to its end, from the first request to the last message (F7).

Each request makes it more urgent. The first: take nothing more and finish what runs, for up to
`grace_s` (warm). The second: the running tasks are interrupted, and have `soft_s` to clean up (soft). The
third, or the end of the time: what still runs is cut off and its message returned (cold). An order
to quit is cold at once.

Why that loses nothing: a message is acknowledged when its task has ended, and returned otherwise;
no phase does neither. What was cut off runs again elsewhere, so the only repeats are those that
`Cut` counts. It stops being right where tasks are acknowledged before they run (`acks_early`).
"""

from enum import Enum
from typing import assert_never

from umbel.protocol.machine import Tick
from umbel.protocol.value import Value


class Phase(Enum):
    RUNNING = "running"
    WARM = "draining"
    SOFT = "interrupting"
    COLD = "returning"
    DONE = "stopped"


class Ask(Value):
    """Somebody wants the worker to stop: a signal, a command of remote control."""


class Quit(Value):
    """Somebody wants it to stop at once, and to wait for nothing."""


class Running(Value):
    """So many tasks run, of those that were running when it was asked to stop."""

    count: int


class StopTaking(Value):
    """Claim nothing more, and return what has not started."""


class Interrupt(Value):
    """Tell the tasks that run: they may tidy up, and then their messages return."""


class Cut(Value):
    """End the children and return what they ran: so many tasks will run twice."""

    count: int


class Drained(Value):
    """Nothing runs any more."""


Event = Ask | Quit | Running
Effect = StopTaking | Interrupt | Cut | Drained


class Shutdown:
    def __init__(self, *, grace_s: float, soft_s: float) -> None:
        self.phase = Phase.RUNNING
        self.deadline: float | None = None
        self.cut = 0  # how many tasks were cut off
        self._grace_s = grace_s
        self._soft_s = soft_s
        self._running = 0

    @property
    def is_stopping(self) -> bool:
        return self.phase is not Phase.RUNNING

    @property
    def running(self) -> int:
        return self._running

    def left_s(self, now: float) -> float | None:
        """How long the tasks that run still have; None when nobody counts."""
        return None if self.deadline is None else max(0.0, self.deadline - now)

    def describe(self, now: float) -> dict[str, object]:
        """For `status` and `health`."""
        return {"phase": self.phase.value, "running": self._running, "left_s": self.left_s(now)}

    def step(self, event: Event | Tick, now: float) -> list[Effect]:
        match event:
            case Running(count):
                return self._note(count)
            case Ask():
                return self._press(now)
            case Quit():
                first: list[Effect] = [] if self.is_stopping else [StopTaking()]
                return first + self._cut()
            case Tick():
                is_due = self.deadline is not None and now >= self.deadline
                return self._cut() if is_due else []
            case _:
                assert_never(event)

    def _note(self, count: int) -> list[Effect]:
        self._running = count
        if count or self.phase in (Phase.RUNNING, Phase.DONE):
            return []
        self.phase, self.deadline = Phase.DONE, None
        return [Drained()]

    def _press(self, now: float) -> list[Effect]:
        match self.phase:
            case Phase.RUNNING:
                self.phase, self.deadline = Phase.WARM, now + self._grace_s
                return [StopTaking()]
            case Phase.WARM:
                # Never later than the grace that the first request gave.
                soft_by = now + self._soft_s
                self.phase = Phase.SOFT
                self.deadline = soft_by if self.deadline is None else min(self.deadline, soft_by)
                return [Interrupt()]
            case Phase.SOFT:
                return self._cut()
            case _:
                return []

    def _cut(self) -> list[Effect]:
        if self.phase in (Phase.COLD, Phase.DONE):
            return []
        self.phase, self.deadline = Phase.COLD, None
        self.cut = self._running
        return [Cut(self._running)]
