"""The run directory: where workers write their status for `umbel health`.

One small JSON file for each node, replaced atomically from the worker's loop about once a second: a fresh
file proves that the loop runs. Readers need neither the app nor the broker.

The directory belongs to one user: a process that can write there can declare a dead worker healthy. In the
shared temporary folder another user may have created it first; then it is refused.
"""

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

from umbel.clock import boot_time_s
from umbel.errors import ConfigurationError, DuplicateNode
from umbel.files import PrivateFolder, UntrustedFile, private_folder

REFRESH_S = 1.0
GONE = "it did not shut down cleanly (umbel health --forget removes it)"
STALE_AFTER_S = 10.0
FORGOTTEN_AFTER_S = 300.0
SUFFIX = ".json"


def default_run_directory() -> Path:
    """Return the user's run directory; `UMBEL_RUN_DIR` and --run-dir replace it."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "umbel" if runtime else _temporary_folder() / f"umbel-{os.getuid()}"


def _temporary_folder() -> Path:
    """Return what `tempfile.gettempdir` returns; importing `tempfile` costs every worker half a megabyte."""
    named = [os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP")]
    places = [*map(Path, filter(None, named)), Path(os.sep, "tmp"), Path(os.sep, "var", "tmp")]
    return next((place for place in places if os.access(place, os.W_OK | os.X_OK)), Path()).absolute()


def state_file(directory: Path, node: str, broker: str) -> Path:
    """Return the path of a node's status file; the broker's checksum distinguishes clusters."""
    readable = re.sub(r"[^A-Za-z0-9@._-]", "_", node)
    return directory / f"{readable}-{crc32(broker.encode()):08x}{SUFFIX}"


@contextmanager
def open_run_directory(
    directory: Path, *, make: bool = False, of_any_user: bool = False
) -> Iterator[PrivateFolder]:
    """Open the run directory; ConfigurationError if another user could write to it."""
    try:
        with private_folder(directory, make=make, of_any_user=of_any_user) as folder:
            yield folder
    except UntrustedFile as error:
        raise ConfigurationError(
            f"the run directory cannot be used: {error}; "
            "remove it, or name another folder with --run-dir or UMBEL_RUN_DIR"
        ) from None


def write_state(directory: Path, node: str, broker: str, state: dict[str, Any]) -> None:
    """Write a node's status file; raises OSError, and ConfigurationError for a directory of another user."""
    content = json.dumps(state | {"updated_boot_s": boot_time_s()}).encode()
    with open_run_directory(directory, make=True) as folder:
        folder.replace(state_file(directory, node, broker).name, content)


def remove_state(directory: Path, node: str, broker: str) -> None:
    """Remove a node's status file, if there is one."""
    with suppress(FileNotFoundError), open_run_directory(directory) as folder:
        folder.remove(state_file(directory, node, broker).name)


def refuse_second(directory: Path, node: str, broker: str) -> None:
    """Raise DuplicateNode if a worker of this name and broker runs on this machine."""
    name = state_file(directory, node, broker).name
    with suppress(FileNotFoundError), open_run_directory(directory) as folder:
        _refuse_living(node, _read(folder, name))


def _refuse_living(node: str, other: "NodeState") -> None:
    if not other.alive or other.fields["pid"] == os.getpid():
        return
    # A live process with an old file: its process id was given to another process meanwhile.
    if 0 <= boot_time_s() - float(other.fields["updated_boot_s"]) < FORGOTTEN_AFTER_S:
        pid = other.fields["pid"]
        raise DuplicateNode(
            f"a worker named {node} is already running here (process {pid}); choose another name with -n"
        )


def forget_dead(
    directory: Path, belongs: "Callable[[NodeState], bool]" = lambda _: True, *, of_any_user: bool = False
) -> int:
    """Remove the status files of workers that are gone; return how many."""
    with _open_to_read(directory, of_any_user) as folder:
        if folder is None:
            return 0
        states = ((name, _read(folder, name)) for name in folder.names(SUFFIX))
        gone = [name for name, state in states if not state.alive and belongs(state)]
        for name in gone:
            folder.remove(name)
        return len(gone)


class NodeState(NamedTuple):  # not a struct: `umbel health` starts without msgspec
    """The content of a worker's status file, and whether its process lives."""

    node: str
    alive: bool  # its process exists
    healthy: bool  # it reports and has no problem
    problem: str
    fields: dict[str, Any]
    live: bool = False  # its process exists and its loop runs: a restart would not help
    ready: bool = False  # it takes tasks: it has a queue, a broker, and no stop request


def read_states(directory: Path, *, of_any_user: bool = False) -> list[NodeState]:
    """Return every worker with a status file in the directory, alive or not; raises ConfigurationError.

    `of_any_user`: for root, who named the directory of another user.
    """
    with _open_to_read(directory, of_any_user) as folder:
        return [] if folder is None else [_read(folder, name) for name in folder.names(SUFFIX)]


@contextmanager
def _open_to_read(directory: Path, of_any_user: bool) -> Iterator[PrivateFolder | None]:
    """Open the directory for reading; None if there is no such directory."""
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(open_run_directory(directory, of_any_user=of_any_user))
        except FileNotFoundError:
            folder = None
        except OSError as error:
            raise ConfigurationError(
                f"the run directory {directory} cannot be read: {error.strerror}; "
                "name the one of this user's workers with --run-dir or UMBEL_RUN_DIR"
            ) from None
        yield folder


def _read(folder: PrivateFolder, name: str) -> NodeState:
    """Read a status file; one that is unreadable or stale counts as unhealthy, and `problem` says why."""
    stem = name.removesuffix(SUFFIX)
    try:
        fields = json.loads(folder.read(name))
        pid, updated = int(fields["pid"]), float(fields["updated_boot_s"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        return NodeState(stem, False, False, f"{folder.path / name} cannot be read: {error}", {})
    node = str(fields.get("node", stem))
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
