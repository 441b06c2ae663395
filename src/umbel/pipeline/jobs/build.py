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
from typing import Protocol, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from umbel.events.tables import TABLES
from umbel.fold.marks import SOURCES_KEY
from umbel.fold.names import TABLES as BUILT
from umbel.fold.names import marks_file
from umbel.pipeline import io
from umbel.pipeline.engines import Engine
from umbel.pipeline.failing import NOT_BUILT, failing_as
from umbel.pipeline.faults import UnreadFile
from umbel.pipeline.files import Found
from umbel.pipeline.jobs.making import Made, Site, Tell, extended, made_whole, say_nothing
from umbel.pipeline.parts import UnreadPart
from umbel.pipeline.state import State, Tree, new_files
from umbel.stores.interface import Store, Where
from umbel.stores.opening import store_at
from umbel.stores.refusals import raise_unavailable

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
    lake: Where | Store,
    found: Found,
    *,
    only: Sequence[str] = (),
    tell: Tell | None = None,
    origin: str = "batch",
    afresh: bool = False,
) -> io.Manifest:
    """Make the tables and publish them. `only`: these. `afresh`: from all events, whatever was built before.
    Hold the lock."""
    started, store = time.monotonic(), store_at(lake)
    with failing_as(NOT_BUILT):
        name = io.new_build(store)
        site = Site(engine, store, name, _wanted(only), tell or say_nothing)
        made = _made(site, found.rows_of(), None if afresh else io.newest_state(store))
        store.put(f"{BUILT}/{name}/{io.STATE}", msgspec.json.encode(made.state))
    return published(store, name, found, made, started=started, origin=origin)


def anything_new(lake: Where | Store, found: Found, only: Sequence[str] = ()) -> bool:
    """Whether a build would have other tables than the one that is published."""
    store = store_at(lake)
    state = io.newest_state(store)
    if state is None or not state.fits(_wanted(only)):
        return True
    return _new(store, state, found.rows_of()) != []


def _wanted(only: Sequence[str]) -> list[str]:
    return [table for table in TABLES if table in only or not only]


def _new(store: Store, state: State, rows: dict[str, int]) -> list[str] | None:
    return new_files(state.files, rows, lambda group: _made_of(store, group))


def _made(site: Site, rows: dict[str, int], state: State | None) -> Made:
    """An increment, if there is something to extend."""
    if state is not None and state.fits(site.wanted):
        new = _new(site.store, state, rows)
        most = max(FEW_EVENTS, sum(state.files.values()))
        if new is not None and sum(rows[name] for name in new) <= most:
            try:
                return extended(site, state, rows, new)
            except UnreadPart:  # what was kept is damaged or gone
                site.clear()
            except UnreadFile as error:
                if not error.path.startswith(f"{BUILT}/"):
                    raise
                site.clear()
    return made_whole(site, rows)


def _made_of(store: Store, group: str) -> Tree:
    """What a group of files was made of; nothing where it does not say so."""
    try:
        with store.open(marks_file(group)) as file:
            told = pq.read_schema(file).metadata or {}
        return msgspec.json.decode(told.get(SOURCES_KEY, b"{}"), type=dict[str, list[str]])
    except (pa.ArrowException, OSError, ValueError) as error:
        raise_unavailable(error)
        return {}


def published(
    store: Store, name: str, found: Found, made: Made, *, started: float, origin: str
) -> io.Manifest:
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
        quarantined=[one.name.rpartition("/")[2] for one in found.unreadable],
        origin=origin,
        state=f"{name}/{io.STATE}",
    )
    with failing_as("cannot publish the tables; the previous build stays in use"):
        io.publish(store, manifest)
    with failing_as("the tables are published; other tools still see those of the build before"):
        io.point_to(store, manifest)
    io.remove_old_builds(store)
    return manifest
