"""D2: a build that extends another says what a build from all events says, however they come."""

import random
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from benchmarks._pipeline.synthetic import slices
from tests.fold.running import tables_of
from tests.pipeline.lakes import DAY, HOUR
from tests.pipeline.test_build import HereEngine, Rows, counted, looked, published
from tests.pipeline.test_fold import tables_in
from umbel.fold import buckets
from umbel.history.housekeeping import compact, expire
from umbel.history.lake import Lake
from umbel.pipeline import io, plan
from umbel.pipeline.build import anything_new, build
from umbel.pipeline.io import look_into

FILES = 6
DAY_S = 86_400.0


@pytest.fixture(scope="module")
def events() -> pa.Table:
    return pa.concat_tables(tables_in(seed=13))


@pytest.fixture(scope="module")
def expected(events: pa.Table) -> Rows:
    return counted(tables_of([events], buckets=1))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that a small lake reaches: segments are sealed, touched, put together; metrics have files."""
    monkeypatch.setattr("umbel.fold.buckets.BUCKET_EVENTS", 400)
    monkeypatch.setattr(buckets, "SEGMENT_EVENTS", 40)
    monkeypatch.setattr(buckets, "SLICE_US", 50_000)
    monkeypatch.setattr(buckets, "HOT_EVENTS", 200)
    monkeypatch.setattr(plan, "TIERS", ((0, 150, 3), (150, 400, 2)))
    monkeypatch.setattr(plan, "RECENT_MAX", 4)
    monkeypatch.setattr(plan, "CHUNK_SAMPLES", 20)
    monkeypatch.setattr("umbel.pipeline.tables.OTHERS_MAX", 3)
    monkeypatch.setattr("umbel.pipeline.build.FEW_EVENTS", 10**9)


def arriving(lake: Path, events: pa.Table, seed: int, *, by_time: bool) -> Iterator[None]:
    """The events in files, one after the other: in any order, or about that of their recording."""
    chance = random.Random(seed)
    rows = list(range(events.num_rows))
    chance.shuffle(rows)
    if by_time:
        at = events.column("recorded_at").cast(pa.int64()).to_pylist()
        rows.sort(key=lambda row: at[row] + chance.choice((0, 0, 0, 40_000_000)))
    rows += chance.choices(rows, k=100)
    size = -(-len(rows) // FILES)
    (lake / HOUR).mkdir(parents=True)
    for number in range(FILES):
        part = events.take(pa.array(rows[number * size : (number + 1) * size]))
        pq.write_table(part, lake / HOUR / f"ev-test-1-{number:03}.parquet")
        yield


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("by_time", [True, False])
def test_increments_say_what_one_build_says(
    tmp_path: Path, events: pa.Table, expected: Rows, by_time: bool
) -> None:
    for _ in arriving(tmp_path, events, seed=1, by_time=by_time):
        build(HereEngine(), tmp_path, looked(tmp_path))
    assert published(tmp_path) == expected
    state = io.newest_state(tmp_path)
    assert state is not None and state.hot is not None
    assert len(state.segments) >= 2


@pytest.mark.usefixtures("small")
def test_an_increment_folds_what_got_events_and_keeps_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D2: files of segments without news are named again, not written again."""
    monkeypatch.setattr(plan, "RECENT_MAX", 10**9)
    old, new = pa.concat_tables(slices(3000)), pa.concat_tables(slices(200, seed=9))
    (tmp_path / HOUR).mkdir(parents=True)
    pq.write_table(old, tmp_path / HOUR / "ev-test-1-000.parquet")
    first = build(HereEngine(), tmp_path, looked(tmp_path))
    late = old.filter(pc.is_valid(old.column("uuid"))).slice(0, 1)
    pq.write_table(pa.concat_tables([new, late]), tmp_path / HOUR / "ev-test-1-001.parquet")
    engine = HereEngine()
    second = build(engine, tmp_path, looked(tmp_path))
    assert engine.steps == ["deal", "fold", "join"]
    kept = set(first.tables["timeline"]) & set(second.tables["timeline"])
    rewritten = {"nodes", "hot", "the segment of the late event"}
    assert len(kept) == len(first.tables["timeline"]) - len(rewritten) > 10
    assert published(tmp_path) == counted(tables_of([old, new, late], buckets=1))


@pytest.mark.usefixtures("small")
def test_a_lake_that_is_built_as_it_grows_is_read_by_time(tmp_path: Path) -> None:
    """D4: readers leave files out by their statistics; those of the first quarter are the fewer half."""
    told = pa.concat_tables(slices(3000)).sort_by("recorded_at")
    (tmp_path / HOUR).mkdir(parents=True)
    for number in range(6):
        pq.write_table(told.slice(number * 500, 500), tmp_path / HOUR / f"ev-test-1-{number:03}.parquet")
        build(HereEngine(), tmp_path, looked(tmp_path))
    built = io.newest_manifest(tmp_path)
    assert built is not None
    quarter = told.column("recorded_at")[750].as_py()
    for name, column in (("timeline", "recorded_at"), ("attempts", "ended_at"), ("tasks", "state_at")):
        files = [pq.ParquetFile(tmp_path / "tables" / file).metadata for file in built.tables[name]]
        first = [one.row_group(0).column(one.schema.names.index(column)).statistics.min for one in files]
        assert len(files) > 20
        assert 0 < sum(one is None or one <= quarter for one in first) < len(files) / 2, name


def test_what_housekeeping_wrote_anew_is_known(tmp_path: Path, events: pa.Table) -> None:
    """D2: hours put together are no news; a day that was dropped is built without, from all events."""
    lake = Lake(tmp_path)
    half = events.num_rows // 2
    for number, (day, part) in enumerate([("14", events.slice(0, half)), ("15", events.slice(half))]):
        folder = tmp_path / HOUR.replace(DAY, f"2026-11-{day}")
        folder.mkdir(parents=True)
        pq.write_table(part, folder / f"ev-test-1-{number:03}.parquet")
    build(HereEngine(), tmp_path, look_into(lake.store, lake.event_files()))
    noon = datetime(2026, 11, 15, 12, tzinfo=UTC).timestamp()
    compact(lake, now=noon, grace_s=0)
    compact(lake, now=noon + DAY_S, grace_s=0)
    assert not lake.raw_files()
    assert not anything_new(tmp_path, look_into(lake.store, lake.event_files()))
    engine = HereEngine()
    build(engine, tmp_path, look_into(lake.store, lake.event_files()))
    assert engine.steps == ["join"]
    assert published(tmp_path) == counted(tables_of([events], buckets=1))
    expire(lake, 1, now=noon + DAY_S)
    build(engine, tmp_path, look_into(lake.store, lake.event_files()))
    assert engine.steps[1:] == ["fold", "fold", "join"]
    assert published(tmp_path) == counted(tables_of([events.slice(half)], buckets=1))


def test_a_file_of_the_state_that_is_gone_or_damaged_is_made_again(
    tmp_path: Path, events: pa.Table, expected: Rows
) -> None:
    (tmp_path / HOUR).mkdir(parents=True)
    half = events.num_rows * 3 // 4
    pq.write_table(events.slice(0, half), tmp_path / HOUR / "ev-test-1-000.parquet")
    build(HereEngine(), tmp_path, looked(tmp_path))
    state = io.newest_state(tmp_path)
    assert state is not None
    for name in sorted(state.names())[:3]:
        (tmp_path / "tables" / name).unlink()
    (tmp_path / "tables" / state.every()[0].index).unlink(missing_ok=True)
    pq.write_table(events.slice(half), tmp_path / HOUR / "ev-test-1-001.parquet")
    build(HereEngine(), tmp_path, looked(tmp_path))
    assert published(tmp_path) == expected


def test_other_tables_are_built_from_all_events(tmp_path: Path, events: pa.Table, expected: Rows) -> None:
    (tmp_path / HOUR).mkdir(parents=True)
    pq.write_table(events, tmp_path / HOUR / "ev-test-1-000.parquet")
    build(HereEngine(), tmp_path, looked(tmp_path), only=["tasks"])
    engine = HereEngine()
    build(engine, tmp_path, looked(tmp_path))
    assert engine.steps[0] == "deal" and published(tmp_path) == expected
