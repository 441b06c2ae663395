"""Schemas: the lake's columns and the tables' columns as Arrow's types, from `umbel.events`."""

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from umbel.events.columns import COLUMNS, Kind
from umbel.events.tables import TABLES, Table

INSTANT = pa.timestamp("us", tz="UTC")
ARROW_TYPES: Mapping[Kind, pa.DataType] = {
    "text": pa.string(),
    "int": pa.int64(),
    "float": pa.float64(),
    "bool": pa.bool_(),
    "instant": INSTANT,
    "json": pa.string(),
}

EVENTS = pa.schema([(one.name, ARROW_TYPES[one.kind]) for one in COLUMNS])


def schema_of(table: Table) -> pa.Schema:
    return pa.schema(
        [pa.field(one.name, ARROW_TYPES[one.kind], nullable=one.nullable) for one in table.columns]
    )


SCHEMAS: Mapping[str, pa.Schema] = {name: schema_of(table) for name, table in TABLES.items()}


def made(name: str, columns: Mapping[str, Any]) -> pa.Table:
    """One of the tables from its columns, which are named as the table names them."""
    schema = SCHEMAS[name]
    return pa.table([columns[field.name] for field in schema], schema=schema)


def by_difference(schema: pa.Schema) -> dict[str, str]:
    """How numbers and instants are written: half of the time, and no more room. Digests are as if drawn."""
    kinds = {field.name: field.type for field in schema}
    numbers = [
        name for name, kind in kinds.items() if pa.types.is_integer(kind) or pa.types.is_timestamp(kind)
    ]
    return {name: "DELTA_BINARY_PACKED" for name in numbers if name != "digest"}


def settled(part: pa.Table) -> pa.Table:
    """Events with the lake's columns and types, whatever an older or newer file has."""
    columns = [
        part.column(field.name).cast(field.type)
        if field.name in part.column_names
        else pa.nulls(part.num_rows, field.type)
        for field in EVENTS
    ]
    return pa.table(columns, schema=EVENTS)
