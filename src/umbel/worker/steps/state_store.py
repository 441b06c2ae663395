"""StateStore: saves the node's clock and incarnation, so that a restart continues from there.

A reader finds the old or the new file, whole, after SIGKILL, a full disk or a power cut. An unreadable file
is set aside, once, and the node starts without it: the broker's clock and the wall clock serve. A run
directory to which another user could have written is refused.
"""

import asyncio
import logging
from pathlib import Path

import msgspec

from umbel.errors import ConfigurationError
from umbel.files import PrivateFolder
from umbel.protocol.clock import CLOCK_MAX
from umbel.worker.bootsteps import Step
from umbel.worker.context import WorkerContext
from umbel.worker.events import Events
from umbel.worker.run_directory import open_run_directory, state_file

log = logging.getLogger("umbel.worker.state_store")

# ---- saved state -----------------------------------------------------------------------------------


class SavedState(msgspec.Struct, frozen=True):
    """The clock and incarnation of a node's last run.

    The incarnation grows from run to run, also if the wall clock is set back: peers ignore events of a run
    that is older than the one they know.
    """

    node: str
    clock: int
    incarnation: int


def saved_state_file(directory: Path, node: str, broker: str) -> Path:
    """Return the path of a node's saved state in the run directory."""
    return state_file(directory, node, broker).with_suffix(".state")


def write_saved_state(path: Path, state: SavedState) -> None:
    """Replace the file; raises OSError, and ConfigurationError for a directory of another user.

    The former file stays after an error.
    """
    with open_run_directory(path.parent, make=True) as folder:
        folder.replace(path.name, msgspec.json.encode(state), durable=True)


def read_saved_state(path: Path) -> SavedState | None:
    """Return the saved state, or None if it is missing or unreadable.

    Raises ConfigurationError for a directory of another user.
    """
    try:
        with open_run_directory(path.parent) as folder:
            return _read(folder, path.name)
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning(
            "cannot read this node's saved clock and incarnation; starting with new ones",
            extra={"file": str(path), "why": str(error)},
        )
        return None


def _read(folder: PrivateFolder, name: str) -> SavedState | None:
    try:
        found = msgspec.json.decode(folder.read(name))
        state = SavedState(str(found["node"]), found["clock"], found["incarnation"])
        if not all(
            type(value) is int and 0 <= value <= CLOCK_MAX for value in (state.clock, state.incarnation)
        ):
            raise ValueError(
                f"saved clock {state.clock!r} and incarnation {state.incarnation!r} "
                "must be whole numbers from 0"
            )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        _set_aside(folder, name, error)
        return None
    return state


def next_incarnation(saved: SavedState | None, now_us: int) -> int:
    """Return the incarnation of a new run: the present time, but above the last run's."""
    return now_us if saved is None else max(now_us, saved.incarnation + 1)


def _set_aside(folder: PrivateFolder, name: str, error: Exception) -> None:
    aside = Path(name).with_suffix(".unreadable").name
    fields = {"file": str(folder.path / name), "moved_to": str(folder.path / aside), "why": str(error)}
    try:
        folder.rename(name, aside)
    except OSError as hindered:
        fields["moved_to"] = f"nowhere: {hindered}"
    log.warning("cannot read this node's saved clock and incarnation; starting with new ones", extra=fields)


# ---- state store -----------------------------------------------------------------------------------

SAVE_EVERY_S = 5.0


class StateStore(Step):
    """The step that saves the state at the start, every few seconds and at the end.

    A save that fails is logged once, and the worker continues with the previous file. Only one save runs
    at a time: a thread that saves cannot be cancelled, so the last save waits for it.
    """

    name = "state_store"
    requires = ("events",)

    def __init__(self, context: WorkerContext, events: Events, saved: SavedState | None) -> None:
        super().__init__(context)
        self._events = events
        self._saved = saved
        self._failing = False
        self._saving: asyncio.Future[None] | None = None
        identity = context.identity
        self._path: Path = saved_state_file(context.settings.run_directory, identity.node, context.broker.url)

    async def start(self) -> None:
        """Move the clock above the saved one, and save it now and periodically."""
        if self._saved is not None:
            self._events.clock.begin_above(self._saved.clock)
        await self._save()
        self.run_in_background(self._save_on())

    async def stop(self) -> None:
        """Save for the last time."""
        await self.end_background()
        if self._saving is not None:
            await asyncio.gather(self._saving, return_exceptions=True)
        await self._save()

    async def _save_on(self) -> None:
        while True:
            await asyncio.sleep(SAVE_EVERY_S)
            await self._save()

    async def _save(self) -> None:
        """Save the clock and the incarnation in a thread; a failure is logged once until a save works."""
        identity = self._context.identity
        state = SavedState(identity.node, self._events.clock_reserved, identity.incarnation)
        try:
            self._saving = asyncio.ensure_future(asyncio.to_thread(write_saved_state, self._path, state))
            await asyncio.shield(self._saving)
        except (OSError, ConfigurationError) as error:
            if not self._failing:
                fields = {"file": str(self._path), "why": str(error)}
                log.error("cannot save the node state; the worker continues, retrying", extra=fields)
            self._failing = True
        else:
            if self._failing:
                log.info("node state saved again", extra={"file": str(self._path)})
            self._failing = False
