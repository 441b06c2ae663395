"""Opening: the store of a lake, by how people name it."""

from pathlib import Path

from umbel.stores.interface import Store, Where
from umbel.stores.local import LocalStore

S3 = "s3://"


def is_bucket(where: Where) -> bool:
    return isinstance(where, str) and where.startswith(S3)


def store_at(where: Where | Store, *, mode: int | None = None) -> Store:
    """`mode`: what the root is to have, where that is a folder; None: what it has."""
    if isinstance(where, str) and is_bucket(where):
        from umbel.stores.s3 import S3Store

        return S3Store(where)
    if isinstance(where, str | Path):
        return LocalStore(Path(where), mode=mode)
    return where
