"""Presence: whether a path still names the files that are open.

SQLite goes on with a file that was deleted or moved away, and what is written there is lost; clients
that open the path later write to another file. So every transaction looks first. Mostly one look at
the directory is enough: deleting, moving or making a file there changes its time. Within a tick of the
kernel's clock two changes may have the same time, so a directory that changed just now is not trusted.

A backup that is copied over the open file (`cp` onto it) keeps the file's number and is not noticed.
"""

import os
import time
from pathlib import Path

TICK_NS = 50_000_000  # several ticks of the slowest clock that kernels date files with

Identity = tuple[int, int] | None
"""Of a file: its device and its number there; None when there is no file."""


class Presence:
    """Made before the database is opened; `note_opened` is for when all its files are there."""

    def __init__(self, path: Path) -> None:
        self._directory = str(path.parent)
        self._sides = (f"{path}-wal", f"{path}-shm", f"{path}-lock")
        self._opened = {str(path): _identity(str(path))}
        self._trusted: tuple[int, int, int] | None = None

    def note_opened(self) -> None:
        self._opened |= {name: _identity(name) for name in self._sides}

    def is_there(self, name: str) -> bool:
        """Whether the name is still that of the open file."""
        return _identity(name) == self._opened[name]

    def missing(self) -> str:
        """The path that does not name the open file any more, the database's own first; "" if all do."""
        try:
            directory = os.stat(self._directory)
            seen = (directory.st_dev, directory.st_ino, directory.st_mtime_ns)
        except OSError:
            return next(iter(self._opened))
        if seen == self._trusted:
            return ""
        for name in self._opened:
            if not self.is_there(name):
                return name
        self._trusted = seen if time.time_ns() - seen[2] > TICK_NS else None
        return ""


def _identity(path: str) -> Identity:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
