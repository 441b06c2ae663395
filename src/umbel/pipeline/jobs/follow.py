"""Follow: the tables kept up to date while events are recorded, by Structured Streaming.

The stream takes the lake's raw files in batches and writes each batch as partial states
(`partials.py`); a publication joins them all. It runs in rounds: take all there is, publish if that
was anything, wait, look again. Killed at any point and started again it goes on where it was, and the
tables are those of a batch build over the same files.

The files are looked into before each round, so one that cannot be read is set aside and named instead
of ending the stream. One whose data is damaged is met by Spark; it is found and set aside then, and
the round goes on without it.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from umbel.pipeline import io
from umbel.pipeline.failing import failing_as
from umbel.pipeline.faults import BuildFailed
from umbel.pipeline.files import Found, Unreadable
from umbel.pipeline.jobs.build import Look, Tell, sound
from umbel.pipeline.jobs.joining import make_tables
from umbel.pipeline.jobs.partials import Partials

FILES_PER_BATCH = 32
ROUND_TIMEOUT_S = 24 * 3600


@dataclass(frozen=True, slots=True)
class Following:
    """How to follow. `published`: called after each publication. `every_s`: how long a round waits for
    new files."""

    look: Look
    published: Callable[[io.Manifest], None]
    until_caught_up: bool = False
    every_s: float = 30.0
    files_per_batch: int = FILES_PER_BATCH
    only: Sequence[str] = ()
    tell: Tell | None = None


def follow(
    spark: SparkSession, lake: Path, following: Following, *, stop: threading.Event | None = None
) -> None:
    """Until stopped, or until all files that are there are in published tables. Hold the lock."""
    stream = _Stream(spark, lake, following)
    stopping = stop or threading.Event()
    while not stopping.is_set():
        stream.run_round()
        if following.until_caught_up:
            return
        stopping.wait(following.every_s)


class _Stream:
    def __init__(self, spark: SparkSession, lake: Path, following: Following) -> None:
        self._spark = spark
        self._lake = lake
        self._following = following
        self._partials = Partials(lake)
        self._published: tuple[int, str] | None = None  # which version, by this process
        self._unreadable: list[Unreadable] = []  # since it began
        with failing_as("cannot start the stream; restart the command, it resumes where it stopped"):
            self._partials.open()
            self._partials.tidy()

    def run_round(self) -> None:
        """Take all there is; publish if that was anything, and the first time."""
        started, found = time.monotonic(), self._following.look()
        found = replace(found, unreadable=[*self._unreadable, *found.unreadable])
        sound(found, self._following.look, lambda rest: self._take_and_publish(rest, started))

    def _take_and_publish(self, found: Found, started: float) -> None:
        self._unreadable = found.unreadable
        with failing_as("cannot read the lake's past; restart the command, it resumes where it stopped"):
            self._partials.begin(self._spark, found.files)
            self._partials.forget_dropped_days(self._spark, found.files)
        if found.files:
            self._take()
            self._partials.tell_passed()
        if self._partials.version() == self._published:
            return
        with failing_as("cannot merge the batches; restart the command, it resumes where it stopped"):
            self._partials.fold(self._spark)
        self._following.published(self._publish(found, started))
        self._published = self._partials.version()

    def _take(self) -> None:
        """Run the stream over all files that it has not taken."""

        def sink(frame: DataFrame, batch_id: int) -> None:
            if self._following.tell is not None:
                self._following.tell(f"batch {batch_id}", 0, 1)
            self._partials.put(frame, batch_id)

        files_per_batch = self._following.files_per_batch
        with failing_as("the stream failed; restart the command, it resumes where it stopped"):
            events = io.follow_events(self._spark, self._lake / "events", files_per_batch=files_per_batch)
            query = (
                events.writeStream.foreachBatch(sink)
                .option("checkpointLocation", str(self._partials.checkpoint))
                .trigger(availableNow=True)
                .start()
            )
            if not query.awaitTermination(ROUND_TIMEOUT_S):
                query.stop()
                raise BuildFailed(
                    f"the stream took longer than {ROUND_TIMEOUT_S} s for its events; restart the command"
                )

    def _publish(self, found: Found, started: float) -> io.Manifest:
        taken = self._partials.taken()
        passed = [self._lake / name for name in taken.files]
        there = [path for path in passed if path.exists()]
        if len(there) < len(passed):  # removed since: their rows are in the files that replaced them
            there += [path for path in found.files if (self._lake / "events") not in path.parents]
        there = sorted(set(there))
        seen = Found(files=there, unreadable=found.unreadable, events=taken.events)
        return make_tables(
            self._spark,
            self._lake,
            self._partials.all(self._spark, there),
            seen,
            only=self._following.only,
            tell=self._following.tell,
            started=started,
        )
