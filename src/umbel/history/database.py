"""Database: the tables and views of a build as a file of DuckDB, for dbt, notebooks and other tools.

It holds no rows, only names: which Parquet files a table is made of, and the queries of the views. Those
files go away some builds later, so it is written again after each build.
"""

import os
from pathlib import Path

from umbel.errors import HistoryError
from umbel.history.query import make_views, require_duckdb
from umbel.history.tables import Build, newest_build
from umbel.history.wanted import Wanted
from umbel.stores.interface import Where
from umbel.stores.opening import store_at


def write_database(lake: Where, path: Path) -> Build:
    """All or nothing: who has the old one open keeps it."""
    require_duckdb()
    import duckdb

    store = store_at(lake)
    if store.path("") is None:
        raise HistoryError(
            f"a database names the files of a folder, which {store.where} is not; use `umbel history sql`, or"
            " build in a folder"
        )
    build = newest_build(store)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with duckdb.connect(beside) as connection:
            make_views(connection, build, Wanted())
        beside.replace(path)
    except (OSError, duckdb.Error) as error:
        raise HistoryError(f"cannot write {str(path)!r}: {error}; name another file") from None
    finally:
        beside.unlink(missing_ok=True)
    return build
