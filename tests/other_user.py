"""Another user of this machine, for tests of files and sockets that users share; for root alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

UID = 65_534  # nobody
needs_two_users = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can act as another user: run these tests as root, as CI does"
)
# The folder is entered while that is allowed: those above it may be this user's alone.
_BECOME = (
    "import os, socket, sys; os.chdir(sys.argv.pop(1)); os.setgroups([]); os.setgid({0}); os.setuid({0}); {1}"
)


def shared_folder(path: Path) -> Path:
    """Like /tmp: every user may make files there, and remove their own."""
    path.mkdir()
    path.chmod(0o1777)
    return path


def as_another_user(folder: Path, code: str, *arguments: object) -> None:
    """Run one line of Python in the folder as the other user; `sys.argv[1:]` are the arguments."""
    words = [sys.executable, "-I", "-c", _BECOME.format(UID, code), str(folder), *map(str, arguments)]
    ran = subprocess.run(words, check=False, capture_output=True, timeout=60)
    assert ran.returncode == 0, ran.stderr.decode()


def plant_file(path: Path, text: str = "") -> None:
    as_another_user(path.parent, "open(sys.argv[1], 'x').write(sys.argv[2])", path.name, text)


def plant_link(path: Path, target: Path) -> None:
    as_another_user(path.parent, "os.symlink(sys.argv[2], sys.argv[1])", path.name, target)


def plant_folder(path: Path) -> None:
    as_another_user(path.parent, "os.mkdir(sys.argv[1]); os.chmod(sys.argv[1], 0o777)", path.name)
