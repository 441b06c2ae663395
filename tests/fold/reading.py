"""Tables of the kernel as plain rows, and events as the kernel gets them."""

import os
import random
from collections.abc import Iterable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tests.pipeline.lakes import table_of
from umbel.events.tables import TABLES
from umbel.events.types import Event, TaskEvent

Row = dict[str, Any]
EXAMPLES = 500 if os.environ.get("UMBEL_SOAK") else 50
"""A fold of a few events takes as long as one of thousands."""


def of_tasks(events: Iterable[Event]) -> pa.Table:
    """As they lie in the lake, in this order."""
    return table_of(one for one in events if isinstance(one, TaskEvent))


def stories_of(events: Iterable[Event]) -> dict[str, list[TaskEvent]]:
    stories: dict[str, list[TaskEvent]] = {}
    for event in events:
        if isinstance(event, TaskEvent):
            stories.setdefault(event.uuid, []).append(event)
    return stories


def shaken(events: list[Event], seed: int) -> list[Event]:
    """In another order, many of them twice."""
    chance = random.Random(seed)
    doubled = [*events, *chance.choices(events, k=len(events) // 3)] if events else []
    chance.shuffle(doubled)
    return doubled


def rows_of(table: pa.Table) -> list[Row]:
    """Instants in microseconds."""
    plain = [
        column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column for column in table.columns
    ]
    rows: list[Row] = pa.table(plain, names=table.column_names).to_pylist()
    return rows


def by_key(name: str, table: pa.Table) -> dict[tuple[Any, ...], Row]:
    """Rows of one of the tables by what tells them apart."""
    rows = rows_of(table)
    found = {tuple(row[column] for column in TABLES[name].key): row for row in rows}
    assert len(found) == len(rows), f"two rows of {name} have the same key"
    return found


def holes(table: pa.Table) -> list[str]:
    """Columns that are never to be null, and are."""
    return [
        field.name
        for field, column in zip(table.schema, table.columns, strict=True)
        if not field.nullable and pc.sum(pc.is_null(column)).as_py()
    ]
