"""The run directory: where a worker leaves word of itself for `umbel health`.

One small JSON file a node, replaced atomically from the worker's own loop about once a second: a
fresh file proves that the loop turns. Readers need neither the app nor the broker.
"""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

from umbel.clock import boot_time_s
from umbel.errors import DuplicateNode

REFRESH_S = 1.0
GONE = "it did not shut down cleanly (umbel health --forget removes it)"
STALE_AFTER_S = 10.0
FORGOTTEN_AFTER_S = 300.0


def default_run_directory() -> Path:
    """One for each user; `UMBEL_RUN_DIR` or --run-dir says otherwise."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "umbel" if runtime else _temporary_folder() / f"umbel-{os.getuid()}"


def _temporary_folder() -> Path:
    """As `tempfile` has it, which would bring half a megabyte of modules into every worker."""
    named = [os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP")]
    places = [*map(Path, filter(None, named)), Path(os.sep, "tmp"), Path(os.sep, "var", "tmp")]
    return next((one for one in places if os.access(one, os.W_OK | os.X_OK)), Path()).absolute()


def state_file(directory: Path, node: str, broker: str) -> Path:
    """Nodes of different clusters may share a name; the broker tells them apart."""
    readable = re.sub(r"[^A-Za-z0-9@._-]", "_", node)
    return directory / f"{readable}-{crc32(broker.encode()):08x}.json"


def write_state(directory: Path, node: str, broker: str, state: dict[str, Any]) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    target = state_file(directory, node, broker)
    draft = target.with_suffix(f".{os.getpid()}.tmp")
    draft.touch(mode=0o600)
    draft.write_text(json.dumps(state | {"updated_boot_s": boot_time_s()}))
    draft.replace(target)


def remove_state(directory: Path, node: str, broker: str) -> None:
    state_file(directory, node, broker).unlink(missing_ok=True)


def refuse_second(directory: Path, node: str, broker: str) -> None:
    """Two workers of one name in one cluster would answer for each other."""
    path = state_file(directory, node, broker)
    other = _read(path) if path.exists() else None
    if other is None or not other.alive or other.fields["pid"] == os.getpid():
        return
    # A live process with an old file: its number was given to another process meanwhile.
    if 0 <= boot_time_s() - float(other.fields["updated_boot_s"]) < FORGOTTEN_AFTER_S:
        pid = other.fields["pid"]
        raise DuplicateNode(
            f"a worker named {node} is already running here (process {pid}); choose another name with -n"
        )


def forget_dead(directory: Path, belongs: "Callable[[NodeState], bool]" = lambda _: True) -> int:
    """Remove what workers left behind that are gone; how many."""
    states = ((path, _read(path)) for path in _state_files(directory))
    gone = [path for path, state in states if not state.alive and belongs(state)]
    for path in gone:
        path.unlink(missing_ok=True)
    return len(gone)


class NodeState(NamedTuple):  # not a struct: `umbel health` starts without msgspec
    node: str
    alive: bool  # its process is there
    healthy: bool  # and it reports, and has no problem
    problem: str
    fields: dict[str, Any]
    live: bool = False  # its process is there and its loop turns: starting it again would not help
    ready: bool = False  # and it takes tasks: it has a queue, a broker, and no stop request


def read_states(directory: Path) -> list[NodeState]:
    """Every worker that left word in the directory, alive or not."""
    return [_read(path) for path in _state_files(directory)]


def _state_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.json")) if directory.is_dir() else []


def _read(path: Path) -> NodeState:
    try:
        fields = json.loads(path.read_text())
        pid, updated = int(fields["pid"]), float(fields["updated_boot_s"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        return NodeState(path.stem, False, False, f"{path} cannot be read: {error}", {})
    node = str(fields.get("node", path.stem))
    silent_s = boot_time_s() - updated
    if not _is_alive(pid):
        return NodeState(node, False, False, f"process {pid} is gone; {GONE}", fields)
    if not 0 <= silent_s <= STALE_AFTER_S:
        return NodeState(node, True, False, f"process {pid} has not reported for {silent_s:.0f} s", fields)
    problem = str(fields.get("problem") or "")
    is_ready = not problem and fields.get("ready") is True
    return NodeState(node, True, not problem, problem, fields, live=True, ready=is_ready)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
