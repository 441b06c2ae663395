"""Scanning: files of a lake as DuckDB reads them, wherever they lie.

It opens files of a folder by itself. Those of S3 are read for it by Arrow, which is told the columns and
conditions of a query; DuckDB's own way to S3 is an extension that it would have to download.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from umbel.history.spelling import quoted_name, text_literal
from umbel.stores.interface import Store

if TYPE_CHECKING:
    import duckdb


def scanned(
    connection: "duckdb.DuckDBPyConnection",
    name: str,
    store: Store,
    files: Sequence[str],
    schema: Callable[[], Any] | None = None,
) -> str:
    """What a query selects from to have the rows of these files. `name`: one that nothing else has here.
    `schema`: Arrow's, where the files need not have the same columns."""
    dataset = store.dataset(files, schema)
    if dataset is not None:
        connection.register(name, dataset)
        return quoted_name(name)
    names = ", ".join(text_literal(as_pattern(path)) for path in paths_of(store, files))
    return f"read_parquet([{names}], union_by_name=true, hive_partitioning=false)"


def paths_of(store: Store, files: Sequence[str]) -> list[Path]:
    """Those that DuckDB opens by itself."""
    return [path for name in files if (path := store.path(name)) is not None]


def as_pattern(path: Path) -> str:
    """What DuckDB, which takes names of files for patterns, reads as this one file."""
    return "".join(f"[{sign}]" if sign in "*?[" else sign for sign in str(path))
