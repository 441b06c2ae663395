"""Servers that all processes of a run of the tests share: each starts at its first use and ends with the run.

A run has a folder with a file that the controlling process keeps locked. A guard, a small process next to it,
waits for that lock. It gets the lock when the run ends, also when the run is killed. Then the guard runs the
script `ends`, to which each server appends how it is ended, and removes the folder.
"""

import atexit
import fcntl
import json
import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

END_S = 60.0

# Without flock there is no guard, and nothing is removed.
_GUARD = 'flock "$0/alive" true || exit; sh "$0/ends"; rm -rf "$0"'
# A process is ended only if it works in or below the folder of its server, since numbers are used again.
_ENDS = """\
works_there() { case $(readlink "/proc/$1/cwd") in "$2" | "$2"/*) true ;; *) false ;; esac }
end() {  # SIGNAL PID FOLDER COMMAND
    works_there "$2" "$3" || return
    kill -s "$1" -- "-$2"
    tries=0
    while works_there "$2" "$3" && [ $tries -lt 100 ]; do sleep 0.1; tries=$((tries + 1)); done
    works_there "$2" "$3" && kill -s KILL -- "-$2"
    eval "$4"
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
    (folder / "ends").write_text(_ENDS)
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


def ends_with_run(process: subprocess.Popen[bytes], folder: Path, sign: str, then: str = "true") -> None:
    """If the process still runs when the run ends, send this signal to its group, and then run this command.

    The process leads its group, and works in or below the folder.
    """
    _processes.append(process)
    words = ("end", sign, str(process.pid), str(folder.resolve()), then)
    with (_run() / "ends").open("a") as script:
        script.write(f"{shlex.join(words)}\n")


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
