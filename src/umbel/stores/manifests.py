"""Manifests: numbered files in a folder of a lake that say what counts; the newest is the whole truth."""

from umbel.stores.interface import Store

MANIFESTS = "_manifest"
_SUFFIX = ".json"


def manifest_name(folder: str, number: int) -> str:
    return f"{folder}/{MANIFESTS}/{number:06d}{_SUFFIX}"


def manifest_numbers(store: Store, folder: str) -> list[int]:
    """Of those that are there, in order."""
    names = [name.rpartition("/")[2] for name in store.names(f"{folder}/{MANIFESTS}")]
    stems = [name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX)]
    return sorted(int(stem) for stem in stems if stem.isdecimal())
