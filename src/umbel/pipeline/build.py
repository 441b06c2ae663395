"""Build: build all tables from the files of the lake, once or continuously while events are recorded.

The caller passes the current files of the lake. A build extends the last published build if there is one,
else it reads all events. Jobs (`folding.py`) do the work that grows with the number of events. This process
makes the plan, handles events without a task, and publishes. Only files that the answers of jobs name are
published, so a job that runs twice does no harm.
"""

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
from umbel.fold import TABLES as BUILT
from umbel.fold import marks_file
from umbel.fold.senders import SOURCES_KEY
from umbel.pipeline import UnreadFile, io
from umbel.pipeline.engines import NOT_BUILT, Engine, failing_as
from umbel.pipeline.io import Found, UnreadableFile
from umbel.pipeline.parts import UnreadPart
from umbel.pipeline.plan import State, Tree, new_files
from umbel.pipeline.tables import BuildSite, BuiltTables, Tell, extended, made_whole, say_nothing
from umbel.stores.interface import Store, Where, raise_unavailable
from umbel.stores.local import store_at

# ---- build -----------------------------------------------------------------------------------------

DoneT = TypeVar("DoneT")
Look = Callable[[bool], Found]
"""Checks the files of the lake, quarantines unreadable ones, and returns what it found; True: reads all."""
FEW_EVENTS = 100_000
"""A build reads all events if there are more new events than old ones, and more than this number."""


def sound(found: Found, look: Look, work: Callable[[Found], DoneT]) -> DoneT:
    """Run `work` on the files. If a file turns out to be damaged, quarantine all damaged files, and repeat
    `work` with the others.
    """
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
    """Build the tables and publish them. The caller must hold the lock.

    `only` limits the build to these tables. `afresh` reads all events instead of extending the last build.
    """
    started, store = time.monotonic(), store_at(lake)
    with failing_as(NOT_BUILT):
        name = io.new_build(store)
        site = BuildSite(engine, store, name, _wanted(only), tell or say_nothing)
        made = _made(site, found.rows_of(), None if afresh else io.newest_state(store))
        store.put(f"{BUILT}/{name}/{io.STATE}", msgspec.json.encode(made.state))
    return published(store, name, found, made, started=started, origin=origin)


def anything_new(lake: Where | Store, found: Found, only: Sequence[str] = ()) -> bool:
    """Return whether a new build would differ from the published one."""
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
    """Extend the state if that is possible and faster, else build from all events."""
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
    """Return the sources of a group of files; empty if they are not recorded."""
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
    """Publish the build with this name, and remove files that only older builds need."""
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
    with failing_as("the tables are published; other tools still use those of the previous build"):
        io.point_to(store, manifest)
    io.remove_old_builds(store)
    return manifest


# ---- follow ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Following:
    """Options for following. `published` is called after each publication; `every_s` is the pause between
    rounds.
    """

    look: Look
    published: Callable[[io.Manifest], None]
    until_caught_up: bool = False
    every_s: float = 30.0
    only: Sequence[str] = ()
    tell: Tell | None = None


def follow(
    engine: Engine, lake: Where | Store, following: Following, *, stop: threading.Event | None = None
) -> None:
    """Build repeatedly until stopped, or, with `until_caught_up`, once. The caller must hold the lock.

    Following is a loop: find new files, extend the published build, wait, repeat. The loop stores no state.
    The state of the published build records which events it contains, so an increment is published with all
    its events or not at all. If the process is killed and restarted, it continues from the published build,
    and the tables are the same as those of a build from all events. Files are checked before each round, so
    an unreadable file goes to the quarantine and does not end the loop. A file with damaged data makes a job
    fail; then it goes to the quarantine too, and the round is repeated without it.
    """
    stream = _Stream(engine, store_at(lake), following)
    stopping = stop or threading.Event()
    while not stopping.is_set():
        stream.run_round()
        if following.until_caught_up:
            return
        stopping.wait(following.every_s)


class _Stream:
    """Builds in rounds; keeps the files that were found unreadable for the manifests."""

    def __init__(self, engine: Engine, store: Store, following: Following) -> None:
        self._engine = engine
        self._store = store
        self._following = following
        self._has_published = False
        self._unreadable: list[UnreadableFile] = []  # files found unreadable since the start

    def run_round(self) -> None:
        """Check the files, and publish if there are new events. The first round always publishes."""
        found = self._following.look(False)
        found = replace(found, unreadable=[*self._unreadable, *found.unreadable])
        sound(found, self._following.look, self._publish)

    def _publish(self, found: Found) -> None:
        """Build and publish, unless there are no new events since the last round."""
        self._unreadable = found.unreadable
        how = self._following
        if self._has_published and not anything_new(self._store, found, how.only):
            return
        how.published(build(self._engine, self._store, found, only=how.only, tell=how.tell, origin="stream"))
        self._has_published = True
