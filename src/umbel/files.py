"""Files of this process: the limit on open files, and safe files in folders that other users can write to.

Each socket, pipe and file takes a descriptor. A process without free descriptors can start no child process
and open no connection. In a folder such as /tmp another user may have put a link, a file or a folder at the
name that a process is about to use. So files are opened without following links, and only files of this user
are used.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# ---- descriptors -----------------------------------------------------------------------------------
#
# A worker checks the limit before it starts, and an error names the limit and the remedy.

OF_WORKER = 16  # the minimum: an event loop, connections, files of the embedded broker
OF_GREEN_WORKER = 28  # plus a second loop and connection for remote control, and a loop for the tasks
PER_CHILD = 3  # a socket, and both ends of the pipe of tokens
SUGGESTED = 1024


def opened() -> set[int]:
    """Return the open descriptors of this process; an empty set if there is no /proc."""
    try:
        with os.scandir("/proc/self/fd") as entries:
            listed = {int(entry.name) for entry in entries}
    except FileNotFoundError:
        return set()
    # without the descriptor of the listing itself
    return {fd for fd in listed if os.path.exists(f"/proc/self/fd/{fd}")}


def limit() -> int | None:
    """Return how many descriptors this process may have; None if that is unknown or unlimited."""
    try:
        import resource
    except ImportError:  # Windows, which can only send tasks
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def raise_limit(wanted: int) -> int | None:
    """Raise the limit of descriptors to `wanted`, as far as the system allows; return it like `limit`."""
    files = limit()
    if files is not None and files < wanted:
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        files = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))
    return files


def too_few_for(children: int, *, is_green: bool) -> str:
    """Return why a worker with this many child processes cannot start; "" if there are enough descriptors."""
    most = limit()
    needed = len(opened()) + (OF_GREEN_WORKER if is_green else OF_WORKER) + PER_CHILD * children
    if most is None or needed <= most:
        return ""
    having = f" with {children:,} child process{'es' if children > 1 else ''}" if children else ""
    fewer = ", or start fewer child processes (-c)" if children > 1 else ""
    return (
        f"too few open files are allowed: a worker{having} needs at least {needed:,}, "
        f"and the limit is {most:,}; {_remedy(needed)}{fewer}"
    )


def ran_out(error: BaseException) -> str:
    """Return the problem and the remedy if the error means that no descriptor is free; else ""."""
    match getattr(error, "errno", None):
        case errno.EMFILE:
            most = limit()
            return f"too many open files: the limit of this process is {most}; {_remedy(most or 0)}"
        case errno.ENFILE:
            return "too many open files on this machine; raise fs.file-max with sysctl"
        case _:
            return ""


def none_left() -> str:
    """Check for free descriptors by opening a file, for a caller without an error; return the same as
    `ran_out`.
    """
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return ran_out(error)
    return ""


def _remedy(needed: int) -> str:
    raised = SUGGESTED
    while raised < 2 * needed:
        raised *= 2
    return f"raise it with `ulimit -n {raised}`, or LimitNOFILE={raised} in its systemd unit"


# ---- own files -------------------------------------------------------------------------------------
#
# In /tmp every user may create a link, a file or a folder at a name that a process is about to use. A link
# makes the process overwrite another file. The owner of a folder can replace the files that the process reads
# later.
#
# A private folder belongs to this user, and no other user may write to it. It is opened without following a
# link, then checked and used by its descriptor, so nothing can change between the check and the use.
#
# A file that a user named (a log, a database) may be anywhere. It is checked only in folders where every user
# may create files. There, this user, root or the folder's owner must have created it, and it must have a
# single hard link. A folder without the sticky bit cannot be made safe: other users may replace the file
# between the check and its use.

PRIVATE_FOLDER, PRIVATE_FILE = 0o700, 0o600
READ_MAX = 1024 * 1024
# of a SQLite database: its write-ahead log, the index of that log, and a rollback journal
_SIDE_FILES = ("-wal", "-shm", "-journal")
_TRIES = 3  # another process may remove the file between two steps


class UntrustedFile(PermissionError):
    """Another user made, or may change, a file or folder."""

    def __init__(self, problem: str) -> None:
        super().__init__(errno.EPERM, problem)

    def __str__(self) -> str:
        return str(self.strerror)


class PrivateFolder:
    """An open folder that other users cannot change; names are names of files in it."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    def names(self, suffix: str) -> list[str]:
        """Return the names of the files with this suffix, sorted."""
        return sorted(name for name in os.listdir(self._descriptor) if name.endswith(suffix))

    def read(self, name: str) -> bytes:
        """Read a file; raise FileNotFoundError, or OSError if it is not a regular file or exceeds READ_MAX
        bytes.
        """
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with os.fdopen(os.open(name, flags, dir_fd=self._descriptor), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise UntrustedFile(f"{self.path / name} is not a regular file")
            content = file.read(READ_MAX + 1)
        if len(content) > READ_MAX:
            raise OSError(errno.EFBIG, f"it has more than {READ_MAX:,} bytes")
        return content

    def replace(self, name: str, content: bytes, *, durable: bool = False) -> None:
        """Write a file atomically: readers get the old or the new content. `durable`: also after a power
        failure.
        """
        draft = f".{name}.{os.getpid()}"
        self.remove(draft)  # left by a process that had the same pid and died
        try:
            with os.fdopen(self._new(draft), "wb") as file:
                file.write(content)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            self.rename(draft, name)
        except OSError:
            self.remove(draft)
            raise

    def rename(self, name: str, new: str) -> None:
        """Rename a file; replace an existing file of the new name."""
        os.replace(name, new, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)

    def remove(self, name: str) -> None:
        """Remove a file; a missing file is no error."""
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._descriptor)

    def _new(self, name: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(name, flags, PRIVATE_FILE, dir_fd=self._descriptor)


@contextmanager
def private_folder(path: Path, *, make: bool = False, of_any_user: bool = False) -> Iterator[PrivateFolder]:
    """Open a folder that other users cannot change; raise UntrustedFile if they can.

    `make`: create the folder if it is missing. `of_any_user`: also accept another user's folder, for root.
    """
    _refuse_link(path)
    if make:
        path.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _refuse_open_folder(path, os.fstat(descriptor), of_any_user=of_any_user and os.geteuid() == 0)
        yield PrivateFolder(path, descriptor)
    finally:
        os.close(descriptor)


def refuse_planted(path: Path) -> None:
    """Raise UntrustedFile if another user may have created the file at `path`; a missing file is no error."""
    with suppress(FileNotFoundError):
        _refuse_planted(path)


def refuse_planted_beside(database: Path) -> None:
    """Raise UntrustedFile if another user may have created side files of a SQLite database, which SQLite
    applies.
    """
    for side in _SIDE_FILES:
        refuse_planted(database.with_name(f"{database.name}{side}"))


def make_own(path: Path, mode: int = PRIVATE_FILE) -> None:
    """Create an empty file if there is none; raise UntrustedFile if another user created something there."""
    for _ in range(_TRIES):
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode))
        except FileExistsError:
            with suppress(FileNotFoundError):
                return _refuse_planted(path)
        else:
            return None
    raise UntrustedFile(f"another process creates and removes {path} again and again")


def _refuse_planted(path: Path) -> None:
    folder, found = path.parent.stat(), path.lstat()
    if not folder.st_mode & stat.S_IWOTH:
        return
    if found.st_uid not in {os.geteuid(), 0, folder.st_uid}:
        owner = f"another user (uid {found.st_uid})"
        raise UntrustedFile(f"{path} belongs to {owner}, in a folder where every user may make files")
    if stat.S_ISREG(found.st_mode) and found.st_nlink > 1:
        raise UntrustedFile(
            f"{path} is a second name of another file, in a folder where every user may make files"
        )


def _refuse_link(path: Path) -> None:
    if path.is_symlink():
        raise UntrustedFile(f"{path} is a link to {os.readlink(path)}; name the folder itself")


def _refuse_open_folder(path: Path, found: os.stat_result, *, of_any_user: bool) -> None:
    if found.st_uid != os.geteuid() and not of_any_user:
        raise UntrustedFile(f"{path} belongs to another user (uid {found.st_uid})")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(found.st_mode)
        raise UntrustedFile(f"other users may write to {path} (mode {mode:o}); run: chmod go-w {path}")
