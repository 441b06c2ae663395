"""Checkout: the package as it was at another commit, in a directory that is removed afterwards.

Taken out of the repository as an archive: nothing is noted there, so nothing is left of a killed run.
"""

import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

from benchmarks._harness.processes import BenchmarkFailed


@contextmanager
def checkout(repository: Path, commit: str) -> Iterator[tuple[str, Path]]:
    """The short name of the commit, and the directory of its package."""
    name = _git(repository, "rev-parse", "--short", "--verify", "--quiet", f"{commit}^{{commit}}")
    archive = _git(repository, "archive", "--format=tar", name.decode().strip(), "src")
    with tempfile.TemporaryDirectory(prefix="umbel-bench-") as home:
        with tarfile.open(fileobj=BytesIO(archive)) as files:
            files.extractall(home, filter="data")
        yield name.decode().strip(), Path(home) / "src"


def _git(repository: Path, *command: str) -> bytes:
    try:
        done = subprocess.run(["git", "-C", repository, *command], capture_output=True, check=False)
    except FileNotFoundError:
        raise BenchmarkFailed("another commit can be measured only where git is installed") from None
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip() or "no such commit"
        raise BenchmarkFailed(f"git {command[0]} {command[-1]}: {said}")
    return done.stdout
