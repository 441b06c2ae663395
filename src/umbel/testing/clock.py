"""Clock: time that a test moves. Countdowns, retries and periodic tasks come due without anybody waiting.

While it is in use, the time by which Umbel judges what is due or expired stands still in this process
(`umbel/clock.py`). `advance` goes through the moments at which something is due, one after the other. At each
it sends the periodic tasks of that moment and has everything run that is due, with what follows from it. So a
retry that is asked for on the way has its own moment, and runs there.

What it does not move: `time.time()` and `datetime.now()` in the code of tasks, time limits, leases, and the
clocks of other processes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Protocol

from umbel.app.app import App
from umbel.app.cluster.periodic import Periodic
from umbel.app.sending.stated import instant
from umbel.clock import cluster_now, stand_still
from umbel.wire.message import Outgoing

MOMENTS_MAX = 10_000  # at which something may be due in one move


class Runs(Protocol):
    """Who runs what is due: the stage of eager mode, or a worker."""

    def next_due(self) -> float | None:
        """When it will have something to run, in Unix time."""
        ...

    def catch_up(self) -> None:
        """Run everything that is due now."""
        ...


@dataclass
class _Slot:
    """The next moment of a periodic task."""

    periodic: Periodic
    at_us: int


class Clock:
    def __init__(self, app: App) -> None:
        self._app = app
        self._runs: Runs | None = None
        stand_still(cluster_now())

    @property
    def now(self) -> datetime:
        """In UTC."""
        return datetime.fromtimestamp(cluster_now(), UTC)

    def set(self, moment: datetime | str | float) -> None:
        """Put the clock to a moment, earlier ones too. Nothing is sent or run on the way.

        A datetime without a time zone is in UTC.
        """
        stand_still(instant(moment))

    def advance(self, by: float | timedelta) -> None:
        """Let so many seconds pass: everything that is due on the way has run when this returns."""
        seconds = by.total_seconds() if isinstance(by, timedelta) else by
        if not 0 <= seconds < float("inf"):
            raise ValueError(f"umbel_clock.advance({by!r}): it cannot be negative; use set() to go back")
        self._pass_to(cluster_now() + seconds)

    def advance_to(self, moment: datetime | str | float) -> None:
        """The same, up to a moment."""
        until = instant(moment)
        if until < cluster_now():
            raise ValueError(
                f"umbel_clock.advance_to({moment!r}): it is {self.now} already; use set() to go back"
            )
        self._pass_to(until)

    def used_by(self, runs: Runs) -> None:
        self._runs = runs

    def close(self) -> None:
        stand_still(None)

    def _pass_to(self, until: float) -> None:
        began = cluster_now()
        self._catch_up()
        slots = [_Slot(entry, entry.entry.rule.after(_us(began))) for entry in self._app.periodic_tasks]
        moments = 0
        while (due := self._next_due(slots)) is not None and due <= until:
            moments += 1
            if moments > MOMENTS_MAX:
                raise RuntimeError(
                    f"more than {MOMENTS_MAX} times at which something is due within {until - began:g} s; "
                    "move the clock in smaller steps"
                )
            stand_still(due)
            for slot in slots:
                if slot.at_us <= _us(due):
                    self._send(slot.periodic.messages(slot.at_us))
                    slot.at_us = slot.periodic.entry.rule.after(slot.at_us)
            self._catch_up()
        stand_still(until)

    def _catch_up(self) -> None:
        if self._runs is not None:
            self._runs.catch_up()

    def _next_due(self, slots: "Sequence[_Slot]") -> float | None:
        """The next moment after this one. What is overdue was run or is not ours to run."""
        now = cluster_now()
        delayed = self._runs.next_due() if self._runs is not None else None
        moments = [delayed] if delayed is not None and delayed > now else []
        return min([*moments, *(slot.at_us / 1e6 for slot in slots)], default=None)

    def _send(self, batch: Sequence[Outgoing]) -> None:
        runner = self._app.eager_mode.runner
        if runner is not None:
            runner.run(batch)
        else:
            self._app.producer.publish(batch)


def _us(at_s: float) -> int:
    return round(at_s * 1e6)
