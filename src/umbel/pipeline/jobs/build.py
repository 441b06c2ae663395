"""Build: every table from all files of the lake, or from what is new in it.

The files are given: the keeper of the lake knows which of them are the lake's now. A build that was
published before is extended (`state.py`); without one, all is made from the events. Jobs (`folding.py`) do
what grows with the events, some tasks each. Here is done what does not: the plan, the events without a
task, the publication. Of what jobs have written only what they told is published.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from umbel.events.tables import TABLES
from umbel.fold.marks import SOURCES_KEY
from umbel.fold.names import marks_file
from umbel.pipeline import io
from umbel.pipeline.engines import Engine
from umbel.pipeline.failing import failing_as
from umbel.pipeline.faults import UnreadFile
from umbel.pipeline.files import Found
from umbel.pipeline.jobs.making import Made, Site, Tell, extended, made_whole, say_nothing
from umbel.pipeline.parts import UnreadPart
from umbel.pipeline.state import State, Tree, new_files

DoneT = TypeVar("DoneT")
FEW_EVENTS = 100_000
"""What is new and more than what is extended is built with that from all events, unless both are few."""


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
    engine: Engine,
    lake: Path,
    found: Found,
    *,
    only: Sequence[str] = (),
    tell: Tell | None = None,
    origin: str = "batch",
    afresh: bool = False,
) -> io.Manifest:
    """Make the tables and publish them. `only`: these. `afresh`: from all events, whatever was built before.
    Hold the lock."""
    started = time.monotonic()
    name = io.new_build(lake)
    wanted, rows = _wanted(only), _rows(lake, found)
    with failing_as("cannot build the tables; nothing was published"):
        site = Site(engine, lake, name, wanted, tell or say_nothing)
        made = _made(site, rows, None if afresh else io.newest_state(lake))
        io.write_file(lake / "tables" / name / io.STATE, msgspec.json.encode(made.state))
    return published(lake, name, found, made, started=started, origin=origin)


def anything_new(lake: Path, found: Found, only: Sequence[str] = ()) -> bool:
    """Whether a build would have other tables than the one that is published."""
    state = io.newest_state(lake)
    if state is None or not state.fits(_wanted(only)):
        return True
    return _new(lake, state, _rows(lake, found)) != []


def _wanted(only: Sequence[str]) -> list[str]:
    return [table for table in TABLES if table in only or not only]


def _rows(lake: Path, found: Found) -> dict[str, int]:
    """How many events each file has, by its name from the lake's root."""
    return {
        path.relative_to(lake).as_posix(): count for path, count in zip(found.files, found.rows, strict=True)
    }


def _new(lake: Path, state: State, rows: dict[str, int]) -> list[str] | None:
    return new_files(state.files, rows, lambda group: _made_of(lake, group))


def _made(site: Site, rows: dict[str, int], state: State | None) -> Made:
    """An increment, if there is something to extend."""
    if state is not None and state.fits(site.wanted):
        new = _new(site.lake, state, rows)
        most = max(FEW_EVENTS, sum(state.files.values()))
        if new is not None and sum(rows[name] for name in new) <= most:
            try:
                return extended(site, state, rows, new)
            except UnreadPart:  # what was kept is damaged or gone
                site.clear()
            except UnreadFile as error:
                if not Path(error.path).is_relative_to(site.tables):
                    raise
                site.clear()
    return made_whole(site, rows)


def _made_of(lake: Path, group: str) -> Tree:
    """What a group of files was made of; nothing where it does not say so."""
    try:
        told = pq.read_schema(marks_file(str(lake / group))).metadata or {}
        return msgspec.json.decode(told.get(SOURCES_KEY, b"{}"), type=dict[str, list[str]])
    except (pa.ArrowException, OSError, ValueError):
        return {}


def published(lake: Path, name: str, found: Found, made: Made, *, started: float, origin: str) -> io.Manifest:
    """Make the build of this name the one that is read; what only those before it need may go."""
    manifest = io.Manifest(
        build=name,
        tables={table: sorted(one.file for one in parts) for table, parts in made.tables.items()},
        rows={table: sum(one.rows for one in parts) for table, parts in made.tables.items()},
        events=found.events,
        tasks=sum(one.rows for one in made.tables.get("tasks", ())),
        built_at=datetime.now(UTC).isoformat(),
        source_files=len(found.files),
        seconds=round(time.monotonic() - started, 3),
        quarantined=[one.path.name for one in found.unreadable],
        origin=origin,
        state=f"{name}/{io.STATE}",
    )
    with failing_as("cannot publish the tables; the previous build stays in use"):
        io.publish(lake, manifest)
    io.remove_old_builds(lake)
    return manifest
