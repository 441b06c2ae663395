"""WriteGate: lets the writers of all processes in one at a time, in fair turns.

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

import fcntl
import os
import struct
import sys
import time
from pathlib import Path

from umbel.errors import AccessRefused, BrokerUnavailable

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
