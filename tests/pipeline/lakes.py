"""Lakes for tests: files as the recorder writes them, from events as they come over the wire."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from umbel.events.tables import COLUMNS, LAKE_VERSION, row
from umbel.events.types import Event
from umbel.events.view import EventReader

Wire = dict[str, Any]
RECORDED_US = 1_700_000_000_000_000
DAY = "2026-11-15"
HOUR = f"events/dt={DAY}/hour=07"

_TYPES = {
    "text": pa.string(),
    "json": pa.string(),
    "int": pa.int64(),
    "float": pa.float64(),
    "bool": pa.bool_(),
    "instant": pa.timestamp("us", tz="UTC"),
}


def arrow_schema(version: int = LAKE_VERSION) -> pa.Schema:
    metadata = {b"umbel.lake_version": str(version).encode()}
    return pa.schema([(one.name, _TYPES[one.kind]) for one in COLUMNS], metadata=metadata)


def read(events: Iterable[Wire]) -> list[Event]:
    reader = EventReader()
    return [event for told in events if (event := reader.read(told)) is not None]


def rows_of(events: Iterable[Event], *, recorded_us: int | None = RECORDED_US) -> list[dict[str, Any]]:
    """`recorded_us`: None for when each happened."""
    rows = (
        row(event, recorded_us=event.at_us if recorded_us is None else recorded_us, source="test")
        for event in events
    )
    return [{column.name: one.get(column.name) for column in COLUMNS} for one in rows]


def table_of(
    events: Iterable[Event], *, recorded_us: int | None = RECORDED_US, version: int = LAKE_VERSION
) -> pa.Table:
    return pa.Table.from_pylist(rows_of(events, recorded_us=recorded_us), schema=arrow_schema(version))


def record(lake: Path, name: str, events: Iterable[Wire], *, day: str = DAY, **how: Any) -> Path:
    """One file of the lake, there at once."""
    path = lake / HOUR.replace(DAY, day) / f"ev-test-1-{name}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    hidden = path.with_name(f".{path.name}")
    pq.write_table(table_of(read(events), **how), hidden, compression="zstd")
    hidden.rename(path)
    return path


def with_dictionaries(path: Path) -> Path:
    """The same file, its texts with dictionaries, as other tools write them."""
    table = pq.read_table(path)
    for place, field in enumerate(table.schema):
        if pa.types.is_string(field.type):
            table = table.set_column(place, field.name, table[field.name].dictionary_encode())
    pq.write_table(table, path)
    return path


def damage(path: Path) -> Path:
    """The same file with one column that is not what its description says; the description is whole."""
    column = pq.read_metadata(path).row_group(0).column(COLUMNS.index(_TYPE))
    start = column.dictionary_page_offset or column.data_page_offset
    written = bytearray(path.read_bytes())
    for place in range(start + 8, start + column.total_compressed_size):
        written[place] ^= 0x5A
    path.write_bytes(written)
    return path


_TYPE = next(one for one in COLUMNS if one.name == "type")
