"""Build: every table from all files of the lake, in one batch.

The files are given: the keeper of the lake knows which of them are the lake's now. Jobs (`folding.py`) do
what grows with the lake, one bucket of tasks each; loose files are dealt out into buckets first. Here is
done what does not: the plan, the events without a task, the publication. Of what jobs have written only
what they told is published.
"""

import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from umbel.events.tables import TABLES
from umbel.fold.anomalies import TOLD, first_told
from umbel.fold.kernel import fold_others
from umbel.fold.marks import EVENTS_KEY, Marks, merged
from umbel.fold.names import marks_file, place_of
from umbel.fold.schemas import EVENTS, SCHEMAS
from umbel.pipeline import io
from umbel.pipeline.engines import Engine
from umbel.pipeline.failing import failing_as
from umbel.pipeline.faults import UnreadFile
from umbel.pipeline.files import Found
from umbel.pipeline.parts import event_batches, write_part
from umbel.pipeline.plan import Counted, Folded, Plan, joins_of, planned

Tell = Callable[[str, int, int], None]
"""Called with progress: the current step, steps done, steps in total."""

DoneT = TypeVar("DoneT")
STEPS = 4
OF_NODES = frozenset({"timeline", "workers", "elections", "anomalies"})


class Look(Protocol):
    """Looks into the lake's files, sets aside what cannot be read, and says what is there.

    `thorough`: reads all of each file, not its description alone.
    """

    def __call__(self, *, thorough: bool = False) -> Found: ...


def sound(found: Found, look: Look, work: Callable[[Found], DoneT]) -> DoneT:
    """Do the work on the files that were found; if one turns out to be damaged, set aside all that are
    damaged and do it again with the rest."""
    try:
        return work(found)
    except UnreadFile:
        rest = look(thorough=True)
        if not rest.unreadable:
            raise
        return work(replace(rest, unreadable=[*found.unreadable, *rest.unreadable]))


def build(
    engine: Engine, lake: Path, found: Found, *, only: Sequence[str] = (), tell: Tell | None = None
) -> io.Manifest:
    """Make the tables and publish them. `only`: these. Hold the lock."""
    started = time.monotonic()
    name = io.new_build(lake)
    wanted = [table for table in TABLES if table in only or not only]
    with failing_as("cannot build the tables; nothing was published"):
        made = _Making(engine, lake / "tables" / name, wanted, tell or say_nothing).run(found)
    rows = {table: sum(one.rows for one in parts) for table, parts in made.items()}
    files = {table: sorted((Path(one.file) for one in parts), key=str) for table, parts in made.items()}
    return published(lake, name, found, files, rows, started=started)


def published(
    lake: Path,
    name: str,
    found: Found,
    files: Mapping[str, Sequence[Path]],
    rows: dict[str, int],
    *,
    started: float,
    origin: str = "batch",
) -> io.Manifest:
    """Make the build of this name the one that is read; those before it may go."""
    tables = lake / "tables"
    manifest = io.Manifest(
        build=name,
        tables={table: [str(path.relative_to(tables)) for path in paths] for table, paths in files.items()},
        rows=rows,
        events=found.events,
        tasks=rows.get("tasks", 0),
        built_at=datetime.now(UTC).isoformat(),
        source_files=len(found.files),
        seconds=round(time.monotonic() - started, 3),
        quarantined=[one.path.name for one in found.unreadable],
        origin=origin,
    )
    with failing_as("cannot publish the tables; the previous build stays in use"):
        io.publish(lake, manifest)
    io.remove_old_builds(lake)
    return manifest


class _Making:
    """One build, before it is published."""

    def __init__(self, engine: Engine, folder: Path, wanted: Sequence[str], tell: Tell) -> None:
        self._engine = engine
        self._folder = folder
        self._scratch = folder / "scratch"
        self._wanted = wanted
        self._tell = tell
        self._parts: dict[str, list[Counted]] = {table: [] for table in wanted}

    def run(self, found: Found) -> dict[str, list[Counted]]:
        for folder in (self._scratch, *(self._folder / table for table in self._wanted)):
            folder.mkdir(parents=True)
        rows = {str(path): count for path, count in zip(found.files, found.rows, strict=True)}
        marks, whole = _marks_in(rows)
        plan = planned(str(self._folder), self._wanted, rows, whole)
        if plan.loose:
            self._tell("dealing out", 0, STEPS)
            told = self._engine.run("deal", self._written(plan, "deal"), len(plan.loose))
            plan = msgspec.structs.replace(plan, dealt=[one.dealt for one in told if one.dealt])
        self._tell("folding", 1, STEPS)
        told = self._engine.run("fold", self._written(plan, "fold"), plan.count)
        folded = [one.folded for one in told if one.folded is not None]
        self._take(folded)
        self._tell("nodes", 2, STEPS)
        marks = {group: one for group, one in marks.items() if group in {known.name for known in plan.groups}}
        horizon_us = self._fold_nodes(plan, [*marks.values()], folded)
        joins = joins_of(folded, self._wanted)
        if joins:
            self._tell("joining", 3, STEPS)
            plan = msgspec.structs.replace(plan, dealt=[], joins=joins, horizon_us=horizon_us)
            told = self._engine.run("join", self._written(plan, "join"), len(joins))
            self._take([one.folded for one in told if one.folded is not None])
        self._finish()
        self._tell("", STEPS, STEPS)
        return self._parts

    def _written(self, plan: Plan, step: str) -> Path:
        path = self._scratch / f"{step}.json"
        path.write_bytes(msgspec.json.encode(plan))
        return path

    def _take(self, folded: Iterable[Folded]) -> None:
        for one in folded:
            for table, parts in one.tables.items():
                self._parts[table] += parts

    def _fold_nodes(self, plan: Plan, marks: list[Marks], folded: Sequence[Folded]) -> int | None:
        """The events without a task, which are few; when the lake ends."""
        if not OF_NODES & set(self._wanted):
            return None
        every = merged([*marks, *(Marks.of_table(_read(one.marks)) for one in plan.dealt)])
        others = [table for name in plan.others() for table in event_batches(name)]
        others += [_read(one.others) for one in plan.dealt]
        nodes = fold_others(pa.concat_tables([EVENTS.empty_table(), *others]), every)
        self._put("timeline", nodes.timeline)
        self._put("workers", nodes.workers)
        self._put("elections", nodes.elections)
        self._put("anomalies", nodes.anomalies)
        since = first_told(
            pa.concat_tables([TOLD.empty_table(), *(_read(f) for o in folded for f in o.told)])
        )
        pq.write_table(since, self._scratch / "since.parquet")
        pq.write_table(nodes.workers, self._scratch / "workers.parquet")
        return every.horizon_us()

    def _put(self, table: str, rows: pa.Table) -> None:
        if table in self._wanted and rows.num_rows:
            self._parts[table].append(write_part(rows, self._folder / table))

    def _finish(self) -> None:
        """A table without rows has a file too, with its columns; what was not told is removed."""
        for table, parts in self._parts.items():
            if not parts:
                parts.append(write_part(SCHEMAS[table].empty_table(), self._folder / table))
            told = {one.file for one in parts}
            for path in (self._folder / table).iterdir():
                if str(path) not in told:
                    path.unlink(missing_ok=True)
        shutil.rmtree(self._scratch, ignore_errors=True)


def _marks_in(names: Iterable[str]) -> tuple[dict[str, Marks], dict[str, int]]:
    """The marks of the groups that have some, and how many events they are of."""
    found: dict[str, Marks] = {}
    whole: dict[str, int] = {}
    for group in sorted({place.group for place in map(place_of, names) if place is not None}):
        try:
            table = pq.read_table(marks_file(group), partitioning=None)
            whole[group] = int((table.schema.metadata or {})[EVENTS_KEY])
            found[group] = Marks.of_table(table)
        except (pa.ArrowException, OSError, ValueError, KeyError):
            continue  # they are made again from its events
    return found, whole


def _read(path: str) -> pa.Table:
    return pq.read_table(path, partitioning=None)


def say_nothing(_what: str, _done: int, _total: int) -> None:
    pass
