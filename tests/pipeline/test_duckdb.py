"""D4: what Spark writes, DuckDB reads; and the query that Spark is measured beside says what Spark says."""

from pathlib import Path

import duckdb
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from benchmarks._pipeline.duckdb_tasks import write_tasks
from benchmarks._pipeline.synthetic import write_lake
from umbel.history.query import read
from umbel.pipeline import io
from umbel.pipeline.engines import SparkEngine
from umbel.pipeline.files import look_into
from umbel.pipeline.jobs.build import build
from umbel.pipeline.transforms.states import states_of
from umbel.pipeline.transforms.tasks import tasks

EVENTS = 4000


def test_tasks_are_the_same_by_spark_and_by_duckdb(spark: SparkSession, tmp_path: Path) -> None:
    write_lake(tmp_path, EVENTS)
    files = sorted((tmp_path / "events").rglob("*.parquet"))
    write_tasks(files, tmp_path / "duckdb.parquet")
    io.write(tasks(states_of(io.read_events(spark, files))), tmp_path / "spark")
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
    found = look_into(sorted((tmp_path / "events").rglob("*.parquet")))
    manifest = build(SparkEngine(spark), tmp_path, found, only=["tasks"])
    answer = read(tmp_path, lambda tables: tables.ask("select state, state_at from tasks"))
    assert len(answer.rows) == manifest.tasks > 0
    assert answer.types == ("VARCHAR", "TIMESTAMP WITH TIME ZONE")


def test_columns_that_differ_from_row_to_row_get_no_dictionary(spark: SparkSession, tmp_path: Path) -> None:
    io.write(
        spark.range(100).selectExpr("'a' as task_id", "'a' as state", "1.0D as run_s"), tmp_path / "some"
    )
    [first, *_] = io.files_in(tmp_path / "some")
    group = pq.read_metadata(first).row_group(0)
    assert [group.column(place).has_dictionary_page for place in range(3)] == [False, True, False]
