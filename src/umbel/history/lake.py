"""Lake: a folder of immutable files that holds what happened.

    events/dt=2026-11-15/hour=07/ev-<recorder>-<boot>-<n>.parquet   as recorded
    compacted/dt=…/hour=…/…parquet, compacted/dt=…/…parquet         hours and days of them, by bucket
    compacted/_manifest/000001.json                                 which of them replace which
    quarantine/                                                     what could not be read; never deleted
    tables/                                                         what is built from the events
    _recorder/<name>.json, <name>.lock                              how far each recorder is; that it lives

A file appears whole or not at all: it is written under a name with a leading dot, which every
reader passes over, synced, renamed, and the folder synced. Names are never used again. The parts
dt and hour are the time of recording, by the recorder's clock, so an hour that has passed gets no
more files. The same event may be in several files; its `digest` shows that.

What is recorded may be secret (arguments, results), so a new lake is its owner's alone, unless its
mode opens it. The mode of the root holds for everything below: folders get it, files get it without
the right to execute.

This rests on a file system whose renames are atomic and whose syncs are kept; flock, which keeps
two recorders of one name apart, holds on one machine and on network file systems that carry it.
"""

import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from umbel.errors import LakeBusy, LakeError

MANIFESTS_KEPT = 5
PRIVATE = 0o700
SUFFIX = ".parquet"


class Compacted(msgspec.Struct, frozen=True):
    """The newest of these is the whole truth: these files stand for those. `rows`: of files, by name."""

    files: list[str] = []
    replaces: list[str] = []
    replaced_at: dict[str, float] = {}
    rows: dict[str, int] = {}


@dataclass(frozen=True, slots=True)
class LakeSize:
    files: int
    size_bytes: int


class Lake:
    def __init__(self, root: Path | str, *, mode: int | None = None) -> None:
        """`mode`: what the root is to have; None: what it has, PRIVATE if it is made."""
        self.root = Path(root).expanduser().absolute()
        self._mode = mode
        self.events = self.root / "events"
        self.compacted = self.root / "compacted"
        self.manifests = self.compacted / "_manifest"
        self.quarantine = self.root / "quarantine"
        self.recorders = self.root / "_recorder"

    # -- what is there ---------------------------------------------------------------------------

    def event_files(self) -> list[Path]:
        """The files that hold the events now, each event at least once; not what was set aside."""
        compacted = self.read_compacted()
        replaced = set(compacted.replaces)
        raw = [path for path in self.raw_files() if self.name_of(path) not in replaced]
        together = [self.root / name for name in compacted.files]
        return sorted([*raw, *(path for path in together if path.exists())])

    def raw_files(self) -> list[Path]:
        return sorted(
            path for path in self.events.glob(f"dt=*/hour=*/*{SUFFIX}") if not path.name.startswith(".")
        )

    def read_compacted(self) -> Compacted:
        numbers = manifest_numbers(self.manifests)
        if not numbers:
            return Compacted()
        found: Compacted = self._read_json(manifest_path(self.manifests, numbers[-1]), Compacted)
        return found

    def size(self) -> LakeSize:
        sizes = [_size_of(path) for path in self.event_files()]
        return LakeSize(len(sizes), sum(sizes))

    def name_of(self, path: Path) -> str:
        """A file as manifests name it: its way from the lake's root."""
        return path.relative_to(self.root).as_posix()

    # -- what is written -------------------------------------------------------------------------

    def make_folder(self, folder: Path) -> None:
        """Make the folder and those above it, with the lake's mode, and make that last."""
        self._make_root()
        mode = mode_of(self.root)
        missing = [one for one in (folder, *folder.parents) if not one.exists()]
        for one in reversed(missing):
            one.mkdir(mode=PRIVATE, exist_ok=True)
            one.chmod(mode)
            sync_folder(one.parent)

    def _make_root(self) -> None:
        if not self.root.exists():
            self.root.parent.mkdir(parents=True, exist_ok=True)
            self.root.mkdir(mode=PRIVATE, exist_ok=True)
            self.root.chmod(PRIVATE if self._mode is None else self._mode)
            sync_folder(self.root.parent)
        elif self._mode is not None and mode_of(self.root) != self._mode:
            self.root.chmod(self._mode)

    def hour_folder(self, at: float, *, under: Path | None = None) -> Path:
        when = datetime.fromtimestamp(at, UTC)
        folder = (under or self.events) / f"dt={when:%Y-%m-%d}" / f"hour={when:%H}"
        self.make_folder(folder)
        return folder

    def publish_compacted(self, compacted: Compacted) -> Path:
        self.make_folder(self.manifests)
        numbers = manifest_numbers(self.manifests)
        path = manifest_path(self.manifests, numbers[-1] + 1 if numbers else 1)
        write_file(path, msgspec.json.encode(compacted))
        for number in numbers[:-MANIFESTS_KEPT]:
            manifest_path(self.manifests, number).unlink(missing_ok=True)
        return path

    def set_aside(self, path: Path) -> Path:
        """Move a file that cannot be read to the quarantine, under a name that shows where it was."""
        self.make_folder(self.quarantine)
        target = self.quarantine / self.name_of(path).replace("/", "__")
        path.rename(target)
        sync_folder(path.parent)
        sync_folder(self.quarantine)
        return target

    def remove(self, paths: Iterable[Path]) -> int:
        """Delete files, and the folders that are empty then; how many files went."""
        count = 0
        for path in list(paths):
            path.unlink(missing_ok=True)
            count += 1
            for folder in (path.parent, path.parent.parent):
                is_part = folder.name.startswith(("hour=", "dt=")) and folder.is_dir()
                if is_part and not any(folder.iterdir()):
                    folder.rmdir()
        return count

    def clear_unfinished(self, recorder: str) -> None:
        """Files that a recorder of this name left half written; only for who holds its lock."""
        for path in self.events.glob(f".ev-{recorder}-*{SUFFIX}"):
            path.unlink(missing_ok=True)

    # -- who is at work --------------------------------------------------------------------------

    @contextmanager
    def locked(self, name: str, what: str) -> Iterator[None]:
        """Be the only one with this name here, or say who is."""
        self.make_folder(self.recorders)
        with create(self.recorders / f"{name}.lock").open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.seek(0)
                owner = file.read(100).strip() or "another process"
                raise LakeBusy(
                    f"{what} is already using {self.root} ({owner}); stop it, or use another name or lake"
                ) from None
            file.seek(0)
            file.truncate()
            file.write(f"pid {os.getpid()}")
            file.flush()
            yield

    def _read_json(self, path: Path, wanted: type[Any]) -> Any:
        try:
            return msgspec.json.decode(path.read_bytes(), type=wanted)
        except (OSError, msgspec.MsgspecError) as error:
            raise LakeError(f"cannot read {path}: {error}; restore the file, or move it away") from None


def manifest_numbers(folder: Path) -> list[int]:
    return sorted(int(path.stem) for path in folder.glob("*.json") if path.stem.isdecimal())


def manifest_path(folder: Path, number: int) -> Path:
    return folder / f"{number:06}.json"


def hidden(path: Path) -> Path:
    """Where a file is written before it has its name."""
    return path.with_name(f".{path.name}")


def write_file(path: Path, data: bytes) -> None:
    """Write a small file so that it is there whole or as it was before."""
    unfinished = hidden(path)
    with create(unfinished).open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    publish(unfinished, path)


def publish(unfinished: Path, path: Path) -> None:
    """Give a file that is synced its name, and make the name last."""
    unfinished.rename(path)
    sync_folder(path.parent)


def sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def create(path: Path) -> Path:
    """Make the file, empty, if it is not there; its mode is that of its folder."""
    with suppress(FileExistsError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.fchmod(descriptor, mode_of(path.parent) & 0o666)
        os.close(descriptor)
    return path


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # compacted or expired since it was listed
        return 0
