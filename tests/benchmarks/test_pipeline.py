"""The benchmark's lake is one that a cluster could tell, and its DuckDB query says what the fold says."""

import json
import subprocess
import sys
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest

from benchmarks._harness.benchmark import ROOT
from benchmarks._pipeline.duckdb_tasks import write_tasks
from benchmarks._pipeline.synthetic import LATER, SCHEMA, write_lake
from benchmarks.pipeline import TARGETS
from tests.events.histories import ORDER_DEPENDENT_IN_CELERY
from tests.history.test_story import write_file
from umbel.events.merge import Registers, put
from umbel.events.types import TaskEvent
from umbel.events.view import EventReader, TaskRecord, view
from umbel.history.lake import event_schema
from umbel.history.story import as_wire

COMPARED = [
    name for name in TaskRecord.__struct_fields__ if name not in {"uuid", "extra", "partial", "signum"}
]


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lake")
    write_lake(folder, 3000)
    return folder


def rows(sql: str) -> list[dict[str, object]]:
    connection = duckdb.connect(":memory:")
    try:
        connection.execute("set TimeZone='UTC'")
        result = connection.execute(sql)
        names = [one[0] for one in result.description or []]
        return [dict(zip(names, row, strict=True)) for row in result.fetchall()]
    finally:
        connection.close()


def events_of(files: list[Path]) -> list[TaskEvent]:
    """Read back without recomputing digests: the synthetic ones are no digests of anything."""
    reader = EventReader()
    listed = ", ".join(f"'{path}'" for path in files)
    found = rows(f"select * from read_parquet([{listed}], hive_partitioning=false)")
    told = {row["digest"]: row for row in found}.values()
    return [one for row in told if isinstance(one := reader.read(as_wire(row)), TaskEvent)]


def assert_tasks_are_those_of_the_fold(files: list[Path], target: Path) -> None:
    write_tasks(files, target)
    known: dict[str, Registers] = {}
    for event in events_of(files):
        put(known.setdefault(event.uuid, Registers(event.uuid)), event)
    found = {str(row["task_id"]): row for row in rows(f"select * from '{target}'")}
    assert found.keys() == known.keys()
    for uuid, registers in known.items():
        record = view(registers)
        for name in COMPARED:
            value = found[uuid][name]
            expected = getattr(record, name)
            if name.endswith("_at") and value is not None:
                value = round(value.timestamp(), 6)  # type: ignore[attr-defined]
            assert value == expected, (uuid, name)


def test_the_lake_has_the_columns_of_the_recorder() -> None:
    assert SCHEMA.equals(event_schema().remove_metadata())


def test_the_lake_is_one_that_a_cluster_could_tell(lake: Path) -> None:
    files = sorted((lake / "events").rglob("*.parquet"))
    [found] = rows(
        f"""select count(*) as events, count(distinct digest) as different, count(distinct uuid) as tasks,
        count(*) filter (slot is null) as beats, count(distinct uuid) filter (retries = 1) as again
        from read_parquet({[str(path) for path in files]!r})"""
    )
    events, tasks = int(str(found["events"])), int(str(found["tasks"]))
    assert 2900 < events < 3200
    assert 4.0 < (events - int(str(found["beats"]))) / tasks < 4.6
    assert 0.002 < 1 - int(str(found["different"])) / events < 0.02
    assert 0.03 < int(str(found["again"])) / tasks < 0.1


def test_nodes_count_their_events_without_gaps(lake: Path) -> None:
    files = [str(path) for path in sorted((lake / "events").rglob("*.parquet"))]
    for row in rows(
        f"""select hostname, count(distinct seq) as n, min(seq) as least, max(seq) as most
        from read_parquet({files!r}) group by hostname, pid, inc"""
    ):
        assert (row["least"], row["most"]) == (1, row["n"])


def test_what_comes_later_is_the_end_of_the_same_lake(tmp_path: Path) -> None:
    """Some of it is of tasks that were begun before, some of it new."""
    lake, cut = tmp_path / "whole", tmp_path / "cut"
    count, held_back = write_lake(lake, 30_000), write_lake(cut, 22_000, later=8000)
    files = sorted((cut / "events").rglob("*.parquet"))
    parts = [pa.parquet.ParquetFile(path).read() for path in (*files, cut / LATER)]
    whole = [pa.parquet.ParquetFile(path).read() for path in sorted((lake / "events").rglob("*.parquet"))]
    assert pa.concat_tables(parts).equals(pa.concat_tables(whole))
    assert (held_back, parts[-1].num_rows) == (count - 8000, 8000)
    before, after = (set(one["uuid"].to_pylist()) for one in (pa.concat_tables(parts[:-1]), parts[-1]))
    assert before & after and after - before


def test_the_same_seed_gives_the_same_lake(lake: Path, tmp_path: Path) -> None:
    write_lake(tmp_path, 3000)
    assert [pa.parquet.read_table(path) for path in sorted(tmp_path.rglob("*.parquet"))] == [
        pa.parquet.read_table(path) for path in sorted((lake / "events").rglob("*.parquet"))
    ]


def test_duckdb_says_of_the_lake_what_the_fold_says(lake: Path, tmp_path: Path) -> None:
    files = sorted((lake / "events").rglob("*.parquet"))
    assert_tasks_are_those_of_the_fold(files, tmp_path / "tasks.parquet")


def test_duckdb_says_of_awkward_histories_what_the_fold_says(tmp_path: Path) -> None:
    wire = [
        event | {"uuid": f"{number}-{event['uuid']}"}
        for number, (history, _) in enumerate(ORDER_DEPENDENT_IN_CELERY.values())
        for event in reversed(history)
    ]
    assert_tasks_are_those_of_the_fold([write_file(tmp_path / "a.parquet", wire)], tmp_path / "tasks.parquet")


def test_it_runs_from_end_to_end() -> None:
    """Without Spark, which the pipeline's own tests start."""
    arguments = ["--json", "--millions", "1", "--scale", "0.002", "--steps", "duckdb", "local", "recorder"]
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "pipeline.py", *arguments],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed["sizes"][0]["duckdb"]["events_per_s"] > 0
    assert printed["sizes"][0]["local"]["events"] == printed["sizes"][0]["duckdb"]["events"]
    assert printed["recorder"]["events_per_s"] > 0
    assert printed["worker"]["events"] > 0
    assert set(printed["targets"]) == TARGETS.keys()
