"""A lake in a folder; and `store_at`, which opens a lake by its path or address.

A file appears whole or not at all: it is written under a name with a leading dot, which every reader skips,
synced, renamed, and the folder synced. Recorded data may be secret (arguments, results), so a new lake is
readable by its owner only, unless its mode allows others. The mode of the root applies to everything below:
folders get it, files get it without the right to execute.

This needs a file system whose renames are atomic and whose syncs are durable. Locks use flock, which ends
with the process that holds it, and works on one machine and on network file systems that support it.
"""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from umbel.files import PRIVATE_FOLDER, UntrustedFile, refuse_planted
from umbel.stores.interface import HeldByAnother, Store, Unavailable, Where

# ---- local -----------------------------------------------------------------------------------------


class LocalStore:
    """A store in a folder of this machine or of a network file system."""

    def __init__(self, root: Path, *, mode: int | None = None) -> None:
        """Open the store. `mode` is that of the root folder; None keeps it, or creates it with
        PRIVATE_FOLDER.
        """
        self._root = root.expanduser().absolute()
        self._mode = mode
        self.where = str(self._root)
        try:
            refuse_planted(self._root)
        except UntrustedFile as error:
            raise Unavailable(self.where, f"{error}; name another folder for the lake") from None

    # -- what is there ---------------------------------------------------------------------------

    def path(self, name: str) -> Path:
        """Return the path of this file."""
        return self._root / name

    def is_there(self) -> bool:
        """Return whether the root folder exists."""
        return self._root.is_dir()

    def names(self, folder: str, *, hidden: bool = False) -> list[str]:
        """Return all files below the folder, sorted."""
        return sorted(_below(f"{self.where}/{folder}" if folder else self.where, folder, hidden=hidden))

    def folders(self, folder: str) -> list[str]:
        """Return the names of the folders directly in this one."""
        with suppress(FileNotFoundError), os.scandir(self._root / folder) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir())
        return []

    def sizes(self, names: Sequence[str]) -> list[int]:
        """Return the sizes in bytes; 0 for a file that was deleted meanwhile."""
        return [_size_of(f"{self.where}/{name}") for name in names]

    def read(self, name: str, *, at_most: int | None = None) -> bytes:
        """Return the content, or its first bytes."""
        with (self._root / name).open("rb") as file:
            return file.read(at_most)

    def buffer(self, name: str) -> Any:
        """Return the file, mapped into memory."""
        import pyarrow as pa

        with pa.memory_map(f"{self.where}/{name}") as file:
            return file.read_buffer()

    def open(self, name: str) -> Any:
        """Return an Arrow file."""
        import pyarrow as pa

        return pa.OSFile(f"{self.where}/{name}")

    def dataset(self, names: Sequence[str], schema: Callable[[], Any] | None = None) -> None:
        """Return None: DuckDB opens local files by their path."""

    # -- what is written -------------------------------------------------------------------------

    def put(self, name: str, data: bytes) -> None:
        """Write a hidden file, sync it, rename it, and sync the folder."""
        path = self._root / name
        self._make_folder(path.parent)
        unfinished = _hidden(path)
        with _create(unfinished).open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        _publish(unfinished, path)

    def writer(self, name: str) -> Any:
        """Return an Arrow file under its final name."""
        import pyarrow as pa

        path = self._root / name
        if not path.parent.exists():
            self._make_folder(path.parent)
        return pa.OSFile(str(_create(path)), "wb")

    def draft(self, name: str) -> "LocalDraft":
        """Return a hidden file that is renamed when it is published."""
        path = self._root / name
        self._make_folder(path.parent)
        return LocalDraft(self, _create(_hidden(path)))

    def publish(self, unfinished: Path, name: str) -> None:
        """Rename a synced file to its final name, durably."""
        path = self._root / name
        self._make_folder(path.parent)
        _publish(unfinished, path)

    def clear_drafts(self, folder: str, prefix: str) -> None:
        """Delete hidden files whose names begin with the prefix."""
        for name in self.names(folder, hidden=True):
            if name.rpartition("/")[2].startswith(f".{prefix}"):
                (self._root / name).unlink(missing_ok=True)

    def move(self, name: str, target: str) -> None:
        """Rename the file and sync both folders."""
        self._make_folder((self._root / target).parent)
        (self._root / name).rename(self._root / target)
        for moved in (name, target):
            _sync_folder((self._root / moved).parent)

    def delete(self, names: Iterable[str]) -> None:
        """Delete the files, and folders that become empty."""
        for name in list(names):
            path = self._root / name
            path.unlink(missing_ok=True)
            for folder in path.parents:
                if self._root in (folder, folder.parent):
                    break
                try:
                    folder.rmdir()
                except OSError:  # it is not empty, or missing
                    break

    def delete_folder(self, folder: str) -> None:
        """Delete the folder recursively; errors are ignored."""
        shutil.rmtree(self._root / folder, ignore_errors=True)

    # -- locks -----------------------------------------------------------------------------------

    @contextmanager
    def held(self, name: str, owner: str) -> Iterator[None]:
        """Lock a file of this name with flock; raise HeldByAnother with the owner's text if it is locked."""
        path = self._root / name
        self._make_folder(path.parent)
        with _create(path).open("a+", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.seek(0)
                raise HeldByAnother(file.read(200).strip() or "another process") from None
            file.seek(0)
            file.truncate()
            file.write(owner)
            file.flush()
            yield

    def confirm(self, name: str) -> None:
        """Do nothing: a lock ends only with its process."""

    # -- folders and modes -----------------------------------------------------------------------

    def _make_folder(self, folder: Path) -> None:
        """Create the folder and its parents, with the lake's mode, durably."""
        self._make_root()
        mode = mode_of(self._root)
        missing: list[Path] = []
        while not folder.exists():
            missing.append(folder)
            folder = folder.parent
        for above in reversed(missing):
            above.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
            above.chmod(mode)
            _sync_folder(above.parent)

    def _make_root(self) -> None:
        if not self._root.exists():
            self._root.parent.mkdir(parents=True, exist_ok=True)
            self._root.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
            self._root.chmod(PRIVATE_FOLDER if self._mode is None else self._mode)
            _sync_folder(self._root.parent)
        elif self._mode is not None and mode_of(self._root) != self._mode:
            self._root.chmod(self._mode)


class LocalDraft:
    """A file next to others, under a name with a leading dot."""

    def __init__(self, store: LocalStore, path: Path) -> None:
        import pyarrow as pa

        self._store = store
        self._path = path
        self.sink: Any = pa.OSFile(str(path), "wb")

    def written(self) -> str:
        """Return the path, for Arrow to read from."""
        self.sink.close()
        return str(self._path)

    def publish(self, name: str) -> None:
        """Sync the file and rename it to this name."""
        self.sink.close()
        with self._path.open("rb") as file:
            os.fsync(file.fileno())
        self._store.publish(self._path, name)

    def forget(self) -> None:
        """Delete the file."""
        with suppress(OSError):
            self.sink.close()
        self._path.unlink(missing_ok=True)


def mode_of(path: Path) -> int:
    """Return the permission bits of a file or folder."""
    return path.stat().st_mode & 0o777


def _below(path: str, name: str, *, hidden: bool) -> Iterator[str]:
    try:
        entries = list(os.scandir(path))
    except (FileNotFoundError, NotADirectoryError):  # deleted since the listing
        return
    for entry in entries:
        if entry.name.startswith(".") and not hidden:
            continue
        below = f"{name}/{entry.name}" if name else entry.name
        if entry.is_dir():
            yield from _below(entry.path, below, hidden=hidden)
        else:
            yield below


def _hidden(path: Path) -> Path:
    """Return the path of a file while it is written."""
    return path.with_name(f".{path.name}")


def _publish(unfinished: Path, path: Path) -> None:
    unfinished.rename(path)
    _sync_folder(path.parent)


def _create(path: Path) -> Path:
    """Create the file, empty, if it is missing; its mode follows that of its folder."""
    with suppress(FileExistsError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.fchmod(descriptor, mode_of(path.parent) & 0o666)
        os.close(descriptor)
    return path


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _size_of(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:  # compacted or expired since the listing
        return 0


# ---- opening ---------------------------------------------------------------------------------------

S3 = "s3://"


def is_bucket(where: Where) -> bool:
    """Return whether this names a lake on S3."""
    return isinstance(where, str) and where.startswith(S3)


def store_at(where: Where | Store, *, mode: int | None = None) -> Store:
    """Return the store of this lake. `mode` is that of the root, if it is a folder; None keeps it."""
    if isinstance(where, str) and is_bucket(where):
        from umbel.stores.s3 import S3Store

        return S3Store(where)
    if isinstance(where, str | Path):
        return LocalStore(Path(where), mode=mode)
    return where
