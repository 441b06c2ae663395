"""The interface of a lake's store, its manifests, and the errors of stores.

Files are named from the lake's root, with `/` between folders. A name with a leading dot, or in a folder with
one, does not belong to the lake: it is a file being written, or a lock. All methods block.

A manifest is a numbered file in a folder of a lake that lists which files are valid; the newest manifest
counts.

Arrow reports errors of S3 as texts of `OSError`, which it also raises for damaged files. So the text decides
which of the two an error is, and refusals of the store become Unavailable.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

# ---- interface -------------------------------------------------------------------------------------

Where = Path | str
"""A lake as users name it: the path of a folder, or `s3://bucket/prefix`."""


class Unavailable(OSError):
    """The store did not answer, or refused; this says nothing about a file. `filename` is the store."""

    def __init__(self, where: str, why: str) -> None:
        super().__init__(why)
        self.filename = where
        self._why = why

    def __str__(self) -> str:
        return self._why


class HeldByAnother(Exception):
    """Another process holds the name; the text says which."""


class Draft(Protocol):
    """A file that no other process can see yet."""

    @property
    def sink(self) -> Any:
        """Return what Arrow writes to."""
        ...

    def written(self) -> Any:
        """Return what Arrow reads the written data from; nothing can be written afterwards."""
        ...

    def publish(self, name: str) -> None:
        """Make the whole file visible under this name, durably, or raise OSError and publish nothing."""
        ...

    def forget(self) -> None:
        """Remove the draft. May be called twice, and after a failure."""
        ...


class Store(Protocol):
    """The files of one lake."""

    where: str
    """The lake as it is displayed, and as `store_at` accepts it."""

    def path(self, name: str) -> Path | None:
        """Return the path for programs that open files by themselves; None if the store has no paths."""
        ...

    def is_there(self) -> bool:
        """Return whether the lake exists."""
        ...

    def names(self, folder: str, *, hidden: bool = False) -> list[str]:
        """Return all files below the folder, sorted; none if it does not exist. `hidden`: include hidden
        names.
        """
        ...

    def folders(self, folder: str) -> list[str]:
        """Return the last part of the name of each folder directly in this one."""
        ...

    def sizes(self, names: Sequence[str]) -> list[int]:
        """Return the sizes in bytes; 0 for a missing file."""
        ...

    def read(self, name: str, *, at_most: int | None = None) -> bytes:
        """Return the content, or its first `at_most` bytes."""
        ...

    def buffer(self, name: str) -> Any:
        """Return the content for Arrow; if possible, only the parts that are used are read."""
        ...

    def open(self, name: str) -> Any:
        """Open a file for Arrow to read from."""
        ...

    def dataset(self, names: Sequence[str], schema: Callable[[], Any] | None = None) -> Any:
        """Return the dataset that DuckDB scans for these files; None if it opens them by their `path`."""
        ...

    def put(self, name: str, data: bytes) -> None:
        """Write a small file atomically and durably: readers find the new or the old content."""
        ...

    def writer(self, name: str) -> Any:
        """Open a file for Arrow to write. It is not atomic, so readers must not find it before another file
        names it.
        """
        ...

    def draft(self, name: str) -> Draft:
        """Return a draft of a file that readers would look for. `name` is its name while it is written."""
        ...

    def clear_drafts(self, folder: str, prefix: str) -> None:
        """Remove drafts whose names begin with the prefix, left by processes that died."""
        ...

    def move(self, name: str, target: str) -> None:
        """Rename a file; on S3 it is copied, then deleted."""

    def delete(self, names: Iterable[str]) -> None:
        """Delete files, some of which may be missing, and folders that become empty, except the topmost."""
        ...

    def delete_folder(self, folder: str) -> None:
        """Delete the folder and everything in it, as far as possible."""
        ...

    def held(self, name: str, owner: str) -> AbstractContextManager[None]:
        """Hold this name in the lake exclusively, or raise HeldByAnother."""
        ...

    def confirm(self, name: str) -> None:
        """Raise OSError if another process may hold the name now. Called before anything is published."""
        ...


# ---- manifests -------------------------------------------------------------------------------------

MANIFESTS = "_manifest"
_SUFFIX = ".json"


def manifest_name(folder: str, number: int) -> str:
    """Return the name of the manifest with this number."""
    return f"{folder}/{MANIFESTS}/{number:06d}{_SUFFIX}"


def manifest_numbers(store: Store, folder: str) -> list[int]:
    """Return the numbers of the manifests in this folder, ascending."""
    names = [name.rpartition("/")[2] for name in store.names(f"{folder}/{MANIFESTS}")]
    stems = [name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX)]
    return sorted(int(stem) for stem in stems if stem.isdecimal())


# ---- refusals --------------------------------------------------------------------------------------

_S3_ERROR = re.compile(r"AWS Error (\w+)(?: \(HTTP status \d+\))? during (\w+) operation: (.*)", re.DOTALL)
_REFUSED = frozenset(
    ("ACCESS_DENIED", "INVALID_ACCESS_KEY_ID", "SIGNATURE_DOES_NOT_MATCH", "INVALID_CLIENT_TOKEN_ID")
)


def unavailable(error: Exception) -> Unavailable | None:
    """Return the error as Unavailable if it comes from the store; else None."""
    if isinstance(error, Unavailable):
        return error
    if "AWS Error " not in str(error):  # every error of S3 contains this text
        return None
    return refusal("S3", error)


def raise_unavailable(error: Exception) -> None:
    """Raise Unavailable if the error is the store's, for callers that treat other errors as damaged files."""
    problem = unavailable(error)
    if problem is not None:
        raise problem from None


def refusal(where: str, error: Exception) -> Unavailable:
    """Return the error as Unavailable, in one line, with the remedy."""
    match = _S3_ERROR.search(str(error))
    if match is None:
        return Unavailable(where, str(error).partition("\n")[0][:300])
    code, what, message = match[1], match[2], match[3].partition(" (Request ID")[0].partition("\n")[0][:200]
    if code == "NO_SUCH_BUCKET":
        return Unavailable(where, "there is no such bucket; create it, or name another with --lake")
    if code in _REFUSED:
        return Unavailable(
            where,
            f"S3 refused access ({what}: {code}); check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or"
            " AWS_PROFILE, and what they may do with this bucket",
        )
    told_so = ": ".join(filter(None, (what, code, message)))
    return Unavailable(where, f"S3 did not answer ({told_so}); try again")
