"""Interface: what a lake needs of the store that holds its files, and the errors of stores.

Files are named from the lake's root, with `/` between folders. A name with a leading dot, or in a folder with
one, is not the lake's: something is being written there, or locked. All of this blocks.

A manifest is a numbered file in a folder of a lake that lists what is valid; the newest is the whole truth.

Arrow passes on the replies of S3 as the texts of `OSError`, which it also raises for damaged files. So the
two are told apart by the text, and refusals of the store become Unavailable.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

# ---- interface -------------------------------------------------------------------------------------
#
# What a lake needs of the place that its files lie in.
#
# Files are named from the lake's root, with `/` between folders. A name with a leading dot, or in a folder
# with one, is not the lake's: something is being written there, or locked. All of this blocks.

Where = Path | str
"""A lake as users name it: the path of a folder, or `s3://bucket/prefix`."""


class Unavailable(OSError):
    """The store did not answer, or refused: that says nothing about a file. `filename` is the store."""

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
        """What Arrow writes to."""
        ...

    def written(self) -> Any:
        """What Arrow reads the written data from; nothing can be written afterwards."""
        ...

    def publish(self, name: str) -> None:
        """Make the whole file visible under this name, durably; or not at all, and raise OSError."""
        ...

    def forget(self) -> None:
        """Remove the draft. May be called twice, and after a failure."""
        ...


class Store(Protocol):
    """The files of one lake."""

    where: str
    """The lake as it is shown, and as `store_at` accepts it."""

    def path(self, name: str) -> Path | None:
        """The path for programs that open files by themselves; None where there is none."""
        ...

    def is_there(self) -> bool:
        """Whether there is a lake at all."""
        ...

    def names(self, folder: str, *, hidden: bool = False) -> list[str]:
        """All files below, sorted; none where there is no such folder. `hidden`: include names with a leading
        dot.
        """
        ...

    def folders(self, folder: str) -> list[str]:
        """The last part of the name of each folder directly in this one."""
        ...

    def sizes(self, names: Sequence[str]) -> list[int]:
        """In bytes; 0 for a missing file."""
        ...

    def read(self, name: str, *, at_most: int | None = None) -> bytes:
        """The content, or its first `at_most` bytes."""
        ...

    def buffer(self, name: str) -> Any:
        """The content for Arrow; where possible, only the parts that are used are read."""
        ...

    def open(self, name: str) -> Any:
        """What Arrow reads a file from."""
        ...

    def dataset(self, names: Sequence[str], schema: Callable[[], Any] | None = None) -> Any:
        """What DuckDB scans these files by; None where it finds them by their `path`."""
        ...

    def put(self, name: str, data: bytes) -> None:
        """Write a small file whole and durably: readers find it, or what was there before."""
        ...

    def writer(self, name: str) -> Any:
        """What Arrow writes a file to that is read only after another file names it."""
        ...

    def draft(self, name: str) -> Draft:
        """A draft of a file that readers would look for. `name`: what it is called while it is written."""
        ...

    def clear_drafts(self, folder: str, prefix: str) -> None:
        """Remove drafts whose names begin with the prefix, left by processes that died."""
        ...

    def move(self, name: str, target: str) -> None:
        """Rename a file; on S3 it is copied, then deleted."""

    def delete(self, names: Iterable[str]) -> None:
        """Delete files, of which some may be missing, and folders that are empty then, except the topmost."""
        ...

    def delete_folder(self, folder: str) -> None:
        """Delete the folder with all that is in it, as far as possible."""
        ...

    def held(self, name: str, owner: str) -> AbstractContextManager[None]:
        """Hold this name in the lake exclusively, or raise Held."""
        ...

    def confirm(self, name: str) -> None:
        """Raise OSError if another process may hold the name by now. Called before anything is published."""
        ...


# ---- manifests -------------------------------------------------------------------------------------
#
# Numbered files in a folder of a lake that say what counts; the newest is the whole truth.

MANIFESTS = "_manifest"
_SUFFIX = ".json"


def manifest_name(folder: str, number: int) -> str:
    """The name of the manifest with this number."""
    return f"{folder}/{MANIFESTS}/{number:06d}{_SUFFIX}"


def manifest_numbers(store: Store, folder: str) -> list[int]:
    """The numbers of the manifests in this folder, ascending."""
    names = [name.rpartition("/")[2] for name in store.names(f"{folder}/{MANIFESTS}")]
    stems = [name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX)]
    return sorted(int(stem) for stem in stems if stem.isdecimal())


# ---- refusals --------------------------------------------------------------------------------------
#
# What S3 says when it does not do what it is asked, in one line with what to do.
#
# Arrow hands on the answers of S3 as texts of an `OSError`, which is also what it raises for files that are
# damaged. So they are told apart by the text.

_S3_ERROR = re.compile(r"AWS Error (\w+)(?: \(HTTP status \d+\))? during (\w+) operation: (.*)", re.DOTALL)
_REFUSED = frozenset(
    ("ACCESS_DENIED", "INVALID_ACCESS_KEY_ID", "SIGNATURE_DOES_NOT_MATCH", "INVALID_CLIENT_TOKEN_ID")
)


def unavailable(error: Exception) -> Unavailable | None:
    """The error as Unavailable, if it is about the store; else None."""
    if isinstance(error, Unavailable):
        return error
    if "AWS Error " not in str(error):  # Arrow writes this into every error of S3
        return None
    return refusal("S3", error)


def raise_unavailable(error: Exception) -> None:
    """For callers that treat errors as damage of a file: raise Unavailable if the error is the store's."""
    problem = unavailable(error)
    if problem is not None:
        raise problem from None


def refusal(where: str, error: Exception) -> Unavailable:
    """The error as Unavailable: in one line, with what to do."""
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
