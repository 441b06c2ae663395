"""Tables: which build of the history is the current one, and which files it is made of.

A build writes its files first and its manifest last, by a rename: the manifest is the publication.
Readers look at the newest manifest and read only the files it names, so they never see half a
build. The files of a build never change. They go away some builds later; a reader that slow
looks again (`query.read`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from umbel.errors import HistoryError, NothingBuilt
from umbel.events.columns import LAKE_VERSION

TABLES = "tables"
MANIFESTS = "_manifest"
MANIFEST_BYTES_MAX = 64_000_000


@dataclass(frozen=True)
class Build:
    """What one build published. `facts` is the rest of its manifest: counts and when it was built."""

    number: int
    lake: Path
    files: Mapping[str, tuple[Path, ...]]
    facts: Mapping[str, Any]

    def is_there(self) -> bool:
        return all(path.is_file() for files in self.files.values() for path in files)


class Manifest(msgspec.Struct, frozen=True):
    """What readers need of a manifest; the files are named from the folder of the tables."""

    build: str
    tables: dict[str, list[str]]
    lake_version: int = 1


def newest_build(lake: Path) -> Build:
    """The build that was published last; NothingBuilt where there is none."""
    number = newest_number(lake)
    if number is None:
        raise NothingBuilt(lake)
    path = lake / TABLES / MANIFESTS / f"{number:06d}.json"
    try:
        with path.open("rb") as file:
            text = file.read(MANIFEST_BYTES_MAX)
        manifest = msgspec.json.decode(text, type=Manifest)
        facts = msgspec.json.decode(text)
    except (OSError, msgspec.MsgspecError) as error:
        raise HistoryError(
            f"the manifest {str(path)!r} cannot be read ({error}); rebuild with `umbel history build`"
        ) from None
    if manifest.lake_version > LAKE_VERSION:
        raise HistoryError(
            f"{str(path)!r} has version {manifest.lake_version}, but this Umbel reads up to"
            f" {LAKE_VERSION}; upgrade Umbel"
        )
    folder = lake / TABLES
    files = {name: tuple(_inside(folder, one) for one in named) for name, named in manifest.tables.items()}
    return Build(number, lake, files, {name: value for name, value in facts.items() if name != "tables"})


def newest_number(lake: Path) -> int | None:
    """The number of the newest manifest. A name with a leading dot is one that is being written."""
    try:
        names = [path.name for path in (lake / TABLES / MANIFESTS).iterdir()]
    except OSError:
        return None
    return max(
        (int(name[:-5]) for name in names if name.endswith(".json") and name[:-5].isdigit()), default=None
    )


def _inside(folder: Path, name: str) -> Path:
    """A manifest names files beside it and nowhere else: it may come from another machine."""
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise HistoryError(
            f"a manifest in {str(folder)!r} names {name!r} outside it; rebuild with `umbel history build`"
        )
    return path
