"""Follow: the tables kept up to date while events are recorded.

A stream is increments one after the other: look for files that are new, extend the build that is
published, wait, look again. It keeps nothing of its own. What was taken is known from the state of the
published build, so an increment counts at the moment its manifest has its name, with all its events or
none: killed at any point and started again it goes on from there, and the tables are those of a build from
all events.

The files are looked into before each round, so one that cannot be read is set aside and named instead of
ending the stream. One whose data is damaged is met by a job; it is found and set aside then, and the round
goes on without it.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from umbel.pipeline import io
from umbel.pipeline.engines import Engine
from umbel.pipeline.files import Found, Unreadable
from umbel.pipeline.jobs.build import Look, anything_new, build, sound
from umbel.pipeline.jobs.making import Tell
from umbel.stores.interface import Store, Where
from umbel.stores.opening import store_at


@dataclass(frozen=True, slots=True)
class Following:
    """How to follow. `published`: called after each publication. `every_s`: how long a round waits for
    new files."""

    look: Look
    published: Callable[[io.Manifest], None]
    until_caught_up: bool = False
    every_s: float = 30.0
    only: Sequence[str] = ()
    tell: Tell | None = None


def follow(
    engine: Engine, lake: Where | Store, following: Following, *, stop: threading.Event | None = None
) -> None:
    """Until stopped, or until all files that are there are in published tables. Hold the lock."""
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
        self._unreadable: list[Unreadable] = []  # since it began

    def run_round(self) -> None:
        """Take all there is; publish if that was anything, and the first time."""
        found = self._following.look()
        found = replace(found, unreadable=[*self._unreadable, *found.unreadable])
        sound(found, self._following.look, self._publish)

    def _publish(self, found: Found) -> None:
        self._unreadable = found.unreadable
        how = self._following
        if self._has_published and not anything_new(self._store, found, how.only):
            return
        how.published(build(self._engine, self._store, found, only=how.only, tell=how.tell, origin="stream"))
        self._has_published = True
