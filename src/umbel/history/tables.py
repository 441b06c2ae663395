"""Tables: which build of the history is the current one, and which files it is made of.

A build writes its files first and its manifest last: the manifest is the publication.
Readers look at the newest manifest and read only the files it names, so they never see half a
build. The files of a build never change. They go away some builds later; a reader that slow
looks again (`query.read`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import msgspec

from umbel.errors import HistoryError, NothingBuilt
from umbel.events.columns import LAKE_VERSION
from umbel.fold.names import TABLES
from umbel.stores.interface import Store, Where
from umbel.stores.manifests import manifest_name, manifest_numbers
from umbel.stores.opening import store_at

MANIFEST_BYTES_MAX = 64_000_000


@dataclass(frozen=True)
class Build:
    """What one build published. `facts` is the rest of its manifest: counts and when it was built."""

    number: int
    store: Store
    files: Mapping[str, tuple[str, ...]]
    facts: Mapping[str, Any]

    def is_there(self) -> bool:
        return {name for files in self.files.values() for name in files} <= {*self.store.names(TABLES)}


class Manifest(msgspec.Struct, frozen=True):
    """What readers need of a manifest; the files are named from the folder of the tables."""

    build: str
    tables: dict[str, list[str]]
    lake_version: int = 1


def newest_build(lake: Where | Store) -> Build:
    """The build that was published last; NothingBuilt where there is none."""
    store = store_at(lake)
    number = newest_number(store)
    if number is None:
        raise NothingBuilt(store.where)
    name = manifest_name(TABLES, number)
    path = f"{store.where}/{name}"
    try:
        text = store.read(name, at_most=MANIFEST_BYTES_MAX)
        manifest = msgspec.json.decode(text, type=Manifest)
        facts = msgspec.json.decode(text)
    except (OSError, msgspec.MsgspecError) as error:
        raise HistoryError(
            f"the manifest {path!r} cannot be read ({error}); rebuild with `umbel history build`"
        ) from None
    if manifest.lake_version > LAKE_VERSION:
        raise HistoryError(
            f"{path!r} has version {manifest.lake_version}, but this Umbel reads up to"
            f" {LAKE_VERSION}; upgrade Umbel"
        )
    files = {name: tuple(_inside(store, one) for one in named) for name, named in manifest.tables.items()}
    return Build(number, store, files, {name: value for name, value in facts.items() if name != "tables"})


def newest_number(lake: Where | Store) -> int | None:
    """The number of the newest manifest."""
    store = store_at(lake)
    try:
        return max(manifest_numbers(store, TABLES), default=None)
    except OSError as error:
        raise HistoryError(f"the lake {store.where} cannot be read: {error}") from None


def _inside(store: Store, name: str) -> str:
    """A manifest names files beside it and nowhere else: it may come from another machine."""
    folder, path = store.path(TABLES), store.path(f"{TABLES}/{name}")
    is_inside = ".." not in PurePosixPath(name).parts and not name.startswith("/")
    if folder is not None and path is not None:  # a link may lead elsewhere
        is_inside &= path.resolve().is_relative_to(folder.resolve())
    if not is_inside:
        raise HistoryError(
            f"a manifest in {store.where!r} names {name!r} outside it; rebuild with `umbel history build`"
        )
    return f"{TABLES}/{name}"
