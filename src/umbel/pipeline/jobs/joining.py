"""Joining: every table from the partial states of a stream, by Spark's own means.

What is known of tasks is joined once (`states`), lies on disk while the tables that need it are made, and
`tasks` and `attempts` come from it without another exchange. What is counted from other tables reads
them as they were just written, which is less than the events.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from umbel.events.tables import TABLES
from umbel.pipeline import io
from umbel.pipeline.failing import failing_as
from umbel.pipeline.files import Found, rows_in
from umbel.pipeline.jobs.build import Tell, published, say_nothing
from umbel.pipeline.transforms.anomalies import anomalies
from umbel.pipeline.transforms.attempts import attempts
from umbel.pipeline.transforms.elections import elections
from umbel.pipeline.transforms.marks import marks_of
from umbel.pipeline.transforms.metrics import metrics
from umbel.pipeline.transforms.states import states_of
from umbel.pipeline.transforms.tasks import tasks
from umbel.pipeline.transforms.timeline import timeline
from umbel.pipeline.transforms.workers import workers

NEEDS = {"metrics": ("attempts",), "anomalies": ("tasks", "attempts", "workers", "elections")}
"""Tables that are made from other tables."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What the tables are made from; a batch has it from the events, a stream from its partial states."""

    states: DataFrame
    others: DataFrame
    marks: DataFrame
    events: DataFrame


def parts_of(events: DataFrame) -> Parts:
    return Parts(states_of(events), others_of(events), marks_of(events), events)


def others_of(events: DataFrame) -> DataFrame:
    """The events that are about no task: few, and kept as they are."""
    return events.where(F.col("slot").isNull())


def make_tables(
    spark: SparkSession,
    lake: Path,
    parts: Parts,
    found: Found,
    *,
    started: float,
    only: Sequence[str] = (),
    tell: Tell | None = None,
) -> io.Manifest:
    name, wanted = io.new_build(lake), wanted_tables(only)
    with failing_as("cannot build the tables; nothing was published"):
        _write_tables(spark, lake, name, parts, wanted, tell or say_nothing)
    files = {table: io.files_in(io.table_folder(lake, name, table)) for table in wanted}
    rows = {table: rows_in(paths) for table, paths in files.items()}
    return published(lake, name, found, files, rows, started=started, origin="stream")


def wanted_tables(only: Iterable[str]) -> list[str]:
    """In the order of building, with what they need."""
    asked = set(only) or set(TABLES)
    asked |= {needed for table in asked for needed in NEEDS.get(table, ())}
    return [table for table in TABLES if table in asked]


def _write_tables(
    spark: SparkSession, lake: Path, name: str, parts: Parts, wanted: Sequence[str], tell: Tell
) -> None:
    def read(table: str) -> DataFrame:
        return io.read_table(spark, lake, name, table)

    with _kept(parts, wanted) as kept:
        makers: dict[str, Callable[[], DataFrame]] = {
            "tasks": lambda: tasks(kept.states),
            "attempts": lambda: attempts(kept.states),
            "timeline": lambda: timeline(kept.events),
            "workers": lambda: workers(kept.others, kept.marks),
            "elections": lambda: elections(kept.others),
            "metrics": lambda: metrics(read("attempts")),
            "anomalies": lambda: anomalies(
                read("tasks"), read("attempts"), read("workers"), read("elections"), kept.others, kept.marks
            ),
        }
        for done, table in enumerate(wanted):
            tell(table, done, len(wanted))
            io.write(makers[table](), io.table_folder(lake, name, table))
    tell("", len(wanted), len(wanted))


@contextmanager
def _kept(parts: Parts, wanted: Sequence[str]) -> Iterator[Parts]:
    """What several tables are made from is worked out once and lies on disk meanwhile."""

    def keep(frame: DataFrame, *users: str) -> DataFrame:
        is_shared = len(set(users) & set(wanted)) > 1
        return frame.persist(StorageLevel.DISK_ONLY) if is_shared else frame

    kept = Parts(
        states=keep(parts.states, "tasks", "attempts"),
        others=keep(parts.others, "workers", "elections", "anomalies"),
        marks=keep(parts.marks, "workers", "anomalies"),
        events=parts.events,
    )
    try:
        yield kept
    finally:
        for frame in (kept.states, kept.others, kept.marks):
            frame.unpersist()
