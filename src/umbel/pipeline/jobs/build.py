"""Build: every table from all files of the lake, in one batch.

The files are given: which of them are the lake's now is known to whoever keeps the lake. What is
known of tasks is joined once (`states`), lies on disk while the tables that need it are made, and
`tasks` and `attempts` come from it without another exchange. What is counted from tasks and attempts
reads the tables just written, which are smaller than the events.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from py4j.protocol import Py4JError
from pyspark import StorageLevel
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from umbel.events.tables import TABLES
from umbel.pipeline import io
from umbel.pipeline.faults import BuildFailed
from umbel.pipeline.files import Found, rows_in
from umbel.pipeline.transforms.attempts import attempts
from umbel.pipeline.transforms.states import states_of
from umbel.pipeline.transforms.tasks import tasks

Tell = Callable[[str, int, int], None]
"""Told of progress: what is made now, how many steps are done, of how many."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What the tables are made from; a batch has it from the events, a stream from its partial states."""

    states: DataFrame
    others: DataFrame
    marks: DataFrame
    events: DataFrame


def build(
    spark: SparkSession, lake: Path, found: Found, *, only: Sequence[str] = (), tell: Tell | None = None
) -> io.Manifest:
    """Make the tables and publish them. `only`: these tables and no others. Hold the lock."""
    started = time.monotonic()
    events = io.read_events(spark, found.files)
    parts = Parts(states_of(events), events, events, events)
    return make_tables(lake, parts, found, only=only, tell=tell, started=started)


def make_tables(
    lake: Path,
    parts: Parts,
    found: Found,
    *,
    only: Sequence[str] = (),
    tell: Tell | None = None,
    started: float,
    origin: str = "batch",
) -> io.Manifest:
    name = io.new_build(lake)
    wanted = [table for table in TABLES if table in only] if only else ["tasks", "attempts"]
    try:
        _write_tables(lake, name, parts, wanted, tell or _say_nothing)
    except (PySparkException, Py4JError) as error:
        raise BuildFailed(
            f"Spark could not make the tables, nothing was published: {_gist(error)}"
        ) from error
    folders = {table: io.table_folder(lake, name, table) for table in wanted}
    files = {table: io.files_in(folder) for table, folder in folders.items()}
    rows = {table: rows_in(paths) for table, paths in files.items()}
    manifest = io.Manifest(
        build=name,
        tables={table: [str(path.relative_to(lake)) for path in paths] for table, paths in files.items()},
        rows=rows,
        events=found.events,
        tasks=rows.get("tasks", 0),
        built_at=datetime.now(UTC).isoformat(),
        source_files=len(found.files),
        seconds=round(time.monotonic() - started, 3),
        quarantined=[one.path.name for one in found.unreadable],
        origin=origin,
    )
    io.publish(lake, manifest)
    io.remove_old_builds(lake)
    return manifest


def _write_tables(lake: Path, name: str, parts: Parts, wanted: Sequence[str], tell: Tell) -> None:
    states = parts.states
    if {"tasks", "attempts"} <= set(wanted):
        states = states.persist(StorageLevel.DISK_ONLY)
    made = {"tasks": lambda: tasks(states), "attempts": lambda: attempts(states)}
    for done, table in enumerate(wanted):
        tell(table, done, len(wanted))
        io.write(made[table](), io.table_folder(lake, name, table))
    states.unpersist()
    tell("", len(wanted), len(wanted))


def _say_nothing(_what: str, _done: int, _total: int) -> None:
    pass


def _gist(error: Exception) -> str:
    """The first line that says something; Java's errors have a hundred."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:400] if lines else type(error).__name__
