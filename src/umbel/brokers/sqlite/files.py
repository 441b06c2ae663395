"""What is done with the files of the database beside what SQLite does with them, which is not enough.

`Presence` says whether the path still names the files that are open, `WriteGate` whose turn it is to write,
and `Log` brings what was committed to the disk.
"""

import fcntl
import os
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from umbel.errors import AccessRefused, BrokerUnavailable, StorageFull

_RESERVE_MAX_BYTES = 1024 * 1024
TICK_NS = 50_000_000  # several ticks of the slowest clock that kernels date files with

Identity = tuple[int, int] | None
"""Of a file: its device and its number there; None when there is no file."""


class Presence:
    """Whether a path still names the files that are open.

    SQLite goes on with a file that was deleted or moved away, and what is written there is lost; clients
    that open the path later write to another file. So every transaction looks first. Mostly one look at
    the directory is enough: deleting, moving or making a file there changes its time. Within a tick of the
    kernel's clock two changes may have the same time, so a directory that changed just now is not trusted.

    A backup that is copied over the open file (`cp` onto it) keeps the file's number and is not noticed.

    Made before the database is opened; `note_opened` is for when all its files are there.
    """

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


_SUPPORTED = sys.platform == "linux"
_GATE, _TURNSTILE, _BOTH = 0, 1, 2
_BYTES = {_GATE: (0, 1), _TURNSTILE: (1, 1), _BOTH: (0, 2)}  # of the side file: the first, and how many
_PAUSE_S = 0.00005
_PAUSE_MAX_S = 0.0005


def _flock(kind: int, place: int) -> bytes:
    start, length = _BYTES[place]
    return struct.pack("hhqqi", kind, os.SEEK_SET, start, length, 0)  # the last is a process id


_TAKE_GATE, _TAKE_TURNSTILE, _TAKE_BOTH = (_flock(fcntl.F_WRLCK, place) for place in _BYTES)
_FREE_TURNSTILE, _FREE_BOTH = (_flock(fcntl.F_UNLCK, place) for place in (_TURNSTILE, _BOTH))


class WriteGate:
    """Lets the writers of all processes in one at a time, in fair turns.

    SQLite has a write lock, but a process that waits for it sleeps in steps of up to 100 ms and gets
    it only when it happens to look at a free moment, so busy processes can pass one by again and
    again. Here a writer first takes the turnstile, then the gate, then gives the turnstile
    free: a writer that leaves the gate and wants in again finds the turnstile taken by the next in line.
    A checkpoint that a commit sets off also happens inside, and never beside another one's commit:
    SQLite before 3.51.3 can damage its file when a log is reset during a second checkpoint.

    Both are locks on bytes of a side file, held by its open description, so the kernel gives them
    free when the process ends, however it ends. Where the system has no such locks the gate is
    always open, and SQLite's own lock does its work alone.
    """

    def __init__(self, database: Path) -> None:
        self._path = Path(f"{database}-lock")
        self._file: int | None = None

    def enter(self, timeout_s: float) -> None:
        if not _SUPPORTED:
            return
        if self._file is None:
            self._file = self._open()
        # Mostly nobody is inside or in line, and one step takes both.
        if self._set(_TAKE_BOTH):
            self._set(_FREE_TURNSTILE)
        else:
            self._wait_in_line(timeout_s)

    def leave(self) -> None:
        """Whether or not it was entered, or only halfway: nothing is held afterwards."""
        if self._file is not None:
            self._set(_FREE_BOTH)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _open(self) -> int:
        try:
            return os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise AccessRefused(
                f"cannot write to {self._path}: {error.strerror}; make its directory writable for this user, "
                "or choose another path"
            ) from None

    def _wait_in_line(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        self._take(_TAKE_TURNSTILE, deadline, timeout_s)
        try:
            self._take(_TAKE_GATE, deadline, timeout_s)
        finally:
            self._set(_FREE_TURNSTILE)

    def _take(self, lock: bytes, deadline: float, timeout_s: float) -> None:
        pause_s = _PAUSE_S
        while not self._set(lock):
            if time.monotonic() > deadline:
                raise BrokerUnavailable(
                    f"{self._path} stayed locked by another process for {timeout_s:g} s; "
                    "find the process with fuser, or raise connect_timeout"
                )
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _PAUSE_MAX_S)

    def _set(self, lock: bytes) -> bool:
        assert self._file is not None
        try:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, lock)
        except BlockingIOError:
            return False
        return True


class Log:
    """The write-ahead log, opened to be flushed; closed when nobody flushes it any more.

    While a connection is open the log stays the same file, emptied and written again. There are no
    locks on it, so none is lost when this descriptor of it is closed.

    A file that grows takes the file system two writes to flush, one that is written over takes it one.
    So a log that has grown is made longer than it needs to be. SQLite takes nothing for a commit that has
    not its checksum, and writes over it. Zeros that are appended never replace what another process
    writes at this moment: the kernel puts them behind it, or it replaces them.
    """

    __slots__ = ("_size", "file", "path")

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self.file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            self._size = os.fstat(self.file).st_size
        except OSError as error:
            self.file = -1
            raise BrokerUnavailable(
                f"cannot open {path} to flush it: {error.strerror}; make it writable for this user, "
                "or raise the limit of open files"
            ) from None

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self.file >= 0:
            close(self.file)

    def flush(self) -> None:
        """Bring every commit so far to the disk."""
        try:
            self._reserve()
            os.fdatasync(self.file)
        except OSError as error:
            raise StorageFull(
                f"cannot flush {self.path} to the disk: {error.strerror}; "
                "what was published may not survive a power cut: check the disk"
            ) from None

    def _reserve(self) -> None:
        size = os.lseek(
            self.file, 0, os.SEEK_END
        )  # a third of the cost of fstat; what is written is appended
        if size > self._size:
            with suppress(OSError):  # no room: the log grows by what is written, as long as it can
                os.write(self.file, bytes(min(size, _RESERVE_MAX_BYTES)))
            size = os.lseek(self.file, 0, os.SEEK_END)
        self._size = size
