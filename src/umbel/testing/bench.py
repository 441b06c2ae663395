"""Bench: one test's app, and who runs what it sends. The fixtures meet here, in any order."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from umbel.app.app import App
from umbel.testing.clock import Clock
from umbel.testing.stage import Stage
from umbel.testing.worker import EmbeddedWorker

RUN_FIRST = "call umbel_inbox.run() first"
ADVANCE_FIRST = "move umbel_clock to its time first"


class Bench:
    def __init__(self, app: App, directory: Path) -> None:
        self.app = app
        self._directory = directory
        self._clock: Clock | None = None
        self._runs: Stage | EmbeddedWorker | None = None
        self._named = ""

    @contextmanager
    def clock(self) -> Iterator[Clock]:
        clock = self._clock = Clock(self.app)
        self._meet()
        try:
            yield clock
        finally:
            clock.close()

    @contextmanager
    def stage(self, fixture: str, *, at_once: bool) -> Iterator[Stage]:
        stage = Stage(self.app, at_once=at_once, how=ADVANCE_FIRST if at_once else RUN_FIRST)
        self._take(fixture, stage)
        with self.app.eager_mode.everywhere(stage):
            yield stage

    @contextmanager
    def worker(self, fixture: str) -> Iterator[EmbeddedWorker]:
        worker = EmbeddedWorker(self.app, self._directory)
        self._take(fixture, worker)
        worker.start()
        try:
            yield worker
        finally:
            worker.stop()

    def _take(self, fixture: str, runs: Stage | EmbeddedWorker) -> None:
        if self._runs is not None:
            raise ValueError(
                f"a test cannot use both {self._named} and {fixture}: "
                "each decides what happens to sent tasks; use one"
            )
        self._runs, self._named = runs, fixture
        self._meet()

    def _meet(self) -> None:
        if self._clock is None or self._runs is None:
            return
        self._clock.used_by(self._runs)
        if isinstance(self._runs, Stage):
            self._runs.keeps_time = True
