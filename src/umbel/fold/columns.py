"""Columns: events as Arrow columns and numpy arrays, and rows picked from them.

A place that has no event is row -1, and what is picked there is null. So a rule that chooses between
events chooses between row numbers, in numpy, and texts are copied once, into the table that shows them.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from umbel.fold.schemas import EVENTS, INSTANT

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

NOTHING = -1


class Events:
    """A table with columns of the lake. Those that it lacks are null; others are not looked at."""

    def __init__(self, table: pa.Table) -> None:
        self.count: int = table.num_rows
        self._table = table
        self._columns: dict[str, pa.Array] = {}
        self._ints: dict[str, Ints] = {}
        self._codes: dict[str, Ints] = {}
        self._present: dict[str, Flags] = {}

    def column(self, name: str) -> pa.Array:
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
        """Numbers that are equal where the texts are, "" being null."""
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
    """Row numbers, -1 for none, and what stands in those rows."""

    def __init__(self, events: Events, rows: Ints) -> None:
        self.rows = rows
        self.there: Flags = rows >= 0
        self._events = events
        self._indices: pa.Array | None = None

    def take(self, name: str) -> pa.Array:
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
        """These rows, the others where there is none; or where there is none that has this column."""
        stays = self.there if name is None else self.has(name)
        return self if stays.all() else Rows(self._events, np.where(stays, self.rows, other.rows))

    def _places(self) -> pa.Array:
        if self._indices is None:
            self._indices = pa.array(self.rows, mask=None if self.there.all() else ~self.there)
        return self._indices


def picked(values: npt.NDArray[Any], rows: Ints) -> npt.NDArray[Any]:
    """Values of rows; 0 where there is none."""
    if not len(values):
        return np.zeros(rows.shape, dtype=values.dtype)
    found = values[rows]
    found[rows < 0] = 0
    return found


def nullable(values: npt.NDArray[Any], there: Flags, kind: pa.DataType) -> pa.Array:
    mask = None if there.all() else ~there
    array = pa.array(values, mask=mask)
    return array if array.type == kind else array.cast(kind)


def int_array(column: pa.Array) -> Ints:
    """Numbers or microseconds; 0 for null."""
    column = column.cast(pa.int64()) if column.type != pa.int64() else column
    filled = column.fill_null(0) if column.null_count else column
    found: Ints = filled.to_numpy(zero_copy_only=False)
    return found


def float_array(column: pa.Array) -> Floats:
    """NaN for null."""
    found: Floats = column.to_numpy(zero_copy_only=False)
    return found


def present(column: pa.Array) -> Flags:
    found: Flags = pc.is_valid(column).to_numpy(zero_copy_only=False)
    return found


def instants(micros: Ints, there: Flags | None = None) -> pa.Array:
    return nullable(micros, np.ones(len(micros), dtype=bool) if there is None else there, INSTANT)


def seconds_between(start: Ints, end: Ints) -> Floats:
    return (end - start) / 1_000_000
