"""D2: how Spark does it, read from its plans, and that schemas are the ones promised."""

import re

import pytest
from pyspark.sql import DataFrame, SparkSession

from benchmarks._pipeline.registers import PAYLOADS
from tests.pipeline.transforms.anomalies import anomalies
from tests.pipeline.transforms.attempts import attempts
from tests.pipeline.transforms.elections import elections
from tests.pipeline.transforms.marks import merged_marks
from tests.pipeline.transforms.metrics import metrics
from tests.pipeline.transforms.parts import Parts, parts_of
from tests.pipeline.transforms.schemas import EVENTS, MARKS, SCHEMAS, STATES
from tests.pipeline.transforms.states import merged
from tests.pipeline.transforms.tasks import tasks
from tests.pipeline.transforms.timeline import timeline
from tests.pipeline.transforms.workers import workers
from umbel.events.tables import COLUMNS, TABLES
from umbel.events.types import VOCABULARY
from umbel.pipeline.engines import answers


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


def nodes_of(frame: DataFrame) -> list[str]:
    """The plan's nodes by name, from the top."""
    plan = str(frame._jdf.queryExecution().executedPlan().toString())
    return re.findall(r"^[\s:|+\-*()\d]*([A-Z]\w+)", plan, re.MULTILINE)


@pytest.mark.parametrize("step", ["deal", "fold", "join"])
def test_a_build_has_no_exchange_and_python_gets_no_rows(spark: SparkSession, step: str) -> None:
    """D2: what goes to Python and comes back is a row for each job, whatever is in the lake."""
    nodes = nodes_of(answers(spark, step, "plan.json", 64))
    assert [node for node in nodes if node not in {"Project", "WholeStageCodegen"}] == ["MapInArrow", "Range"]


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
