"""Columns: helpers for events and tables as Arrow columns and numpy arrays: schemas, rows, groups, times."""

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
    """Return the Arrow schema of a table."""
    return pa.schema(
        [
            pa.field(column.name, ARROW_TYPES[column.kind], nullable=column.nullable)
            for column in table.columns
        ]
    )


SCHEMAS: Mapping[str, pa.Schema] = {name: schema_of(table) for name, table in TABLES.items()}


def made(name: str, columns: Mapping[str, Any]) -> pa.Table:
    """Return a table with the schema of this name, from columns by name."""
    schema = SCHEMAS[name]
    return pa.table([columns[field.name] for field in schema], schema=schema)


def by_difference(schema: pa.Schema) -> dict[str, str]:
    """Return the encoding of number and time columns, which halves the time to write them. Digests are
    excluded, because they are random.
    """
    kinds = {field.name: field.type for field in schema}
    numbers = [
        name for name, kind in kinds.items() if pa.types.is_integer(kind) or pa.types.is_timestamp(kind)
    ]
    return {name: "DELTA_BINARY_PACKED" for name in numbers if name != "digest"}


def settled(part: pa.Table) -> pa.Table:
    """Return events with the lake's columns and types, also for files of older or newer versions."""
    columns = [
        part.column(field.name).cast(field.type)
        if field.name in part.column_names
        else pa.nulls(part.num_rows, field.type)
        for field in EVENTS
    ]
    return pa.table(columns, schema=EVENTS)


# ---- columns ---------------------------------------------------------------------------------------

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

NOTHING = -1


class Events:
    """A table with columns of the lake. Missing columns are null, unknown columns are ignored."""

    def __init__(self, table: pa.Table) -> None:
        self.count: int = table.num_rows
        self._table = table
        self._columns: dict[str, pa.Array] = {}
        self._ints: dict[str, Ints] = {}
        self._codes: dict[str, Ints] = {}
        self._present: dict[str, Flags] = {}

    def column(self, name: str) -> pa.Array:
        """Return a column with the lake's type; all null if the table does not have it."""
        if name not in self._columns:
            self._columns[name] = self._read(name)
        return self._columns[name]

    def text(self, name: str) -> pa.Array:
        """Return a text column with "" for null."""
        column = self.column(name)
        return column.fill_null("") if column.null_count else column

    def ints(self, name: str) -> Ints:
        """Return a column as integers, with times in microseconds and 0 for null."""
        if name not in self._ints:
            self._ints[name] = int_array(self.column(name))
        return self._ints[name]

    def codes(self, name: str) -> Ints:
        """Return numbers that are equal if and only if the texts are equal; null is equal to ""."""
        if name not in self._codes:
            found = self.text(name).dictionary_encode().indices.to_numpy()
            self._codes[name] = found.astype(np.int64)
        return self._codes[name]

    def has(self, name: str) -> Flags:
        """Return in which rows the column is not null."""
        if name not in self._present:
            self._present[name] = present(self.column(name))
        return self._present[name]

    def _read(self, name: str) -> pa.Array:
        """Return a column of the table, converted to the lake's type."""
        kind = EVENTS.field(name).type
        place = self._table.schema.get_field_index(name)
        if place < 0:
            return pa.nulls(self.count, kind)
        column = self._table.column(place).combine_chunks()
        return column if column.type == kind else column.cast(kind)


class Rows:
    """Row numbers, with -1 for no row, and access to the values of these rows.

    Row number -1 means that there is no event; its values are null. A rule that chooses between events
    therefore chooses between row numbers in numpy, and texts are copied only once, into the final table.
    """

    def __init__(self, events: Events, rows: Ints) -> None:
        self.rows = rows
        self.there: Flags = rows >= 0
        self._events = events
        self._indices: pa.Array | None = None

    def take(self, name: str) -> pa.Array:
        """Return the values of a column; null if there is no row."""
        column = self._events.column(name)
        if column.null_count == len(column):
            return pa.nulls(len(self.rows), column.type)
        return column.take(self._places())

    def text(self, name: str) -> pa.Array:
        """Return the texts of a column with "" for null; null only if there is no row."""
        return self._events.text(name).take(self._places())

    def ints(self, name: str) -> Ints:
        """Return the integers of a column; 0 for null or if there is no row."""
        return picked(self._events.ints(name), self.rows)

    def settled(self, name: str) -> pa.Array:
        """Return the numbers or times of a column with 0 for null; null only if there is no row."""
        return nullable(self.ints(name), self.there, EVENTS.field(name).type)

    def has(self, name: str) -> Flags:
        """Return where there is a row whose column is not null."""
        return picked(self._events.has(name), self.rows)

    def where(self, chosen: Flags) -> "Rows":
        """Return these rows where `chosen` is true, else no row."""
        return Rows(self._events, np.where(chosen, self.rows, NOTHING))

    def or_else(self, other: "Rows", name: str | None = None) -> "Rows":
        """Return these rows, and `other` where there is no row, or where the column `name` is null."""
        stays = self.there if name is None else self.has(name)
        return self if stays.all() else Rows(self._events, np.where(stays, self.rows, other.rows))

    def _places(self) -> pa.Array:
        if self._indices is None:
            self._indices = pa.array(self.rows, mask=None if self.there.all() else ~self.there)
        return self._indices


def picked(values: npt.NDArray[Any], rows: Ints) -> npt.NDArray[Any]:
    """Return the values of rows; 0 if there is no row."""
    if not len(values):
        return np.zeros(rows.shape, dtype=values.dtype)
    found = values[rows]
    found[rows < 0] = 0
    return found


def nullable(values: npt.NDArray[Any], there: Flags, kind: pa.DataType) -> pa.Array:
    """Return an Arrow array of numbers that is null where `there` is False."""
    mask = None if there.all() else ~there
    array = pa.array(values, mask=mask)
    return array if array.type == kind else array.cast(kind)


def int_array(column: pa.Array) -> Ints:
    """Return a column as integers, with times in microseconds and 0 for null."""
    column = column.cast(pa.int64()) if column.type != pa.int64() else column
    filled = column.fill_null(0) if column.null_count else column
    found: Ints = filled.to_numpy(zero_copy_only=False)
    return found


def float_array(column: pa.Array) -> Floats:
    """Return a column as floats, with NaN for null."""
    found: Floats = column.to_numpy(zero_copy_only=False)
    return found


def present(column: pa.Array) -> Flags:
    """Return which values of a column are not null."""
    found: Flags = pc.is_valid(column).to_numpy(zero_copy_only=False)
    return found


def instants(micros: Ints, there: Flags | None = None) -> pa.Array:
    """Convert microseconds to times; null where `there` is False."""
    return nullable(micros, np.ones(len(micros), dtype=bool) if there is None else there, INSTANT)


def seconds_between(start: Ints, end: Ints) -> Floats:
    """Return the seconds between two columns of microseconds."""
    return (end - start) / 1_000_000


# ---- groups ----------------------------------------------------------------------------------------


def groups(*columns: pa.Array) -> tuple[Ints, Ints]:
    """Return the number of each row's group, and the first row of each group. Nulls are equal to each
    other.

    Rows that are equal in some columns form a group; groups are numbered.
    """
    number = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        encoded = column.dictionary_encode(null_encoding="encode")
        wide = number * max(1, len(encoded.dictionary)) + encoded.indices.to_numpy()
        number = pa.array(wide).dictionary_encode().indices.to_numpy().astype(np.int64)
    firsts = np.zeros(int(number.max()) + 1 if len(number) else 0, dtype=np.int64)
    firsts[number[::-1]] = np.arange(len(number))[::-1]
    return number, firsts


def starts_of(groups_in_order: Ints) -> Ints:
    """Return the first row of each group; the rows must be sorted by group."""
    if not len(groups_in_order):
        return np.zeros(0, dtype=np.int64)
    return np.concatenate([[0], np.flatnonzero(groups_in_order[1:] != groups_in_order[:-1]) + 1])


def running_max(values: Ints, groups_in_order: Ints) -> Ints:
    """Return the maximum up to each row within its group; the rows must be sorted by group."""
    if ((values[1:] >= values[:-1]) | (groups_in_order[1:] != groups_in_order[:-1])).all():
        return values
    distinct, rank = np.unique(values, return_inverse=True)
    above = groups_in_order * len(distinct)
    return distinct[np.maximum.accumulate(rank + above) - above]


# ---- moments ---------------------------------------------------------------------------------------

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
    """Convert texts to microseconds, and return which of them are valid times.

    Times that events contain as text are converted to microseconds since 1970. The formats are ISO 8601, and
    the shorter forms that Spark's cast accepts: only a date, single digits, any number of decimals, of which
    the first six count. A text without an offset is in UTC. Names of time zones, relative times and years
    after 9999, which Spark accepts, are not supported.
    """
    if texts.null_count == len(texts):
        return np.zeros(len(texts), dtype=np.int64), np.zeros(len(texts), dtype=bool)
    encoded = texts.dictionary_encode()
    read = [moment(text) for text in encoded.dictionary.to_pylist()]
    micros = np.array([*(0 if micro is None else micro for micro in read), 0], dtype=np.int64)
    known = np.array([*(micro is not None for micro in read), False])
    places = encoded.indices.fill_null(len(read)).to_numpy(zero_copy_only=False)
    return micros[places], known[places]


def moment(text: str) -> int | None:
    """Convert a text to microseconds since 1970; return None if it is not a valid time."""
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
