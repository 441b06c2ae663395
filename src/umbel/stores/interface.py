"""Interface: what a lake needs of the place that its files lie in.

Files are named from the lake's root, with `/` between folders. A name with a leading dot, or in a folder with
one, is not the lake's: something is being written there, or locked. All of this blocks.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

Where = Path | str
"""A lake as people name it: the path of a folder, or `s3://bucket/prefix`."""


class Unavailable(OSError):
    """The store did not answer, or refused: that says nothing about a file. `filename`: which store."""

    def __init__(self, where: str, why: str) -> None:
        super().__init__(why)
        self.filename = where
        self._why = why

    def __str__(self) -> str:
        return self._why


class Held(Exception):
    """Somebody else has what was asked for; says who."""


class Draft(Protocol):
    """A file that is not there for anybody else yet."""

    @property
    def sink(self) -> Any:
        """What Arrow writes to."""
        ...

    def written(self) -> Any:
        """What Arrow reads back what was written from; writing is over then."""
        ...

    def publish(self, name: str) -> None:
        """Whole under this name, for good; or not at all, and raise OSError."""
        ...

    def forget(self) -> None:
        """Nothing is left of it. May be called twice, and after a failure."""
        ...


class Store(Protocol):
    where: str
    """As people are shown it, and as `store_at` takes it."""

    def path(self, name: str) -> Path | None:
        """Where programs that open files by themselves find this one; None where they cannot."""
        ...

    def is_there(self) -> bool:
        """Whether there is a lake at all."""
        ...

    def names(self, folder: str, *, hidden: bool = False) -> list[str]:
        """All files below, sorted; none where there is no such folder. `hidden`: those with a dot too."""
        ...

    def folders(self, folder: str) -> list[str]:
        """The last part of the name of each folder that lies in this one."""
        ...

    def sizes(self, names: Sequence[str]) -> list[int]:
        """In bytes; 0 for one that is not there."""
        ...

    def read(self, name: str, *, at_most: int | None = None) -> bytes:
        """All of it, or so many bytes."""
        ...

    def buffer(self, name: str) -> Any:
        """All of a file for Arrow; only what is looked at is read, where that can be."""
        ...

    def open(self, name: str) -> Any:
        """What Arrow reads a file from."""
        ...

    def dataset(self, names: Sequence[str], schema: Callable[[], Any] | None = None) -> Any:
        """What DuckDB scans these files by; None where it finds them by their `path`."""
        ...

    def put(self, name: str, data: bytes) -> None:
        """The whole of a small file, for good: readers find it, or what was there before."""
        ...

    def writer(self, name: str) -> Any:
        """What Arrow writes a file to that nobody looks for until something else names it."""
        ...

    def draft(self, name: str) -> Draft:
        """A file that readers would look for. `name`: what it is known by while it is written."""
        ...

    def clear_drafts(self, folder: str, prefix: str) -> None:
        """Remove what processes that died have left of drafts whose names begin so."""
        ...

    def move(self, name: str, target: str) -> None: ...

    def delete(self, names: Iterable[str]) -> None:
        """Files, of which some may be gone already; and folders that are empty then, but not the first."""
        ...

    def delete_folder(self, folder: str) -> None:
        """With all that is in it, as far as that can be done."""
        ...

    def held(self, name: str, owner: str) -> AbstractContextManager[None]:
        """Be the only one with this name in the lake, or raise Held."""
        ...

    def confirm(self, name: str) -> None:
        """Raise OSError if what was held is somebody else's by now. Asked before anything is published."""
        ...
