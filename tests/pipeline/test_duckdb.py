"""D4: what Spark writes, DuckDB reads; and the query that Spark is measured beside says what Spark says."""

from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from benchmarks._pipeline.duckdb_tasks import write_tasks
from benchmarks._pipeline.synthetic import write_lake
from tests.docs.blocks import DOCS, blocks_of
from tests.pipeline.transforms import schemas
from tests.pipeline.transforms.states import states_of
from tests.pipeline.transforms.tasks import tasks
from umbel.history.lake import Lake
from umbel.history.query import read
from umbel.pipeline.build import build
from umbel.pipeline.engines import LocalEngine, SparkEngine
from umbel.pipeline.io import look_into
from umbel.pipeline.parts import write_part
from umbel.stores.local import store_at

EVENTS = 4000


def test_tasks_are_the_same_by_spark_and_by_duckdb(spark: SparkSession, tmp_path: Path) -> None:
    write_lake(tmp_path, EVENTS)
    files = sorted((tmp_path / "events").rglob("*.parquet"))
    write_tasks(files, tmp_path / "duckdb.parquet")
    events = spark.read.schema(schemas.EVENTS).parquet(*map(str, files))
    tasks(states_of(events)).write.parquet(str(tmp_path / "spark"))
    connection = duckdb.connect(":memory:")
    try:
        connection.execute("set TimeZone='UTC'")
        ours = f"read_parquet('{tmp_path / 'spark'}/*.parquet')"
        peers = f"read_parquet('{tmp_path / 'duckdb.parquet'}')"
        [(count,)] = connection.execute(f"select count(*) from {ours}").fetchall()
        assert count > EVENTS / 5
        for one, other in ((ours, peers), (peers, ours)):
            missing = connection.execute(f"select * from {one} except all select * from {other}").fetchall()
            assert missing == []
    finally:
        connection.close()


def test_what_a_build_publishes_is_read_without_spark(spark: SparkSession, tmp_path: Path) -> None:
    write_lake(tmp_path, EVENTS)
    found = look_into(tmp_path, Lake(tmp_path).raw_files())
    manifest = build(SparkEngine(spark), tmp_path, found, only=["tasks"])
    answer = read(tmp_path, lambda tables: tables.ask("select state, state_at from tasks"))
    assert len(answer.rows) == manifest.tasks > 0
    assert answer.types == ("VARCHAR", "TIMESTAMP WITH TIME ZONE")


def test_other_tools_find_the_newest_build_by_a_name_that_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the recipes say, after a second build as after the first."""
    sql, code = [block for block in blocks_of(DOCS / "history-recipes.md") if "current.json" in block.text]
    lake = tmp_path / "umbel-lake"
    monkeypatch.chdir(tmp_path)
    for events in (EVENTS, 2 * EVENTS):
        write_lake(lake, events)
        with LocalEngine() as engine:
            manifest = build(engine, lake, look_into(lake, Lake(lake).raw_files()))
        with duckdb.connect(":memory:") as connection:
            counted = connection.execute(sql.text).fetchall()
        assert sum(row[1] for row in counted) == manifest.rows["attempts"]
        exec(code.text, {})
        assert capsys.readouterr().out == f"{manifest.tasks} tasks, built at {manifest.built_at}\n"


def test_columns_that_differ_from_row_to_row_get_no_dictionary(tmp_path: Path) -> None:
    table = pa.table({"task_id": ["a"] * 100, "state": ["a"] * 100})
    written = write_part(store_at(tmp_path), table, "x")
    group = pq.read_metadata(tmp_path / written.file).row_group(0)
    assert [group.column(place).has_dictionary_page for place in range(2)] == [False, True]
