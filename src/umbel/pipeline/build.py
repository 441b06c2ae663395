"""Build: every table from all files of the lake or from new ones, once or while events are recorded."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TypeVar

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from umbel.events.tables import TABLES
from umbel.fold.names import TABLES as BUILT
from umbel.fold.names import marks_file
from umbel.fold.senders import SOURCES_KEY
from umbel.pipeline import io
from umbel.pipeline.engines import NOT_BUILT, Engine, failing_as
from umbel.pipeline.faults import UnreadFile
from umbel.pipeline.io import Found, UnreadableFile
from umbel.pipeline.parts import UnreadPart
from umbel.pipeline.plan import State, Tree, new_files
from umbel.pipeline.tables import BuildSite, BuiltTables, Tell, extended, made_whole, say_nothing
from umbel.stores.interface import Store, Where, raise_unavailable
from umbel.stores.local import store_at

# ---- build -----------------------------------------------------------------------------------------
#
# Every table from all files of the lake, or from its new files.
#
# The caller passes the lake's current files. The last published build is extended; without one, everything
# is built from the events. Jobs (`folding.py`) do the work that grows with the events. The rest is done
# here: the plan, the events without a task, the publication. Only files that the answers of jobs name are
# published.

DoneT = TypeVar("DoneT")
Look = Callable[[bool], Found]
"""Checks the files of the lake, quarantines unreadable ones, and returns what it found; True: reads all."""
FEW_EVENTS = 100_000
"""If there are more new events than old ones, and more than this, everything is built from all events."""


def sound(found: Found, look: Look, work: Callable[[Found], DoneT]) -> DoneT:
    """Run `work` on the files that were found. If one turns out to be damaged, move all damaged files to the
    quarantine and repeat it with the rest."""
    try:
        return work(found)
    except UnreadFile:
        rest = look(True)
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
    """Build the tables and publish them. `only`: these tables. `afresh`: from all events, without extending
    the last build. The caller holds the lock."""
    started, store = time.monotonic(), store_at(lake)
    with failing_as(NOT_BUILT):
        name = io.new_build(store)
        site = BuildSite(engine, store, name, _wanted(only), tell or say_nothing)
        made = _made(site, found.rows_of(), None if afresh else io.newest_state(store))
        store.put(f"{BUILT}/{name}/{io.STATE}", msgspec.json.encode(made.state))
    return published(store, name, found, made, started=started, origin=origin)


def anything_new(lake: Where | Store, found: Found, only: Sequence[str] = ()) -> bool:
    """Whether a build now would differ from the published one."""
    store = store_at(lake)
    state = io.newest_state(store)
    if state is None or not state.fits(_wanted(only)):
        return True
    return _new(store, state, found.rows_of()) != []


def _wanted(only: Sequence[str]) -> list[str]:
    return [table for table in TABLES if table in only or not only]


def _new(store: Store, state: State, rows: dict[str, int]) -> list[str] | None:
    return new_files(state.files, rows, lambda group: _made_of(store, group))


def _made(site: BuildSite, rows: dict[str, int], state: State | None) -> BuiltTables:
    """Extend the state if that is possible and worthwhile, else build from all events."""
    if state is not None and state.fits(site.wanted):
        new = _new(site.store, state, rows)
        most = max(FEW_EVENTS, sum(state.files.values()))
        if new is not None and sum(rows[name] for name in new) <= most:
            try:
                return extended(site, state, rows, new)
            except UnreadPart:  # a file of the last build is damaged or missing
                site.clear()
            except UnreadFile as error:
                if not error.path.startswith(f"{BUILT}/"):
                    raise
                site.clear()
    return made_whole(site, rows)


def _made_of(store: Store, group: str) -> Tree:
    """The sources of a group of files; empty where they are not recorded."""
    try:
        with store.open(marks_file(group)) as file:
            metadata = pq.read_schema(file).metadata or {}
        return msgspec.json.decode(metadata.get(SOURCES_KEY, b"{}"), type=dict[str, list[str]])
    except (pa.ArrowException, OSError, ValueError) as error:
        raise_unavailable(error)
        return {}


def published(
    store: Store, name: str, found: Found, made: BuiltTables, *, started: float, origin: str
) -> io.Manifest:
    """Publish the build of this name, and remove files that only older builds need."""
    manifest = io.Manifest(
        build=name,
        tables={table: sorted(part.file for part in parts) for table, parts in made.tables.items()},
        rows={table: sum(part.rows for part in parts) for table, parts in made.tables.items()},
        events=found.events,
        tasks=sum(part.rows for part in made.tables.get("tasks", ())),
        built_at=datetime.now(UTC).isoformat(),
        source_files=len(found.files),
        seconds=round(time.monotonic() - started, 3),
        quarantined=[file.name.rpartition("/")[2] for file in found.unreadable],
        origin=origin,
        state=f"{name}/{io.STATE}",
    )
    with failing_as("cannot publish the tables; the previous build stays in use"):
        io.publish(store, manifest)
    with failing_as("the tables are published; other tools still see those of the build before"):
        io.point_to(store, manifest)
    io.remove_old_builds(store)
    return manifest


# ---- follow ----------------------------------------------------------------------------------------
#
# Updates the tables while events are recorded.
#
# A stream is a series of increments: find new files, extend the published build, wait, repeat. It stores
# no state: the state of the published build says which events it has, so an increment counts when
# its manifest is published, with all its events or none. Killed at any point and restarted, it continues
# from there, and the tables are those of a build from all events.
#
# Files are checked before each round, so an unreadable one goes to the quarantine and is named, instead of
# ending the stream. A file with damaged data fails in a job; then it goes to the quarantine too, and the
# round is repeated without it.


@dataclass(frozen=True, slots=True)
class Following:
    """How to follow. `published`: called after each publication. `every_s`: pause between two rounds."""

    look: Look
    published: Callable[[io.Manifest], None]
    until_caught_up: bool = False
    every_s: float = 30.0
    only: Sequence[str] = ()
    tell: Tell | None = None


def follow(
    engine: Engine, lake: Where | Store, following: Following, *, stop: threading.Event | None = None
) -> None:
    """Run rounds until stopped, or until the tables have all files, if so chosen. The caller holds the
    lock.
    """
    stream = _Stream(engine, store_at(lake), following)
    stopping = stop or threading.Event()
    while not stopping.is_set():
        stream.run_round()
        if following.until_caught_up:
            return
        stopping.wait(following.every_s)


class _Stream:
    def __init__(self, engine: Engine, store: Store, following: Following) -> None:
        self._engine = engine
        self._store = store
        self._following = following
        self._has_published = False
        self._unreadable: list[UnreadableFile] = []  # since it began

    def run_round(self) -> None:
        """Check the files, and publish if there are new events; always in the first round."""
        found = self._following.look(False)
        found = replace(found, unreadable=[*self._unreadable, *found.unreadable])
        sound(found, self._following.look, self._publish)

    def _publish(self, found: Found) -> None:
        self._unreadable = found.unreadable
        how = self._following
        if self._has_published and not anything_new(self._store, found, how.only):
            return
        how.published(build(self._engine, self._store, found, only=how.only, tell=how.tell, origin="stream"))
        self._has_published = True
