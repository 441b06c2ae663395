"""D2: how Spark does it, read from its plans, and that schemas are the ones promised."""

import re
from pathlib import Path

import pytest
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession

from umbel.events.columns import COLUMNS
from umbel.events.tables import TABLES
from umbel.events.types import VOCABULARY
from umbel.pipeline.engines import answers
from umbel.pipeline.jobs.joining import Parts, parts_of
from umbel.pipeline.schemas import EVENTS, MARKS, PAYLOADS, SCHEMAS, STATES
from umbel.pipeline.transforms.anomalies import anomalies
from umbel.pipeline.transforms.attempts import attempts
from umbel.pipeline.transforms.elections import elections
from umbel.pipeline.transforms.marks import merged_marks
from umbel.pipeline.transforms.metrics import metrics
from umbel.pipeline.transforms.states import merged
from umbel.pipeline.transforms.tasks import tasks
from umbel.pipeline.transforms.timeline import timeline
from umbel.pipeline.transforms.workers import workers


@pytest.fixture(scope="module")
def parts(spark: SparkSession) -> Parts:
    return parts_of(spark.createDataFrame([], EVENTS))


@pytest.fixture(scope="module")
def tables(parts: Parts) -> dict[str, DataFrame]:
    made = {"tasks": tasks(parts.states), "attempts": attempts(parts.states)}
    made |= {"timeline": timeline(parts.events), "elections": elections(parts.others)}
    made |= {"workers": workers(parts.others, parts.marks), "metrics": metrics(made["attempts"])}
    rest = (made["workers"], made["elections"], parts.others, parts.marks)
    return made | {"anomalies": anomalies(made["tasks"], made["attempts"], *rest)}


def plan_of(frame: DataFrame) -> str:
    return str(frame._jdf.queryExecution().executedPlan().toString())


def nodes_of(frame: DataFrame) -> list[str]:
    """The plan's nodes by name, from the top."""
    return re.findall(r"^[\s:|+\-*()\d]*([A-Z]\w+)", plan_of(frame), re.MULTILINE)


@pytest.mark.parametrize("step", ["deal", "fold", "join"])
def test_a_build_has_no_exchange_and_python_gets_no_rows(spark: SparkSession, step: str) -> None:
    """D2: what goes to Python and comes back is a row for each job, whatever is in the lake."""
    nodes = nodes_of(answers(spark, step, Path("plan.json"), 64))
    assert [node for node in nodes if node not in {"Project", "WholeStageCodegen"}] == ["MapInArrow", "Range"]


@pytest.mark.parametrize("table", ["tasks", "attempts"])
def test_one_exchange_and_no_python(tables: dict[str, DataFrame], table: str) -> None:
    """D2: one shuffle from events to each of `tasks` and `attempts`, and nothing per row in Python."""
    nodes = nodes_of(tables[table])
    assert nodes.count("Exchange") == 1, nodes
    assert not [node for node in nodes if "Python" in node or "Pandas" in node or "Arrow" in node]


def test_both_come_from_kept_states_without_another_exchange(parts: Parts) -> None:
    """D2: as a build makes them."""
    kept = parts.states.persist(StorageLevel.DISK_ONLY)
    try:
        for table in (tasks(kept), attempts(kept)):
            outside, scan, _inside = plan_of(table).partition("InMemoryTableScan")
            assert scan and "Exchange" not in outside, outside
    finally:
        kept.unpersist()


def test_tasks_sorts_once(tables: dict[str, DataFrame]) -> None:
    """The attempts lie sorted by task, so the task is merged without another sort."""
    nodes = nodes_of(tables["tasks"])
    assert nodes.count("Sort") == 1 and nodes.count("SortAggregate") == 2, nodes


def test_a_second_exchange_would_be_seen(parts: Parts) -> None:
    """The check itself: dealing out by attempt as well costs more exchanges, and it says so."""
    assert nodes_of(tasks(parts.states.repartition("uuid", "retries"))).count("Exchange") > 1


@pytest.mark.parametrize("table", TABLES)
def test_no_table_needs_python(tables: dict[str, DataFrame], table: str) -> None:
    assert "Python" not in plan_of(tables[table])


@pytest.mark.parametrize("table", TABLES)
def test_each_table_has_its_schema(tables: dict[str, DataFrame], table: str) -> None:
    assert tables[table].schema.simpleString() == SCHEMAS[table].simpleString()


def test_partial_states_have_their_schemas(parts: Parts) -> None:
    assert parts.states.schema.simpleString() == STATES.simpleString()
    assert merged(parts.states).schema.simpleString() == STATES.simpleString()
    assert parts.marks.schema.simpleString() == MARKS.simpleString()
    assert merged_marks(parts.marks).schema.simpleString() == MARKS.simpleString()


def test_the_lakes_schema_is_that_of_its_columns() -> None:
    assert EVENTS.names == [column.name for column in COLUMNS]
    assert {name for fields in VOCABULARY.values() for name in fields} <= set(EVENTS.names)


def test_every_field_of_a_task_event_is_in_its_register() -> None:
    for type_name, fields in VOCABULARY.items():
        slot = type_name.removeprefix("task-")
        if slot in PAYLOADS:
            kept = {*PAYLOADS[slot], "hostname", "pid", "clock", "timestamp", "retries", "uuid"}
            assert set(fields) - kept == {"utcoffset", "inc", "seq"}
