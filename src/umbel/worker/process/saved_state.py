"""What a node keeps across restarts: its clock and its incarnation, in one small file.

The file is written beside its place and moved there, so that a reader finds the old or the new one,
whole, whatever happens in between: SIGKILL, a full disk, a power cut. A file that cannot be read is
set aside, once, and the node starts without it: the cluster's clock mark and the wall clock serve.

The incarnation grows from run to run although the wall clock may be set back meanwhile: peers
ignore what comes from a run that is older than the one they know.
"""

import logging
import os
from pathlib import Path

import msgspec

from umbel.protocol.clock import CLOCK_MAX
from umbel.worker.process.run_directory import state_file

log = logging.getLogger("umbel.worker.state_store")


class SavedState(msgspec.Struct, frozen=True):
    node: str
    clock: int
    incarnation: int


def saved_file(directory: Path, node: str, broker: str) -> Path:
    return state_file(directory, node, broker).with_suffix(".state")


def save(path: Path, state: SavedState) -> None:
    """Raises OSError; the former file is then still there."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}.draft")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(state))
            file.flush()
            os.fsync(descriptor)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def read_saved(path: Path) -> SavedState | None:
    try:
        found = msgspec.json.decode(path.read_bytes())
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
        _set_aside(path, error)
        return None
    return state


def next_incarnation(saved: SavedState | None, now_us: int) -> int:
    return now_us if saved is None else max(now_us, saved.incarnation + 1)


def _set_aside(path: Path, error: Exception) -> None:
    aside = path.with_suffix(".unreadable")
    fields = {"file": str(path), "moved_to": str(aside), "why": str(error)}
    try:
        path.replace(aside)
    except OSError as hindered:
        fields["moved_to"] = f"nowhere: {hindered}"
    log.warning("cannot read this node's saved clock and incarnation; starting with new ones", extra=fields)
