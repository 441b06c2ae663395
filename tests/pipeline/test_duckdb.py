"""The query that Spark is measured beside says what Spark says, row by row and column by column."""

from pathlib import Path

import duckdb
from pyspark.sql import SparkSession

from benchmarks._pipeline.duckdb_tasks import write_tasks
from benchmarks._pipeline.synthetic import write_lake
from umbel.pipeline import io
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
