"""Files: which files of the lake can be read, checked before a build reads them.

One truncated file would end a build, hours into it. A Parquet file has its description at
its end, so a file that was cut off is known by reading that alone; a column of another type than the
lake's is known by it too, and a file of something else. The lake's version is in it: what a newer
Umbel wrote may mean something else, and is refused as a whole rather than half understood.

Damage in the data is found by reading all of it, which is done only when a build has met some.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.parquet as pq

from umbel.events.columns import COLUMNS, LAKE_VERSION, REQUIRED, Kind
from umbel.pipeline.faults import NewerLake
from umbel.stores.interface import Store, Where
from umbel.stores.opening import store_at
from umbel.stores.refusals import raise_unavailable

VERSION_KEY = b"umbel.lake_version"
READERS = 8
THOROUGH_READERS = 2  # each has columns of a file in memory
ROWS_AT_ONCE = 65_536


@dataclass(frozen=True, slots=True)
class Unreadable:
    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Found:
    """What there is to build from. Files are named from the lake's root."""

    files: list[str] = field(default_factory=list)
    unreadable: list[Unreadable] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    """Of each file."""
    events: int = 0
    """Rows; an event that was recorded twice is two."""

    def rows_of(self) -> dict[str, int]:
        return dict(zip(self.files, self.rows, strict=True))


def look_into(
    lake: Where | Store,
    names: Sequence[str],
    *,
    thorough: bool = False,
    known: Mapping[str, int] | None = None,
) -> Found:
    """Sort the files into those that can be read and those that cannot; raise if one is too new.

    `thorough`: by reading all of them, not their descriptions alone. `known`: files that were looked into
    before, and how many events each has.
    """
    store = store_at(lake)
    counts = {} if thorough else known or {}

    def look(name: str) -> int | Unreadable:
        if name in counts:
            return counts[name]
        return _look_thoroughly(store, name) if thorough else _look(store, name)

    with ThreadPoolExecutor(THOROUGH_READERS if thorough else READERS) as readers:
        looks = list(readers.map(look, names))
    good = [(name, look) for name, look in zip(names, looks, strict=True) if not isinstance(look, Unreadable)]
    return Found(
        files=[name for name, _ in good],
        unreadable=[look for look in looks if isinstance(look, Unreadable)],
        rows=[rows for _, rows in good],
        events=sum(rows for _, rows in good),
    )


def _look(store: Store, name: str) -> int | Unreadable:
    """How many rows a file has, or why it cannot be read."""
    try:
        with store.open(name) as file:
            metadata = pq.read_metadata(file)
        schema = metadata.schema.to_arrow_schema()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise_unavailable(error)
        return Unreadable(name, f"not a complete Parquet file: {_gist(error)}")
    version = _version(schema)
    if version is None:
        return Unreadable(name, f"its version of the lake is {(schema.metadata or {}).get(VERSION_KEY)!r}")
    if version > LAKE_VERSION:
        raise NewerLake(
            f"{store.where}/{name} was written for version {version} of the lake, but this Umbel knows"
            f" {LAKE_VERSION}; upgrade Umbel here, or build with the version that recorded it"
        )
    missing = [name for name in REQUIRED if name not in schema.names]
    if missing:
        return Unreadable(name, f"it has no column {missing[0]}, so it is not a file of events")
    for column, expected in _EXPECTED.items():
        place = schema.get_field_index(column)
        if place >= 0 and not _fits(schema.field(place).type, expected):
            return Unreadable(
                name, f"column {column} is {schema.field(place).type}, and {expected} in the lake"
            )
    rows: int = metadata.num_rows
    return rows


def _look_thoroughly(store: Store, name: str) -> int | Unreadable:
    look = _look(store, name)
    try:
        with store.open(name) as opened, pq.ParquetFile(opened) as file:
            columns = [name for name in file.schema_arrow.names if name in _EXPECTED]
            for _ in file.iter_batches(ROWS_AT_ONCE, columns=columns):
                pass
    except (pa.ArrowException, OSError, ValueError) as error:
        raise_unavailable(error)
        return look if isinstance(look, Unreadable) else Unreadable(name, f"damaged: {_gist(error)}")
    return look


def _gist(error: Exception) -> str:
    return str(error).splitlines()[0][:200]


def _version(schema: pa.Schema) -> int | None:
    """What a file does not say was written by hand, for this version."""
    told = (schema.metadata or {}).get(VERSION_KEY, str(LAKE_VERSION).encode())
    return int(told) if told.isdigit() else None


_EXPECTED: dict[str, Kind] = {column.name: column.kind for column in COLUMNS}


def _fits(found: pa.DataType, expected: Kind) -> bool:
    if pa.types.is_dictionary(found):  # in the writer's memory; the file has the values' type
        return _fits(found.value_type, expected)
    match expected:
        case "text" | "json":
            return bool(pa.types.is_string(found) or pa.types.is_large_string(found))
        case "int":
            return bool(pa.types.is_signed_integer(found))
        case "float":
            return bool(pa.types.is_float64(found))
        case "bool":
            return bool(pa.types.is_boolean(found))
        case "instant":
            return bool(pa.types.is_timestamp(found) and found.unit == "us" and found.tz is not None)
