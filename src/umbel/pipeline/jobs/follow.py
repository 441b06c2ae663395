"""Follow: the tables kept up to date while events are recorded, by Structured Streaming.

The stream takes the lake's raw files in batches and writes each batch as partial states
(`partials.py`); a publication joins them all. It runs in rounds: take all there is, publish if that
was anything, wait, look again. Killed at any point and started again it goes on where it was, and the
tables are those of a batch build over the same files.

The files are looked into before each round, so one that cannot be read is set aside and named instead
of ending the stream.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from umbel.pipeline import io
from umbel.pipeline.faults import BuildFailed
from umbel.pipeline.files import Found, Unreadable
from umbel.pipeline.jobs.build import Tell, failing_as, make_tables
from umbel.pipeline.jobs.partials import Partials

FILES_PER_BATCH = 32
ROUND_TIMEOUT_S = 24 * 3600


@dataclass(frozen=True, slots=True)
class Following:
    """How to follow. `look`: look into the lake's files, set aside what cannot be read, say what is there.

    `published`: called after each publication. `every_s`: how long a round waits for new files.
    """

    look: Callable[[], Found]
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
    partials = Partials(lake)
    with failing_as("cannot start the stream; restart the command, it resumes where it stopped"):
        partials.open()
        partials.tidy()
    stopping = stop or threading.Event()
    is_first = True
    unreadable: list[Unreadable] = []
    while not stopping.is_set():
        started = time.monotonic()
        before = partials.taken().upto
        found = following.look()
        unreadable += found.unreadable
        if found.files:
            _take(spark, lake, partials, following)
            partials.tell_passed()
        if partials.taken().upto > before or is_first:
            with failing_as("cannot merge the batches; restart the command, it resumes where it stopped"):
                partials.fold(spark)
            following.published(_publish(spark, lake, partials, following, found, unreadable, started))
        is_first = False
        if following.until_caught_up:
            return
        stopping.wait(following.every_s)


def _take(spark: SparkSession, lake: Path, partials: Partials, following: Following) -> None:
    """Run the stream over all files that it has not taken."""

    def sink(frame: DataFrame, batch_id: int) -> None:
        if following.tell is not None:
            following.tell(f"batch {batch_id}", 0, 1)
        partials.put(frame, batch_id)

    events = io.follow_events(spark, lake / "events", files_per_batch=following.files_per_batch)
    with failing_as("the stream failed; restart the command, it resumes where it stopped"):
        query = (
            events.writeStream.foreachBatch(sink)
            .option("checkpointLocation", str(partials.checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        if not query.awaitTermination(ROUND_TIMEOUT_S):
            query.stop()
            raise BuildFailed(
                f"the stream took longer than {ROUND_TIMEOUT_S} s for its events; restart the command"
            )


def _publish(
    spark: SparkSession,
    lake: Path,
    partials: Partials,
    following: Following,
    found: Found,
    unreadable: Sequence[Unreadable],
    started: float,
) -> io.Manifest:
    taken = partials.taken()
    passed = [lake / name for name in taken.files]
    there = [path for path in passed if path.exists()]
    if len(there) < len(passed):  # removed since: their rows are in the files that replaced them
        there += [path for path in found.files if (lake / "events") not in path.parents]
    seen = Found(files=there, unreadable=list(unreadable), events=taken.events)
    parts = partials.all(spark, there)
    return make_tables(
        spark, lake, parts, seen, only=following.only, tell=following.tell, started=started, origin="stream"
    )
