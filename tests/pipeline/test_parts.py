"""Files that jobs read: what is left out of one, or of what is read of it, is null and changes nothing."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from tests.pipeline.lakes import read as read_wire
from tests.pipeline.lakes import rows_of
from umbel.fold.columns import EVENTS, by_difference
from umbel.pipeline.engines import KEEPS_MEMORY, LocalEngine
from umbel.pipeline.parts import event_batches, write_part
from umbel.stores.local import store_at

WIRE = [
    {"type": "task-received", "uuid": f"t{number}", "hostname": "w1@box", "clock": number, "pid": 7,
     "timestamp": 1_700_000_000.0 + number, "utcoffset": 0, "name": "shop.add", "retries": None}
    for number in range(50)
]  # fmt: skip
"""Of half of the columns no event of a task has anything."""


def events() -> pa.Table:
    return pa.Table.from_pylist(rows_of(read_wire(WIRE)), schema=EVENTS)


@pytest.mark.parametrize("statistics", [True, False, ["timestamp"]], ids=["of all", "of none", "of one"])
@pytest.mark.parametrize("rows", [7, 1000])
def test_columns_that_are_null_need_not_be_read(
    tmp_path: Path, statistics: bool | list[str], rows: int
) -> None:
    """D2: whatever a file says of its columns, its events are all read, and are the same."""
    given = events()
    assert sum(given.column(name).null_count == len(given) for name in EVENTS.names) > 20
    pq.write_table(given, tmp_path / "all.parquet", write_statistics=statistics, row_group_size=rows)
    some = [name for name in EVENTS.names if given.column(name).null_count < len(given)]
    pq.write_table(given.select(some), tmp_path / "some.parquet", write_statistics=statistics)
    store = store_at(tmp_path)
    for name in ("all.parquet", "some.parquet"):
        assert pa.concat_tables(event_batches(store, name)).combine_chunks() == given
        asked = pa.concat_tables(event_batches(store, name, ["uuid", "clock"]))
        assert asked.combine_chunks() == given.select(["uuid", "clock"])


def test_events_with_nothing_but_what_is_needed_are_counted(tmp_path: Path) -> None:
    nothing = pa.table([pa.nulls(3, field.type) for field in EVENTS], schema=EVENTS)
    pq.write_table(nothing, tmp_path / "nothing.parquet")
    assert pa.concat_tables(event_batches(store_at(tmp_path), "nothing.parquet")) == nothing


def test_what_is_written_by_difference_is_read_as_it_was(tmp_path: Path) -> None:
    given = events()
    assert {"clock", "timestamp", "recorded_at"} < by_difference(EVENTS).keys()
    written = write_part(store_at(tmp_path), given, "here")
    assert pq.read_table(tmp_path / written.file).cast(EVENTS) == given
    used = {
        one.path_in_schema: one.encodings
        for place in range(len(EVENTS))
        for one in [pq.read_metadata(tmp_path / written.file).row_group(0).column(place)]
    }
    assert "DELTA_BINARY_PACKED" in used["clock"] and "DELTA_BINARY_PACKED" not in used["digest"]


def test_processes_that_do_jobs_keep_the_memory_that_they_free(spark: SparkSession) -> None:
    """D2: on Spark by the settings of the session; on this machine by how they are started."""
    told = dict(spark.sparkContext.getConf().getAll())
    assert {name: told[f"spark.executorEnv.{name}"] for name in KEEPS_MEMORY} == dict(KEEPS_MEMORY)
    with LocalEngine() as engine:
        engine._processes = 2
        engine.run("check", "", 2)
        process = engine._idle.get()._process
        found = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
    assert {f"{name}={value}".encode() for name, value in KEEPS_MEMORY.items()} <= set(found)
