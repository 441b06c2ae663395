"""Local: a lake in a folder.

A file appears whole or not at all: it is written under a name with a leading dot, which every reader
passes over, synced, renamed, and the folder synced. What is recorded may be secret (arguments, results),
so a new lake is its owner's alone, unless its mode opens it. The mode of the root holds for everything
below: folders get it, files get it without the right to execute.

This rests on a file system whose renames are atomic and whose syncs are kept; flock, which keeps two
holders of one name apart, ends with its holder, and holds on one machine and on network file systems that
carry it.
"""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from umbel.stores.interface import Held

PRIVATE = 0o700


class LocalStore:
    def __init__(self, root: Path, *, mode: int | None = None) -> None:
        """`mode`: what the root is to have; None: what it has, PRIVATE if it is made."""
        self._root = root.expanduser().absolute()
        self._mode = mode
        self.where = str(self._root)

    # -- what is there ---------------------------------------------------------------------------

    def path(self, name: str) -> Path:
        return self._root / name

    def is_there(self) -> bool:
        return self._root.is_dir()

    def names(self, folder: str, *, hidden: bool = False) -> list[str]:
        return sorted(_below(f"{self.where}/{folder}" if folder else self.where, folder, hidden=hidden))

    def folders(self, folder: str) -> list[str]:
        with suppress(FileNotFoundError), os.scandir(self._root / folder) as entries:
            return sorted(one.name for one in entries if one.is_dir())
        return []

    def sizes(self, names: Sequence[str]) -> list[int]:
        return [_size_of(f"{self.where}/{name}") for name in names]

    def read(self, name: str, *, at_most: int | None = None) -> bytes:
        with (self._root / name).open("rb") as file:
            return file.read(at_most)

    def buffer(self, name: str) -> Any:
        import pyarrow as pa

        with pa.memory_map(f"{self.where}/{name}") as file:
            return file.read_buffer()

    def open(self, name: str) -> Any:
        import pyarrow as pa

        return pa.OSFile(f"{self.where}/{name}")

    def dataset(self, names: Sequence[str], schema: Callable[[], Any] | None = None) -> None:
        """DuckDB opens files by itself."""

    # -- what is written -------------------------------------------------------------------------

    def put(self, name: str, data: bytes) -> None:
        path = self._root / name
        self._make_folder(path.parent)
        unfinished = _hidden(path)
        with _create(unfinished).open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        _publish(unfinished, path)

    def writer(self, name: str) -> Any:
        import pyarrow as pa

        path = self._root / name
        if not path.parent.exists():
            self._make_folder(path.parent)
        return pa.OSFile(str(_create(path)), "wb")

    def draft(self, name: str) -> "LocalDraft":
        path = self._root / name
        self._make_folder(path.parent)
        return LocalDraft(self, _create(_hidden(path)))

    def publish(self, unfinished: Path, name: str) -> None:
        """Give a file that is synced its name, and make the name last."""
        path = self._root / name
        self._make_folder(path.parent)
        _publish(unfinished, path)

    def clear_drafts(self, folder: str, prefix: str) -> None:
        for name in self.names(folder, hidden=True):
            if name.rpartition("/")[2].startswith(f".{prefix}"):
                (self._root / name).unlink(missing_ok=True)

    def move(self, name: str, target: str) -> None:
        self._make_folder((self._root / target).parent)
        (self._root / name).rename(self._root / target)
        for one in (name, target):
            _sync_folder((self._root / one).parent)

    def delete(self, names: Iterable[str]) -> None:
        for name in list(names):
            path = self._root / name
            path.unlink(missing_ok=True)
            for folder in path.parents:
                if self._root in (folder, folder.parent):
                    break
                try:
                    folder.rmdir()
                except OSError:  # it is not empty, or gone
                    break

    def delete_folder(self, folder: str) -> None:
        shutil.rmtree(self._root / folder, ignore_errors=True)

    # -- who is at work --------------------------------------------------------------------------

    @contextmanager
    def held(self, name: str, owner: str) -> Iterator[None]:
        path = self._root / name
        self._make_folder(path.parent)
        with _create(path).open("a+", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.seek(0)
                raise Held(file.read(200).strip() or "another process") from None
            file.seek(0)
            file.truncate()
            file.write(owner)
            file.flush()
            yield

    def confirm(self, name: str) -> None:
        """A lock ends with its process only."""

    # -- folders and modes -----------------------------------------------------------------------

    def _make_folder(self, folder: Path) -> None:
        """Make the folder and those above it, with the lake's mode, and make that last."""
        self._make_root()
        mode = mode_of(self._root)
        missing: list[Path] = []
        while not folder.exists():
            missing.append(folder)
            folder = folder.parent
        for one in reversed(missing):
            one.mkdir(mode=PRIVATE, exist_ok=True)
            one.chmod(mode)
            _sync_folder(one.parent)

    def _make_root(self) -> None:
        if not self._root.exists():
            self._root.parent.mkdir(parents=True, exist_ok=True)
            self._root.mkdir(mode=PRIVATE, exist_ok=True)
            self._root.chmod(PRIVATE if self._mode is None else self._mode)
            _sync_folder(self._root.parent)
        elif self._mode is not None and mode_of(self._root) != self._mode:
            self._root.chmod(self._mode)


class LocalDraft:
    """A file beside others, under a name with a leading dot."""

    def __init__(self, store: LocalStore, path: Path) -> None:
        import pyarrow as pa

        self._store = store
        self._path = path
        self.sink: Any = pa.OSFile(str(path), "wb")

    def written(self) -> str:
        self.sink.close()
        return str(self._path)

    def publish(self, name: str) -> None:
        self.sink.close()
        with self._path.open("rb") as file:
            os.fsync(file.fileno())
        self._store.publish(self._path, name)

    def forget(self) -> None:
        with suppress(OSError):
            self.sink.close()
        self._path.unlink(missing_ok=True)


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


def _below(path: str, name: str, *, hidden: bool) -> Iterator[str]:
    try:
        entries = list(os.scandir(path))
    except (FileNotFoundError, NotADirectoryError):  # removed meanwhile
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
    """Where a file is written before it has its name."""
    return path.with_name(f".{path.name}")


def _publish(unfinished: Path, path: Path) -> None:
    unfinished.rename(path)
    _sync_folder(path.parent)


def _create(path: Path) -> Path:
    """Make the file, empty, if it is not there; its mode is that of its folder."""
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
    except FileNotFoundError:  # compacted or expired since it was listed
        return 0
