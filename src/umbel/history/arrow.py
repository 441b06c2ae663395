"""Arrow: the library that reads and writes Parquet, and the lake's schema in its words.

PyArrow is an extra, because most workers never write a file of history. It is asked for here and
nowhere else, so that one error says that it is missing, and how to get it.
"""

from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from umbel.errors import ConfigurationError
from umbel.events.columns import COLUMNS, LAKE_VERSION, Column

VERSION_KEY = b"umbel.lake_version"


@cache
def arrow() -> Any:
    """The module `pyarrow`."""
    return _imported("pyarrow")


@cache
def parquet() -> Any:
    """The module `pyarrow.parquet`."""
    arrow()
    return _imported("pyarrow.parquet")


@cache
def compute() -> Any:
    """The module `pyarrow.compute`."""
    arrow()
    return _imported("pyarrow.compute")


@cache
def event_schema() -> Any:
    """One field for each of COLUMNS, in their order; all may be null."""
    fields = [arrow().field(column.name, arrow_type(column)) for column in COLUMNS]
    return arrow().schema(fields, metadata={VERSION_KEY: str(LAKE_VERSION).encode()})


_REPEATED = (
    *("type", "slot", "hostname", "name", "queue", "exchange", "routing_key", "source"),
    *("sw_ident", "sw_ver", "sw_sys", "topic", "phase", "winner", "outcome", "policy"),
)
"""Texts that are worth a dictionary; others differ from event to event."""


def event_writer(sink: Any) -> Any:
    """How every file of events is written."""
    from umbel.fold.schemas import by_difference  # with Arrow

    schema = event_schema()
    return parquet().ParquetWriter(
        sink,
        schema,
        compression="zstd",
        compression_level=1,
        use_dictionary=list(_REPEATED),
        column_encoding=by_difference(schema),
    )


def arrow_type(column: Column) -> Any:
    library = arrow()
    match column.kind:
        case "text" | "json":
            return library.string()
        case "int":
            return library.int64()
        case "float":
            return library.float64()
        case "bool":
            return library.bool_()
        case "instant":
            return library.timestamp("us", tz="UTC")


def can_record() -> bool:
    """Whether what writes history is installed; it is not loaded for that."""
    return find_spec("pyarrow") is not None


def require_arrow() -> None:
    """For a process that does not use it, and starts one that does."""
    if not can_record():
        arrow()


def _imported(name: str) -> ModuleType:
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigurationError(
            f"history needs PyArrow, which cannot be imported ({error}): pip install 'umbel[history]'"
        ) from None
