"""Servers that all processes of a run of the tests share: each starts at its first use and ends with the run.

A run has a folder with a file that the controlling process keeps locked. A guard, a small process next to it,
waits for that lock. It gets the lock when the run ends, also when the run is killed. Then the guard runs the
script `ends`, to which each server appends how it is ended, and removes the folder.
"""

import atexit
import fcntl
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

END_S = 60.0

_GUARD = 'flock "$0/alive" true; sh "$0/ends"; rm -rf "$0"'
# Only a process that works in the folder of the run is ended: its number may be of another one by now.
_ENDS = """\
is_ours() { case $(readlink "/proc/$1/cwd") in "%s"/*) true ;; *) false ;; esac }
end() {
    tries=0
    is_ours "$2" && kill -s "$1" -- "-$2"
    while is_ours "$2" && [ $tries -lt 100 ]; do sleep 0.1; tries=$((tries + 1)); done
    is_ours "$2" && kill -s KILL -- "-$2"
}
"""


@dataclass
class _Run:
    """`lock` and `guard` are those of the process that began the run."""

    folder: Path
    lock: int | None = None
    guard: subprocess.Popen[bytes] | None = None


_runs: list[_Run] = []  # one at most
_processes: list[subprocess.Popen[bytes]] = []  # Python warns of one that runs and that nobody refers to


def begin_run() -> Path:
    """The folder of a new run, of which this process is the controlling one."""
    folder = Path(tempfile.mkdtemp(prefix="umbel-tests-"))
    folder.chmod(0o711)  # PostgreSQL runs as another user, in a folder of its own
    (folder / "ends").write_text(_ENDS % folder)
    lock = os.open(folder / "alive", os.O_CREAT | os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    # Not in the group of the terminal: Ctrl-C must not end it.
    guard = subprocess.Popen(
        ["sh", "-c", _GUARD, str(folder)], stdin=subprocess.DEVNULL, start_new_session=True
    )
    _runs.append(_Run(folder, lock, guard))
    return folder


def join_run(folder: Path) -> None:
    """Use the servers of a run that another process began."""
    _runs.append(_Run(folder))


def end_run() -> None:
    """End all servers and remove the folder, if this process began the run."""
    while _runs:
        run = _runs.pop()
        if run.lock is not None and run.guard is not None:
            fcntl.flock(run.lock, fcntl.LOCK_UN)  # not only closed: a forked child may have the file open too
            os.close(run.lock)
            run.guard.wait(END_S)


def once(name: str, start: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """What `start` returned: one process of the run calls it, with a new folder for the server."""
    run = _run()
    described = run / f"{name}.json"
    with _locked(run / f"{name}.lock"):
        if not described.exists():
            described.write_text(json.dumps(start(Path(tempfile.mkdtemp(prefix=name, dir=run)))))
        found: dict[str, Any] = json.loads(described.read_text())
        return found


def ends_with_run(process: subprocess.Popen[bytes], sign: str, *lines: str) -> None:
    """Send this signal to the group of the process at the end, then run these lines of shell.

    The process leads its group, and works in the folder that `once` gave it.
    """
    _processes.append(process)
    with (_run() / "ends").open("a") as script:
        script.write("".join(f"{line}\n" for line in (f"end {sign} {process.pid}", *lines)))


def _run() -> Path:
    if not _runs:  # programs that use the servers without pytest
        begin_run()
        atexit.register(end_run)
    return _runs[-1].folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
