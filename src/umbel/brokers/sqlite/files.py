"""Files: where the database may be, and what SQLite does not do for its files.

SQLite's locks and its shared memory work between processes of one machine. On a network file system they fail
silently, and messages are lost or run twice. So such a place is refused before the file is touched.
Containers that share a volume of one machine are fine.

`Presence` detects that the files were deleted or replaced, `WriteGate` lets writers in one at a time, and
`Log` flushes commits to the disk.
"""

import fcntl
import os
import stat
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

from umbel.errors import AccessRefused, BadURL, BrokerUnavailable, StorageFull
from umbel.files import PRIVATE_FILE, UntrustedFile, make_own, refuse_planted_beside

# ---- location --------------------------------------------------------------------------------------

SCHEME = "sqlite"
TRIES = 3  # to create a file that another process removes
NETWORK_FILE_SYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb2", "smb3", "smbfs", "afs", "ncpfs", "coda", "ceph", "lustre", "gfs2"}
    | {"ocfs2", "glusterfs", "beegfs", "gpfs", "davfs", "9pnet"}
)
NETWORK_FUSE = frozenset(
    {"sshfs", "glusterfs", "ceph", "s3fs", "gcsfuse", "goofys", "rclone", "davfs2", "curlftpfs", "smbnetfs"}
)

_MOUNTS = Path("/proc/self/mountinfo")


def path_from_url(url: str) -> Path:
    """The absolute path for `sqlite:///relative.db` or `sqlite:////absolute.db`; BadURL says what is
    wrong.
    """
    parts = urlsplit(url)
    if parts.scheme != SCHEME:
        raise BadURL(url, "it does not start with sqlite:///")
    if parts.netloc or not parts.path.startswith("/"):
        raise BadURL(url, "write sqlite:///relative/path.db or sqlite:////absolute/path.db")
    if parts.query or parts.fragment:
        raise BadURL(url, "it takes no options after ? or #")
    name = unquote(parts.path[1:])
    if not name or name.endswith("/"):
        raise BadURL(url, "it contains no file name; write sqlite:///path.db")
    if name == ":memory:":
        raise BadURL(url, "a database in memory cannot be shared between processes; name a file")
    if "\0" in name:
        raise BadURL(url, "a file name cannot contain a NUL character")
    return Path(os.path.abspath(name))


def prepare(path: Path) -> None:
    """Create the file for its owner only, unless it exists; AccessRefused if it cannot be created there.

    Directories are not created: a mistyped path would become a new, empty broker in an unexpected place.
    """
    if not path.parent.is_dir():
        raise AccessRefused(
            f"there is no directory {path.parent} for the database {path.name}; "
            "create it, or correct the address of the broker"
        )
    kind = network_file_system(_MOUNTS.read_text() if _MOUNTS.exists() else "", path.parent.resolve())
    if kind is not None:
        raise AccessRefused(
            f"{path} is on a network file system ({kind}), where SQLite's locks are not reliable; "
            "choose a path on a local disk"
        )
    for _ in range(TRIES):
        with suppress(FileNotFoundError):
            return _make_file(path)
    raise AccessRefused(
        f"another process removes the database {path} again and again; stop it, or move the file"
    )


def _make_file(path: Path) -> None:
    """Create the file; FileNotFoundError if another process removes it meanwhile.

    It is created exclusively, so that no existing file is opened here: closing a second descriptor of the
    file would drop the locks that SQLite holds for this process.
    """
    try:
        make_own(path)
        refuse_planted_beside(path)  # the owner of the database can make this process run any task
        is_file = stat.S_ISREG(path.stat().st_mode)
    except UntrustedFile as error:
        raise AccessRefused(f"{error}; choose another path for the database") from None
    except FileNotFoundError:
        raise
    except OSError as error:
        raise AccessRefused(
            f"cannot create the database {path}: {error.strerror}; choose a path that this user may write to"
        ) from None
    if not is_file:
        raise AccessRefused(f"{path} is not a file; choose another path for the database")


def network_file_system(mountinfo: str, directory: Path) -> str | None:
    """The type of the network file system that the directory is on; None if it is on a local one."""
    best, kind = "", None
    for line in mountinfo.splitlines():
        fields, _, source = line.partition(" - ")
        mount_point = fields.split(" ")[4].encode().decode("unicode_escape")
        # A later mount over the same point hides the earlier one.
        if len(mount_point) >= len(best) and directory.is_relative_to(mount_point):
            best, kind = mount_point, source.split(" ")[0]
    if kind is None:
        return None
    fuse, _, driver = kind.partition(".")
    if kind in NETWORK_FILE_SYSTEMS or (fuse == "fuse" and driver in NETWORK_FUSE):
        return kind
    return None


# ---- presence --------------------------------------------------------------------------------------

TICK_NS = 50_000_000  # several ticks of the slowest clock that kernels use for file times

Identity = tuple[int, int] | None
"""The device of a file and its number there; None if there is no file."""


class Presence:
    """Detects that a path no longer names the open files.

    SQLite continues with a file that was deleted or moved away, and its writes there are lost; clients that
    open the path later write to another file. So every transaction checks first. Mostly one stat of the
    directory is enough: deleting, moving or creating a file there changes its time. Within a tick of the
    kernel's clock two changes may have the same time, so a directory that has just changed is not trusted.

    A backup that is copied over the open file (`cp` onto it) keeps the file's inode and is not noticed.

    Create it before the database is opened, and call `note_opened` when all its files exist.
    """

    def __init__(self, path: Path) -> None:
        self._directory = str(path.parent)
        self._sides = (f"{path}-wal", f"{path}-shm", f"{path}-lock")
        self._opened = {str(path): _identity(str(path))}
        self._trusted: tuple[int, int, int] | None = None

    def note_opened(self) -> None:
        """Note the files that SQLite has created next to the database."""
        self._opened |= {name: _identity(name) for name in self._sides}

    def is_there(self, name: str) -> bool:
        """Whether this path still names the open file."""
        return _identity(name) == self._opened[name]

    def missing(self) -> str:
        """The first path that no longer names the open file, beginning with the database; "" if all do."""
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


# ---- write gate ------------------------------------------------------------------------------------

_SUPPORTED = sys.platform == "linux"
_GATE, _TURNSTILE, _BOTH = 0, 1, 2
_BYTES = {_GATE: (0, 1), _TURNSTILE: (1, 1), _BOTH: (0, 2)}  # the first byte of the lock file, how many
_PAUSE_S = 0.00005
_PAUSE_MAX_S = 0.0005


def _flock(kind: int, place: int) -> bytes:
    start, length = _BYTES[place]
    return struct.pack("hhqqi", kind, os.SEEK_SET, start, length, 0)  # the last is a process id


_TAKE_GATE, _TAKE_TURNSTILE, _TAKE_BOTH = (_flock(fcntl.F_WRLCK, place) for place in _BYTES)
_FREE_TURNSTILE, _FREE_BOTH = (_flock(fcntl.F_UNLCK, place) for place in (_TURNSTILE, _BOTH))


class WriteGate:
    """Lets the writers of all processes in one at a time, in fair turns.

    SQLite has a write lock, but a process that waits for it sleeps for up to 100 ms at a time, and gets the
    lock only if it happens to look when the lock is free. So busy processes can overtake it again and again.
    Here a writer first takes the turnstile, then the gate, then frees the turnstile: a writer that leaves the
    gate and wants to enter again finds the turnstile taken by the next one. A checkpoint that a commit starts
    also runs inside the gate, and so never during a commit of another process: SQLite before 3.51.3 can
    damage its file when a log is reset during a second checkpoint.

    Both are locks on bytes of a separate file, held by its open file description, so the kernel frees them
    when the process ends, however it ends. On systems without such locks the gate is always open, and only
    SQLite's own lock applies.
    """

    def __init__(self, database: Path) -> None:
        self._path = Path(f"{database}-lock")
        self._file: int | None = None

    def enter(self, timeout_s: float) -> None:
        """Wait for the turn to write; BrokerUnavailable after the time-out."""
        if not _SUPPORTED:
            return
        if self._file is None:
            self._file = self._open()
        # Mostly no other process is inside or waits, and one system call takes both locks.
        if self._set(_TAKE_BOTH):
            self._set(_FREE_TURNSTILE)
        else:
            self._wait_in_line(timeout_s)

    def leave(self) -> None:
        """Free both locks, whether they were taken or not."""
        if self._file is not None:
            self._set(_FREE_BOTH)

    def close(self) -> None:
        """Close the lock file, which frees its locks."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _open(self) -> int:
        try:
            make_own(self._path)
            return os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, PRIVATE_FILE)
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
                    "find the process with fuser, or raise `connect_timeout_s`"
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


# ---- log -------------------------------------------------------------------------------------------

_RESERVE_MAX_BYTES = 1024 * 1024


class Log:
    """The write-ahead log, opened to be flushed; closed when the object is deleted.

    While a connection is open the log stays the same file, emptied and written again. It has no locks, so
    none is lost when this descriptor is closed.

    A flush of a file that has grown costs the file system two writes, a flush of an overwritten file one. So
    a log that has grown is made longer than it needs to be, with zeros. SQLite ignores data without a valid
    checksum, and overwrites it. The zeros never replace what another process writes at this moment: the
    kernel appends them after it, or the other process overwrites them.
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
                f"cannot open {path} to flush it: {error.strerror}; make it writable for this user"
            ) from None

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self.file >= 0:
            close(self.file)

    def flush(self) -> None:
        """Write every commit so far to the disk; StorageFull if that fails."""
        try:
            self._reserve()
            os.fdatasync(self.file)
        except OSError as error:
            raise StorageFull(
                f"cannot flush {self.path} to the disk: {error.strerror}; "
                "what was published may not survive a power cut: check the disk"
            ) from None

    def _reserve(self) -> None:
        size = os.lseek(self.file, 0, os.SEEK_END)  # a third of the cost of fstat; writes append anyway
        if size > self._size:
            with suppress(OSError):  # no room: then the log grows only by what is written
                os.write(self.file, bytes(min(size, _RESERVE_MAX_BYTES)))
            size = os.lseek(self.file, 0, os.SEEK_END)
        self._size = size
