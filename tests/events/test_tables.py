"""D2: the tables of the pipeline, as data."""

import pytest

from umbel.events.tables import TABLES, Table
from umbel.events.view import TaskRecord


def test_the_tables_are_those_of_the_design() -> None:
    assert list(TABLES) == ["tasks", "attempts", "timeline", "workers", "elections", "metrics", "anomalies"]


def test_a_tasks_row_has_the_fields_of_the_view() -> None:
    fields = ["task_id", *(name for name in TaskRecord.__struct_fields__[1:] if name != "partial")]
    assert TaskRecord.__struct_fields__[0] == TABLES["tasks"].columns[0].was == "uuid"
    assert list(TABLES["tasks"].names) == [*fields, "wait_s", "run_s"]


@pytest.mark.parametrize("table", TABLES.values(), ids=lambda table: table.name)
def test_every_column_is_named_once_and_explained(table: Table) -> None:
    assert len(set(table.names)) == len(table.columns)
    assert set(table.key) <= set(table.names)
    assert all(column.doc for column in table.columns)
