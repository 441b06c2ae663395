"""Bench: joins the fixtures of one test: its app, its clock, and the stage or worker that runs its tasks.

While the clock is used, the time by which Umbel decides what is due or expired stands still in this process
(`umbel/clock.py`). `advance` visits the moments at which something is due, one after another. At each moment
it sends the periodic tasks of that moment, and runs all due calls and those that they send. So a retry that a
task requests on the way runs at its own moment.

The clock does not change `time.time()` and `datetime.now()` in the code of tasks, time limits, leases, and
the clocks of other processes.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from umbel.app.app import App
from umbel.app.cluster.periodic import Periodic
from umbel.app.sending.preparation import instant
from umbel.clock import cluster_now, stand_still
from umbel.testing.inbox import Stage
from umbel.testing.worker import EmbeddedWorker
from umbel.wire.message import Outgoing

MOMENTS_MAX = 10_000  # at which something may be due in one move of the clock


@dataclass
class _Slot:
    """The next moment of a periodic task."""

    periodic: Periodic
    at_us: int


class Clock:
    """The fixture `umbel_clock`: the cluster's time in this process, which the test moves."""

    def __init__(self, app: App) -> None:
        self._app = app
        self.runner: Stage | EmbeddedWorker | None = None  # runs due calls when the clock moves
        stand_still(cluster_now())

    @property
    def now(self) -> datetime:
        """The current time of the test, in UTC."""
        return datetime.fromtimestamp(cluster_now(), UTC)

    def set(self, moment: datetime | str | float) -> None:
        """Set the clock to a moment, also an earlier one. Nothing is sent or run on the way.

        A datetime without a time zone is in UTC.
        """
        stand_still(instant(moment))

    def advance(self, by: float | timedelta) -> None:
        """Let so many seconds pass; when this returns, everything that was due on the way has run."""
        seconds = by.total_seconds() if isinstance(by, timedelta) else by
        if not 0 <= seconds < float("inf"):
            raise ValueError(f"umbel_clock.advance({by!r}): it cannot be negative; use set() to go back")
        self._pass_to(cluster_now() + seconds)

    def advance_to(self, moment: datetime | str | float) -> None:
        """Let the time pass up to a moment, as `advance` does; ValueError if it is in the past."""
        until = instant(moment)
        if until < cluster_now():
            raise ValueError(
                f"umbel_clock.advance_to({moment!r}): it is {self.now} already; use set() to go back"
            )
        self._pass_to(until)

    def close(self) -> None:
        """Return to the real time."""
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
        if self.runner is not None:
            self.runner.catch_up()

    def _next_due(self, slots: Sequence[_Slot]) -> float | None:
        """The next moment at which something is due. Overdue calls have run, or run elsewhere."""
        now = cluster_now()
        delayed = self.runner.next_due() if self.runner is not None else None
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


RUN_FIRST = "call umbel_inbox.run() first"
ADVANCE_FIRST = "move umbel_clock to its time first"


class Bench:
    """Joins the fixtures of one test, in any order."""

    def __init__(self, app: App, directory: Path) -> None:
        self.app = app
        self._directory = directory
        self._clock: Clock | None = None
        self._runner: Stage | EmbeddedWorker | None = None
        self._fixture = ""

    @contextmanager
    def clock(self) -> Iterator[Clock]:
        """A clock for the test, stopped at the current time."""
        clock = self._clock = Clock(self.app)
        self._connect()
        try:
            yield clock
        finally:
            clock.close()

    @contextmanager
    def stage(self, fixture: str, *, at_once: bool) -> Iterator[Stage]:
        """A stage that holds or runs what the test sends."""
        stage = Stage(self.app, at_once=at_once, how=ADVANCE_FIRST if at_once else RUN_FIRST)
        self._take(fixture, stage)
        with self.app.eager_mode.everywhere(stage):
            yield stage

    @contextmanager
    def worker(self, fixture: str) -> Iterator[EmbeddedWorker]:
        """A running worker for the test's app."""
        worker = EmbeddedWorker(self.app, self._directory)
        self._take(fixture, worker)
        worker.start()
        try:
            yield worker
        finally:
            worker.stop()

    def _take(self, fixture: str, runner: Stage | EmbeddedWorker) -> None:
        if self._runner is not None:
            raise ValueError(
                f"a test cannot use both {self._fixture} and {fixture}: "
                "each decides what happens to sent tasks; use one"
            )
        self._runner, self._fixture = runner, fixture
        self._connect()

    def _connect(self) -> None:
        if self._clock is None or self._runner is None:
            return
        self._clock.runner = self._runner
        if isinstance(self._runner, Stage):
            self._runner.has_clock = True
