"""D2: a build from files says what the fold of all events says, however they lie, and publishes only what
was told."""

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import PySparkException

from tests.fold.reading import rows_of
from tests.fold.running import tables_of
from tests.history.recording import paths_of
from tests.pipeline.lakes import HOUR, read, table_of
from tests.pipeline.test_fold import tables_in
from tests.pipeline.test_tables import task
from umbel.events.tables import TABLES
from umbel.fold.columns import SCHEMAS
from umbel.history.housekeeping import compact
from umbel.history.lake import Lake
from umbel.pipeline import BuildFailed, NoSpark, UnreadFile, engines, folding, io, plan
from umbel.pipeline.build import build
from umbel.pipeline.engines import LocalEngine, checked_answers
from umbel.pipeline.folding import Answer, work
from umbel.pipeline.io import look_into
from umbel.stores.interface import Where
from umbel.stores.local import store_at

Rows = dict[str, Counter[tuple[Any, ...]]]


class HereEngine:
    """Every job in this process, and where it is asked for several times, of which one counts."""

    def __init__(self, tries: int = 1) -> None:
        self.steps: list[str] = []
        self._tries = tries

    def run(self, step: str, plan: str, count: int) -> Sequence[Answer]:
        self.steps.append(step)
        answers = [[work(step, plan, number) for number in range(count)] for _ in range(self._tries)]
        chance = random.Random(count)
        chosen = [chance.choice(answers)[number] for number in range(count)]
        return checked_answers([msgspec.json.decode(one, type=Answer) for one in chosen])


def recorded(lake: Path, parts: Sequence[pa.Table]) -> None:
    (lake / HOUR).mkdir(parents=True)
    for number, part in enumerate(parts):
        pq.write_table(part, lake / HOUR / f"ev-test-1-{number:03}.parquet")


def published(lake: Where) -> Rows:
    store, manifest = store_at(lake), io.newest_manifest(lake)
    assert manifest is not None
    found = {
        name: pa.concat_tables(
            [pq.read_table(store.open(f"tables/{one}"), partitioning=None) for one in files]
        )
        for name, files in manifest.tables.items()
    }
    assert {name: table.num_rows for name, table in found.items()} == manifest.rows
    assert all(table.schema == SCHEMAS[name] for name, table in found.items())
    return counted(found)


def counted(tables: Any) -> Rows:
    return {name: Counter(tuple(row.items()) for row in rows_of(table)) for name, table in tables.items()}


def looked(lake: Path) -> Any:
    return look_into(lake, Lake(lake).raw_files())


@pytest.fixture(scope="module")
def parts() -> list[pa.Table]:
    return tables_in(seed=11)


@pytest.fixture(scope="module")
def expected(parts: list[pa.Table]) -> Rows:
    return counted(tables_of(parts, buckets=1))


def test_processes_of_this_machine_make_every_table(
    tmp_path: Path,
    parts: list[pa.Table],
    expected: Rows,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("umbel.fold.buckets.BUCKET_EVENTS", 500)
    monkeypatch.setattr(plan, "DEAL_EVENTS", 500)
    recorded(tmp_path, parts)
    with LocalEngine() as engine:
        manifest = build(engine, tmp_path, looked(tmp_path))
    assert published(tmp_path) == expected
    assert (list(manifest.tables), manifest.events) == (list(TABLES), sum(one.num_rows for one in parts))
    assert not (tmp_path / "tables" / manifest.build / "scratch").exists()


def test_a_job_that_ran_twice_adds_nothing(
    tmp_path: Path, parts: list[pa.Table], expected: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D2: Spark tries again what failed, and runs twice what is slow."""
    monkeypatch.setattr("umbel.fold.buckets.BUCKET_EVENTS", 300)
    recorded(tmp_path, parts)
    manifest = build(HereEngine(tries=3), tmp_path, looked(tmp_path))
    assert published(tmp_path) == expected
    files = {str(path.relative_to(tmp_path / "tables")) for path in (tmp_path / "tables").rglob("part-*")}
    state = io.newest_state(tmp_path)
    assert state is not None
    assert files == {name for names in manifest.tables.values() for name in names} | state.names()


def test_a_lake_that_is_written_by_bucket_is_not_dealt_out_again(
    tmp_path: Path, parts: list[pa.Table], expected: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D2: whether its files were made for as many buckets as there are now, or for fewer; what was recorded
    since is dealt out beside them."""
    recorded(tmp_path, parts[:2])
    monkeypatch.setattr("umbel.fold.buckets.BUCKET_EVENTS", 300)
    lake = Lake(tmp_path)
    compact(lake)
    engine = HereEngine()
    build(engine, tmp_path, look_into(lake.store, lake.event_files()))
    assert "deal" not in engine.steps
    assert published(tmp_path) == counted(tables_of(parts[:2], buckets=1))
    pq.write_table(parts[2], tmp_path / HOUR / "ev-test-2-000.parquet")
    monkeypatch.setattr("umbel.fold.buckets.BUCKET_EVENTS", 70)
    engine = HereEngine()
    build(engine, tmp_path, look_into(lake.store, lake.event_files()), afresh=True)
    assert engine.steps[0] == "deal"
    assert published(tmp_path) == expected


def test_a_group_that_lacks_a_file_is_dealt_out_with_marks_of_what_is_there(
    tmp_path: Path, parts: list[pa.Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    """D1: or the numbers of its events would count as recorded."""
    recorded(tmp_path, parts)
    monkeypatch.setattr("umbel.fold.buckets.BUCKET_EVENTS", 300)
    lake = Lake(tmp_path)
    compact(lake)
    lake.set_aside(next(name for name in lake.event_files() if "-b" in name.rpartition("/")[2]))
    rest = [pq.read_table(path, partitioning=None) for path in paths_of(lake)]
    build(HereEngine(), tmp_path, look_into(lake.store, lake.event_files()))
    assert published(tmp_path) == counted(tables_of(rest, buckets=1))


def test_more_than_fits_is_folded_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D2: also the events of a single task, which are in one bucket whatever the number of buckets."""
    crowd = [
        one
        for number in range(300)
        for one in task(
            "crowded", ("received", number % 7, number % 50), ("odd", 9, number), retries=number % 3
        )
    ]
    crowd += task("crowded", ("received", 1, 1), ("succeeded", 2, 9))  # these name no attempt
    tables = [table_of(read(crowd)), *tables_in(seed=3)]
    tables.append(tables[0].slice(0, 200))
    monkeypatch.setattr(folding, "EVENTS_AT_ONCE", 150)
    monkeypatch.setattr(folding, "LARGE_TASK", 40)
    monkeypatch.setattr("umbel.pipeline.parts.ROWS_AT_ONCE", 100)
    recorded(tmp_path, tables)
    build(HereEngine(), tmp_path, looked(tmp_path))
    assert published(tmp_path) == counted(tables_of(tables, buckets=1))


def test_only_the_tables_that_were_asked_for_are_there(
    tmp_path: Path, parts: list[pa.Table], expected: Rows
) -> None:
    recorded(tmp_path, parts)
    build(HereEngine(), tmp_path, looked(tmp_path), only=["metrics", "workers"])
    assert published(tmp_path) == {name: expected[name] for name in ("workers", "metrics")}


def test_what_a_job_could_not_do_is_said_by_name() -> None:
    with pytest.raises(UnreadFile, match="/lake/x cannot be read: cut off; move it away"):
        checked_answers([Answer(unread="/lake/x", why="cut off")])
    with pytest.raises(BuildFailed, match="/lake/y: No space left"):
        checked_answers([Answer(), Answer(failed="/lake/y", why="No space left on device")])


def test_a_process_that_dies_ends_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("umbel.pipeline.engines.sys.executable", "false")
    recorded(tmp_path, [table_of(read(task("t", ("sent", 0, 0))))])
    monkeypatch.setattr("umbel.fold.buckets.BUCKET_EVENTS", 0)
    monkeypatch.setattr(plan, "BUCKETS_MAX", 2)
    failing = pytest.raises(BuildFailed, match=r"nothing was published: a process .* status 1")
    with LocalEngine() as engine, failing:
        build(engine, tmp_path, looked(tmp_path))
    assert io.newest_number(tmp_path) == 0


class _Told:
    """What Spark hands over, or says."""

    def __init__(self, told: Answer | str) -> None:
        self._told = told

    def collect(self) -> list[dict[str, str]]:
        if isinstance(self._told, str):
            raise PySparkException(self._told)
        return [{"told": msgspec.json.encode(self._told).decode()}]


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (
            "Job aborted\n  ModuleNotFoundError: No module named 'pyarrow'\n at x",
            r"No module named 'pyarrow'",
        ),
        ('Cannot run program "python9": error=2', r"Cannot run program .python9"),
        (Answer(failed="/lake/plan.json", why="No such file"), "do not see the lake .*same path on every"),
    ],
)
def test_executors_that_cannot_do_jobs_are_said_to_in_one_line(
    told: Answer | str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D3: before they are given any, with how to ship what they lack."""
    steps: list[str] = []

    def answers(_spark: object, step: str, *_: object) -> _Told:
        steps.append(step)
        return _Told(told)

    monkeypatch.setattr(engines, "answers", answers)
    nothing: Any = None
    with pytest.raises(NoSpark, match=said) as raised:
        engines.SparkEngine(nothing).run("fold", "/lake/plan.json", 4)
    assert len(str(raised.value).splitlines()) == 1
    assert steps == (["check", "fold"] if isinstance(told, Answer) else ["check"])
    assert isinstance(told, Answer) or "pip install 'umbel[history]'" in str(raised.value)
