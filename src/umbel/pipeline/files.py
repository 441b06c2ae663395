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
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from umbel.events.columns import COLUMNS, LAKE_VERSION, REQUIRED, Kind
from umbel.pipeline.faults import NewerLake

VERSION_KEY = b"umbel.lake_version"
READERS = 8
THOROUGH_READERS = 2  # each has columns of a file in memory
ROWS_AT_ONCE = 65_536


@dataclass(frozen=True, slots=True)
class Unreadable:
    path: Path
    why: str


@dataclass(frozen=True, slots=True)
class Found:
    """What there is to build from."""

    files: list[Path] = field(default_factory=list)
    unreadable: list[Unreadable] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    """Of each file."""
    events: int = 0
    """Rows; an event that was recorded twice is two."""
    size_bytes: int = 0


def look_into(
    paths: Sequence[Path], *, thorough: bool = False, known: Mapping[Path, int] | None = None
) -> Found:
    """Sort the files into those that can be read and those that cannot; raise if one is too new.

    `thorough`: by reading all of them, not their descriptions alone. `known`: files that were looked into
    before, and how many events each has.
    """
    counts = {} if thorough else known or {}

    def look(path: Path) -> tuple[int, int] | Unreadable:
        if path in counts:
            return counts[path], path.stat().st_size
        return _look_thoroughly(path) if thorough else _look(path)

    with ThreadPoolExecutor(THOROUGH_READERS if thorough else READERS) as readers:
        looks = list(readers.map(look, paths))
    good = [(path, look) for path, look in zip(paths, looks, strict=True) if not isinstance(look, Unreadable)]
    return Found(
        files=[path for path, _ in good],
        unreadable=[look for look in looks if isinstance(look, Unreadable)],
        rows=[rows for _, (rows, _) in good],
        events=sum(rows for _, (rows, _) in good),
        size_bytes=sum(size for _, (_, size) in good),
    )


def _look(path: Path) -> tuple[int, int] | Unreadable:
    """How many rows and bytes a file has, or why it cannot be read."""
    try:
        metadata = pq.read_metadata(path)
        schema = metadata.schema.to_arrow_schema()
        size = path.stat().st_size
    except (pa.ArrowException, OSError, ValueError) as error:
        return Unreadable(path, f"not a complete Parquet file: {_gist(error)}")
    version = _version(schema)
    if version is None:
        return Unreadable(path, f"its version of the lake is {(schema.metadata or {}).get(VERSION_KEY)!r}")
    if version > LAKE_VERSION:
        raise NewerLake(
            f"{path} was written for version {version} of the lake, but this Umbel knows {LAKE_VERSION};"
            " upgrade Umbel here, or build with the version that recorded it"
        )
    missing = [name for name in REQUIRED if name not in schema.names]
    if missing:
        return Unreadable(path, f"it has no column {missing[0]}, so it is not a file of events")
    for name, expected in _EXPECTED.items():
        place = schema.get_field_index(name)
        if place >= 0 and not _fits(schema.field(place).type, expected):
            return Unreadable(
                path, f"column {name} is {schema.field(place).type}, and {expected} in the lake"
            )
    return metadata.num_rows, size


def _look_thoroughly(path: Path) -> tuple[int, int] | Unreadable:
    look = _look(path)
    try:
        with pq.ParquetFile(path) as file:
            columns = [name for name in file.schema_arrow.names if name in _EXPECTED]
            for _ in file.iter_batches(ROWS_AT_ONCE, columns=columns):
                pass
    except (pa.ArrowException, OSError, ValueError) as error:
        return look if isinstance(look, Unreadable) else Unreadable(path, f"damaged: {_gist(error)}")
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
