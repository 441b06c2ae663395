"""D2, L6: Spark says of every task what the memory of a monitor says, however events come.

Hundreds of histories go into one job: Spark's cost is in the job, not in the rows. Each history has
task ids of its own.
"""

import json
import os
import random
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from pyspark.sql import DataFrame, SparkSession

from tests.events.histories import histories
from tests.events.oracle import view_of
from tests.fold.reading import shaken, stories_of
from tests.pipeline.lakes import Wire, read, table_of
from tests.pipeline.oracle import attempts_of, task_times
from tests.pipeline.transforms.attempts import attempts
from tests.pipeline.transforms.schemas import EVENTS, SCHEMAS, STATES
from tests.pipeline.transforms.states import merged, states_of
from tests.pipeline.transforms.tasks import tasks
from tests.pipeline.transforms.timeline import timeline as timeline_table
from umbel.events.merge import registers_of, timeline
from umbel.events.tables import TABLES, to_json
from umbel.events.types import Event
from umbel.events.view import TaskRecord, view

HISTORIES = 5000 if os.environ.get("UMBEL_SOAK") else 120
COLUMNS = [name for name in TABLES["tasks"].names if name not in {"wait_s", "run_s"}]
"""What a monitor's memory knows of a task too."""


def frame(spark: SparkSession, events: Iterable[Event]) -> DataFrame:
    return spark.createDataFrame(table_of(events), EVENTS)


def told_apart(many_histories: list[list[Wire]]) -> list[Wire]:
    """The events of all histories, with each history's task ids made its own."""
    return [
        told | ({"uuid": f"{number}-{told['uuid']}"} if "uuid" in told else {})
        for number, history in enumerate(many_histories)
        for told in history
    ]


def random_histories(count: int) -> list[Wire]:
    """Histories as Hypothesis makes them, collected instead of run one by one."""
    found: list[list[Wire]] = []

    @settings(
        max_examples=count, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    @given(histories())
    def collect(history: list[Wire]) -> None:
        found.append(history)

    collect()
    return told_apart(found)


def expected(record: TaskRecord) -> dict[str, Any]:
    """A record of memory as a row of the table."""

    def told(name: str) -> Any:
        value = getattr(record, "uuid" if name == "task_id" else name)
        if value is not None and name.endswith("_at"):
            return datetime.fromtimestamp(value, UTC).replace(tzinfo=None)
        if value is not None and name in {"extra", "signum"}:
            return to_json(value).decode()
        return value

    return {name: told(name) for name in COLUMNS}


def rows_by_task(table: DataFrame) -> dict[str, dict[str, Any]]:
    rows = [row.asDict() for row in table.collect()]
    assert len({row["task_id"] for row in rows}) == len(rows), "a task has one row"
    return {row["task_id"]: {name: row[name] for name in COLUMNS} for row in rows}


@pytest.fixture(scope="module")
def events() -> list[Event]:
    return read(random_histories(HISTORIES))


def test_spark_says_what_memory_says(spark: SparkSession, events: list[Event]) -> None:
    """D2: batch = memory, and both = the table of the contract, under repetition and any order."""
    stories = stories_of(events)
    memory = {uuid: expected(view(registers_of(uuid, story))) for uuid, story in stories.items()}
    contract = {uuid: expected(view_of(timeline(story))) for uuid, story in stories.items()}
    assert memory == contract
    table = tasks(states_of(frame(spark, shaken(events, 1)))).persist()
    assert rows_by_task(table) == memory
    assert len(memory) > HISTORIES
    times = {row["task_id"]: {"wait_s": row["wait_s"], "run_s": row["run_s"]} for row in table.collect()}
    assert times == {uuid: task_times(story) for uuid, story in stories.items()}
    table.unpersist()


def test_any_split_joins_to_the_same(spark: SparkSession, events: list[Event]) -> None:
    """D2: the merge of partial states, of batches that overlap, is the state of all."""
    chance = random.Random(2)
    batches: list[list[Event]] = [[] for _ in range(4)]
    for event in shaken(events, 2):
        batches[chance.randrange(4)].append(event)
    parts = [states_of(frame(spark, batch)) for batch in batches]
    assert parts[0].schema.simpleString() == STATES.simpleString()
    every = parts[0].unionByName(parts[1]).unionByName(parts[2]).unionByName(parts[3])
    memory = {uuid: expected(view(registers_of(uuid, story))) for uuid, story in stories_of(events).items()}
    assert rows_by_task(tasks(merged(every))) == memory


def test_attempts_are_what_the_rules_say(spark: SparkSession, events: list[Event]) -> None:
    """D2: a row for each attempt that was told of, with every column, said or read from the receipt."""
    table = attempts(states_of(frame(spark, shaken(events, 3))))
    assert [field.name for field in table.schema] == SCHEMAS["attempts"].names
    rows = [row.asDict() for row in table.collect()]
    found = {(row.pop("task_id"), row.pop("attempt")): row for row in rows}
    assert len(found) == len(rows)
    stories = stories_of(events)
    rules = {
        (uuid, number): {name: instant(name, value) for name, value in row.items()}
        for uuid, story in stories.items()
        for number, row in attempts_of(story).items()
    }
    assert found == rules
    for uuid, story in stories.items():
        record = view(registers_of(uuid, story))
        mine = [row for (one, _), row in found.items() if one == uuid]
        assert sum(row["n_deliveries"] for row in mine) == record.n_deliveries
        assert sum(row["n_terminal"] for row in mine) == record.n_terminal


def instant(name: str, value: Any) -> Any:
    """Microseconds as Spark hands them over."""
    is_time = name.endswith("_at") and value is not None
    return (
        datetime.fromtimestamp(0, UTC).replace(tzinfo=None) + timedelta(microseconds=value)
        if is_time
        else value
    )


def test_the_timeline_is_the_one_of_memory(spark: SparkSession, events: list[Event]) -> None:
    """D2: every event once, in the order of the merge."""
    table = timeline_table(frame(spark, shaken(events, 4)))
    told: dict[str, list[tuple[int, str, int]]] = {}
    for row in table.collect():
        if row["task_id"] is not None:
            told.setdefault(row["task_id"], []).append((row["rank"], row["type"], row["clock"]))
    memory = {
        uuid: [(rank, one.type_name, one.clock) for rank, one in enumerate(timeline(story), start=1)]
        for uuid, story in stories_of(events).items()
    }
    assert {uuid: sorted(rows) for uuid, rows in told.items()} == memory


def test_json_columns_hold_json(spark: SparkSession, events: list[Event]) -> None:
    rows = tasks(states_of(frame(spark, events))).select("extra", "signum").collect()
    texts = [text for row in rows for text in row if text is not None]
    assert texts and all(json.loads(text) is not None for text in texts)
