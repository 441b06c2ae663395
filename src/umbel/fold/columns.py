"""Columns: events and tables as Arrow columns and numpy arrays: schemas, picked rows, groups, instants."""

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from umbel.events.tables import COLUMNS, TABLES, Kind, Table

# ---- schemas ---------------------------------------------------------------------------------------
#
# The lake's columns and the tables' columns as Arrow's types, from `umbel.events`.

INSTANT = pa.timestamp("us", tz="UTC")
ARROW_TYPES: Mapping[Kind, pa.DataType] = {
    "text": pa.string(),
    "int": pa.int64(),
    "float": pa.float64(),
    "bool": pa.bool_(),
    "instant": INSTANT,
    "json": pa.string(),
}

EVENTS = pa.schema([(column.name, ARROW_TYPES[column.kind]) for column in COLUMNS])


def schema_of(table: Table) -> pa.Schema:
    """The Arrow schema of a table."""
    return pa.schema(
        [
            pa.field(column.name, ARROW_TYPES[column.kind], nullable=column.nullable)
            for column in table.columns
        ]
    )


SCHEMAS: Mapping[str, pa.Schema] = {name: schema_of(table) for name, table in TABLES.items()}


def made(name: str, columns: Mapping[str, Any]) -> pa.Table:
    """A table with the schema of this name, from its columns by name."""
    schema = SCHEMAS[name]
    return pa.table([columns[field.name] for field in schema], schema=schema)


def by_difference(schema: pa.Schema) -> dict[str, str]:
    """The encoding of number and instant columns, which halves the time to write. Digests are random:
    excluded.
    """
    kinds = {field.name: field.type for field in schema}
    numbers = [
        name for name, kind in kinds.items() if pa.types.is_integer(kind) or pa.types.is_timestamp(kind)
    ]
    return {name: "DELTA_BINARY_PACKED" for name in numbers if name != "digest"}


def settled(part: pa.Table) -> pa.Table:
    """Events with the lake's columns and types, whatever columns an older or newer file has."""
    columns = [
        part.column(field.name).cast(field.type)
        if field.name in part.column_names
        else pa.nulls(part.num_rows, field.type)
        for field in EVENTS
    ]
    return pa.table(columns, schema=EVENTS)


# ---- columns ---------------------------------------------------------------------------------------
#
# Events as Arrow columns and numpy arrays, and rows picked from them.
#
# Row -1 means that there is no event, and its values are null. So a rule that chooses between events
# chooses between row numbers, in numpy, and texts are copied once, into the resulting table.

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

NOTHING = -1


class Events:
    """A table with columns of the lake. Missing columns are null; unknown ones are ignored."""

    def __init__(self, table: pa.Table) -> None:
        self.count: int = table.num_rows
        self._table = table
        self._columns: dict[str, pa.Array] = {}
        self._ints: dict[str, Ints] = {}
        self._codes: dict[str, Ints] = {}
        self._present: dict[str, Flags] = {}

    def column(self, name: str) -> pa.Array:
        """A column with the lake's type; all null if the table lacks it."""
        if name not in self._columns:
            self._columns[name] = self._read(name)
        return self._columns[name]

    def text(self, name: str) -> pa.Array:
        """A column of texts with "" for null."""
        column = self.column(name)
        return column.fill_null("") if column.null_count else column

    def ints(self, name: str) -> Ints:
        """Numbers, or microseconds of instants, with 0 for null."""
        if name not in self._ints:
            self._ints[name] = int_array(self.column(name))
        return self._ints[name]

    def codes(self, name: str) -> Ints:
        """Numbers that are equal where the texts are equal; null counts as ""."""
        if name not in self._codes:
            found = self.text(name).dictionary_encode().indices.to_numpy()
            self._codes[name] = found.astype(np.int64)
        return self._codes[name]

    def has(self, name: str) -> Flags:
        """Where the column is not null."""
        if name not in self._present:
            self._present[name] = present(self.column(name))
        return self._present[name]

    def _read(self, name: str) -> pa.Array:
        kind = EVENTS.field(name).type
        place = self._table.schema.get_field_index(name)
        if place < 0:
            return pa.nulls(self.count, kind)
        column = self._table.column(place).combine_chunks()
        return column if column.type == kind else column.cast(kind)


class Rows:
    """Row numbers, -1 for none, and the values of those rows."""

    def __init__(self, events: Events, rows: Ints) -> None:
        self.rows = rows
        self.there: Flags = rows >= 0
        self._events = events
        self._indices: pa.Array | None = None

    def take(self, name: str) -> pa.Array:
        """The column's values of these rows; null where there is no row."""
        column = self._events.column(name)
        if column.null_count == len(column):
            return pa.nulls(len(self.rows), column.type)
        return column.take(self._places())

    def text(self, name: str) -> pa.Array:
        """Texts with "" for a null in the column; null only where there is no row."""
        return self._events.text(name).take(self._places())

    def ints(self, name: str) -> Ints:
        """Numbers with 0 for null, and 0 where there is no row."""
        return picked(self._events.ints(name), self.rows)

    def settled(self, name: str) -> pa.Array:
        """Numbers or instants with 0 for a null in the column; null only where there is no row."""
        return nullable(self.ints(name), self.there, EVENTS.field(name).type)

    def has(self, name: str) -> Flags:
        """Where there is a row and the column is not null in it."""
        return picked(self._events.has(name), self.rows)

    def where(self, chosen: Flags) -> "Rows":
        """These rows where they are chosen, else none."""
        return Rows(self._events, np.where(chosen, self.rows, NOTHING))

    def or_else(self, other: "Rows", name: str | None = None) -> "Rows":
        """These rows, else the others: where there is no row, or where the row lacks the column `name`."""
        stays = self.there if name is None else self.has(name)
        return self if stays.all() else Rows(self._events, np.where(stays, self.rows, other.rows))

    def _places(self) -> pa.Array:
        if self._indices is None:
            self._indices = pa.array(self.rows, mask=None if self.there.all() else ~self.there)
        return self._indices


def picked(values: npt.NDArray[Any], rows: Ints) -> npt.NDArray[Any]:
    """Values of rows; 0 where there is no row."""
    if not len(values):
        return np.zeros(rows.shape, dtype=values.dtype)
    found = values[rows]
    found[rows < 0] = 0
    return found


def nullable(values: npt.NDArray[Any], there: Flags, kind: pa.DataType) -> pa.Array:
    """An Arrow array of numbers that is null where `there` is False."""
    mask = None if there.all() else ~there
    array = pa.array(values, mask=mask)
    return array if array.type == kind else array.cast(kind)


def int_array(column: pa.Array) -> Ints:
    """A column as numbers, instants as microseconds; 0 for null."""
    column = column.cast(pa.int64()) if column.type != pa.int64() else column
    filled = column.fill_null(0) if column.null_count else column
    found: Ints = filled.to_numpy(zero_copy_only=False)
    return found


def float_array(column: pa.Array) -> Floats:
    """A column as floats; NaN for null."""
    found: Floats = column.to_numpy(zero_copy_only=False)
    return found


def present(column: pa.Array) -> Flags:
    """Which values of a column are not null."""
    found: Flags = pc.is_valid(column).to_numpy(zero_copy_only=False)
    return found


def instants(micros: Ints, there: Flags | None = None) -> pa.Array:
    """Microseconds as instants, null where `there` is False."""
    return nullable(micros, np.ones(len(micros), dtype=bool) if there is None else there, INSTANT)


def seconds_between(start: Ints, end: Ints) -> Floats:
    """Seconds between two columns of microseconds."""
    return (end - start) / 1_000_000


# ---- groups ----------------------------------------------------------------------------------------
#
# Numbers of groups of rows that are equal in some columns, and running values within groups.


def groups(*columns: pa.Array) -> tuple[Ints, Ints]:
    """The number of each row's group, and the first row of each group. Null is a value like others."""
    number = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        encoded = column.dictionary_encode(null_encoding="encode")
        wide = number * max(1, len(encoded.dictionary)) + encoded.indices.to_numpy()
        number = pa.array(wide).dictionary_encode().indices.to_numpy().astype(np.int64)
    firsts = np.zeros(int(number.max()) + 1 if len(number) else 0, dtype=np.int64)
    firsts[number[::-1]] = np.arange(len(number))[::-1]
    return number, firsts


def starts_of(groups_in_order: Ints) -> Ints:
    """The first row of each group, of rows that are sorted by group."""
    if not len(groups_in_order):
        return np.zeros(0, dtype=np.int64)
    return np.concatenate([[0], np.flatnonzero(groups_in_order[1:] != groups_in_order[:-1]) + 1])


def running_max(values: Ints, groups_in_order: Ints) -> Ints:
    """The greatest value so far within each group, of rows that are sorted by group."""
    if ((values[1:] >= values[:-1]) | (groups_in_order[1:] != groups_in_order[:-1])).all():
        return values
    distinct, rank = np.unique(values, return_inverse=True)
    above = groups_in_order * len(distinct)
    return distinct[np.maximum.accumulate(rank + above) - above]


# ---- moments ---------------------------------------------------------------------------------------
#
# Instants that events carry as text, as microseconds since 1970.
#
# ISO 8601 as senders write it, and the shorter forms that Spark's cast accepts: a date alone, one digit for
# two, any number of decimals, of which six count. A text without an offset is UTC. Forms that Spark reads
# with a zone's name, relative to today, or beyond the year 9999 are not accepted here.

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_OFFSET_MAX_S = 18 * 3600
_FORM = re.compile(
    r"\s*(?P<year>\d{4})(?:-(?P<month>\d{1,2})(?:-(?P<day>\d{1,2})"
    r"(?:[ T](?P<hour>\d{1,2})(?::(?P<minute>\d{1,2})"
    r"(?::(?P<second>\d{1,2})(?:\.(?P<decimals>\d*))?"
    r"\s*(?:Z|(?:UTC|GMT|UT)?(?:(?P<sign>[+-])(?P<hours>\d{1,2})(?::?(?P<minutes>\d{1,2}))?)?)?)?)?)?)?)?\s*",
    re.ASCII,
)


def moments(texts: pa.Array) -> tuple[Ints, Flags]:
    """The microseconds of each text, and which of the texts are instants."""
    if texts.null_count == len(texts):
        return np.zeros(len(texts), dtype=np.int64), np.zeros(len(texts), dtype=bool)
    encoded = texts.dictionary_encode()
    read = [moment(text) for text in encoded.dictionary.to_pylist()]
    micros = np.array([*(0 if micro is None else micro for micro in read), 0], dtype=np.int64)
    known = np.array([*(micro is not None for micro in read), False])
    places = encoded.indices.fill_null(len(read)).to_numpy(zero_copy_only=False)
    return micros[places], known[places]


def moment(text: str) -> int | None:
    """Microseconds since 1970 of a text; None if it is not an instant."""
    found = _FORM.fullmatch(text)
    if found is None:
        return None
    year, month, day = (int(found[name] or 1) for name in ("year", "month", "day"))
    hour, minute, second = (int(found[name] or 0) for name in ("hour", "minute", "second"))
    micros = int((found["decimals"] or "")[:6].ljust(6, "0"))
    ahead_s = int(found["hours"] or 0) * 3600 + int(found["minutes"] or 0) * 60
    if ahead_s > _OFFSET_MAX_S or int(found["minutes"] or 0) > 59:
        return None
    try:
        local = datetime(year, month, day, hour, minute, second, micros, UTC)
    except ValueError:
        return None
    ahead_us = ahead_s * 1_000_000 * (-1 if found["sign"] == "-" else 1)
    return (local - _EPOCH) // _MICROSECOND - ahead_us
