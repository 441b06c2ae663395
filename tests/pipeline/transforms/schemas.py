"""Schemas: the lake's columns, the tables' columns and the partial states as Spark's types.

All are generated from `umbel.events`, so that there is one definition of each. The lake is read with
its whole schema, given explicitly: a column that an old file lacks is null, one that a newer file has
besides is not read, and no file's own idea of a type counts.

What is joined is registers with their keys (`STATES`), never rows of a table: a row without the order of its
events cannot be merged again.
"""

from collections.abc import Mapping

from pyspark.sql import types as T

from benchmarks._pipeline.registers import register_fields
from umbel.events.tables import COLUMNS, TABLES, Kind, Table
from umbel.events.types import SLOTS, TaskCustom

SPARK_TYPES: Mapping[Kind, T.DataType] = {
    "text": T.StringType(),
    "int": T.LongType(),
    "float": T.DoubleType(),
    "bool": T.BooleanType(),
    "instant": T.TimestampType(),
    "json": T.StringType(),
}

EVENTS = T.StructType([T.StructField(one.name, SPARK_TYPES[one.kind]) for one in COLUMNS])


def schema_of(table: Table) -> T.StructType:
    return T.StructType(
        [T.StructField(one.name, SPARK_TYPES[one.kind], nullable=one.nullable) for one in table.columns]
    )


SCHEMAS: Mapping[str, T.StructType] = {name: schema_of(table) for name, table in TABLES.items()}


def _register(slot: str) -> T.StructType:
    kinds = {field.name: field.dataType for field in EVENTS} | {"attempt": T.LongType()}
    return T.StructType([T.StructField(name, kinds[name]) for name in register_fields(slot)])


STATES = T.StructType(
    [
        T.StructField("uuid", T.StringType()),
        T.StructField("retries", T.LongType()),
        *(T.StructField(slot, _register(slot)) for slot in SLOTS),
        *(T.StructField(f"first_{slot}", T.TimestampType()) for slot in SLOTS if slot != TaskCustom.slot),
        T.StructField("deliveries", T.ArrayType(T.LongType(), containsNull=False)),
        T.StructField("endings", T.ArrayType(T.LongType(), containsNull=False)),
    ]
)
"""What is known of one attempt of one task; `retries` is null for what came without an attempt."""

MARKS = T.StructType(
    [
        T.StructField("hostname", T.StringType()),
        T.StructField("pid", T.LongType()),
        T.StructField("inc", T.LongType()),
        T.StructField("bucket", T.LongType()),
        T.StructField("seen", T.BinaryType()),
        T.StructField("first_at", T.TimestampType()),
        T.StructField("last_at", T.TimestampType()),
        T.StructField("ahead_s", T.DoubleType()),
        T.StructField("recorded_at", T.TimestampType()),
    ]
)
"""Which events of a sender are in the lake, as bits, and how far its time is from the broker's."""
