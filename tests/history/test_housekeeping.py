"""Small files put together, old days dropped, and nobody who reads notices (D1)."""

import os
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest

from tests.history.recording import Teller, paths_of, rows_of
from umbel.brokers.interface import LoggedEvent
from umbel.errors import LakeError
from umbel.fold import buckets, marks_file, place_of
from umbel.fold.buckets import bucket_of
from umbel.fold.senders import marks_of
from umbel.history.dealing import read_marks
from umbel.history.housekeeping import GRACE_S, HousekeepingBacklog, backlog_of, compact, expire
from umbel.history.lake import COMPACTED, EVENTS, Compacted, Lake, hour_folder, parquet
from umbel.history.rows import Rows
from umbel.stores.interface import MANIFESTS

HOUR_S, DAY_S = 3600.0, 86_400.0
NOON = datetime(2026, 11, 15, 12, tzinfo=UTC).timestamp()


def root_of(lake: Lake) -> Path:
    return Path(lake.store.where)


def add_file(lake: Lake, at: float, number: int, *, count: int = 3) -> Path:
    rows = Rows("sqlite")
    rows.add(LoggedEvent(place, at, key, body) for place, (key, body) in enumerate(Teller().tell(count)))
    path = root_of(lake) / EVENTS / hour_folder(at) / f"ev-r-1-{number:06}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet().write_table(rows.table(), path)
    return path


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    """Three files of an hour that has passed, one alone in another, two of this hour."""
    lake = Lake(tmp_path / "lake")
    for number in range(3):
        add_file(lake, NOON - 2 * HOUR_S, number)
    add_file(lake, NOON - 3 * HOUR_S, 3)
    for number in (4, 5):
        add_file(lake, NOON, number)
    return lake


def contents(lake: Lake) -> Counter[int]:
    return Counter(row["digest"] for row in rows_of(root_of(lake), "digest"))


def test_the_files_of_a_past_hour_become_one_and_every_row_is_there(lake: Lake) -> None:
    before = contents(lake)
    assert backlog_of(lake, now=NOON) == HousekeepingBacklog(files=4, days=0, replaced=0)
    report = compact(lake, now=NOON)
    assert [place_of(name) is not None for name in report.written] == [True, True]
    assert (len(report.replaced), report.removed) == (4, [])
    assert backlog_of(lake, now=NOON) == HousekeepingBacklog(files=0, days=0, replaced=4)
    assert len(lake.event_files()) == 4
    assert contents(lake) == before
    assert len(lake.raw_files()) == 6  # a reader may still be at them
    assert compact(lake, now=NOON + 60).written == []


def test_the_hours_of_a_past_day_become_one(lake: Lake) -> None:
    before = contents(lake)
    hours = compact(lake, now=NOON).written
    tomorrow = NOON + DAY_S
    report = compact(lake, now=tomorrow)
    assert [name.rsplit("/", 1)[0] for name in report.written] == ["compacted/dt=2026-11-15"] * 2
    assert set(report.replaced) > set(hours)
    assert (contents(lake), len(lake.event_files())) == (before, 1)
    assert set(compact(lake, now=tomorrow + GRACE_S + 1).removed) >= set(hours)
    assert contents(lake) == before
    [group] = {place.group for name in lake.event_files() if (place := place_of(name))}
    marks = [name for name in lake.store.names("compacted") if name.endswith("-marks.parquet")]
    assert marks == [marks_file(group)]
    found = read_marks(lake.store, group)
    whole = marks_of(lake_table(lake))
    assert found is not None
    assert (found[0].runs.to_pylist(), found[1]) == (whole.runs.to_pylist(), 18)


def lake_table(lake: Lake) -> pa.Table:
    return pa.concat_tables([parquet().ParquetFile(path).read() for path in paths_of(lake)])


def test_more_events_get_more_buckets_and_older_days_follow(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D2: a file says by its name for how many buckets it was made, and has those tasks only."""
    before = contents(lake)
    tomorrow = NOON + DAY_S
    compact(lake, now=tomorrow)
    assert counts(lake) == {1}
    monkeypatch.setattr(buckets, "BUCKET_EVENTS", 10)
    assert compact(lake, now=tomorrow).written == []  # twice as many are no reason yet
    monkeypatch.setattr(buckets, "BUCKET_EVENTS", 1)
    assert backlog_of(lake, now=tomorrow).days == 0  # which can only be said with the number of buckets
    compact(lake, now=tomorrow)
    assert counts(lake) == {32}
    assert contents(lake) == before
    for path in paths_of(lake):
        place = place_of(path.name)
        assert place is not None
        ids = parquet().read_table(path, columns=["uuid"], partitioning=None)["uuid"].combine_chunks()
        assert place.bucket is None or set(bucket_of(ids, 32)) == {place.bucket}


def counts(lake: Lake) -> set[int]:
    places = [place_of(name) for name in lake.event_files()]
    return {place.count for place in places if place is not None and place.count}


def test_a_lake_of_an_earlier_version_is_moved_over(lake: Lake) -> None:
    """What was put together without buckets is dealt out, and then goes."""
    before = contents(lake)
    raw = lake.raw_files()[:3]
    together = f"compacted/{hour_folder(NOON - 3 * HOUR_S)}/co-1794700800000000-000000.parquet"
    path = root_of(lake) / together
    path.parent.mkdir(parents=True)
    parquet().write_table(
        pa.concat_tables([parquet().ParquetFile(root_of(lake) / name).read() for name in raw]), path
    )
    lake.publish_compacted(Compacted([together], raw, dict.fromkeys(raw, NOON - DAY_S)))
    assert contents(lake) == before
    assert backlog_of(lake, now=NOON).files == 2
    report = compact(lake, now=NOON)
    assert together in report.replaced
    assert contents(lake) == before
    assert together in compact(lake, now=NOON + GRACE_S + 1).removed
    assert contents(lake) == before
    assert not path.exists()


def test_it_stops_when_it_is_told_to_and_what_is_done_counts(lake: Lake) -> None:
    before = contents(lake)
    asked = iter([False, False, True])
    report = compact(lake, now=NOON, stopped=lambda: next(asked, True))
    assert (len(report.written), contents(lake)) == (1, before)
    assert not list(root_of(lake).rglob(".co-*"))
    assert len(compact(lake, now=NOON).written) == 1
    assert contents(lake) == before


def test_what_was_replaced_goes_later(lake: Lake) -> None:
    before = contents(lake)
    replaced = compact(lake, now=NOON).replaced
    assert compact(lake, now=NOON + GRACE_S + 1).removed == replaced
    assert contents(lake) == before
    assert not any((root_of(lake) / name).exists() for name in replaced)


def test_a_crash_at_any_moment_of_it_shows_every_event_once(lake: Lake) -> None:
    before = contents(lake)
    report = compact(lake, now=NOON)
    for path in (root_of(lake) / COMPACTED / MANIFESTS).iterdir():  # it died before it published
        path.unlink()
    assert contents(lake) == before
    assert compact(lake, now=NOON).written != report.written
    for name in report.replaced[:1]:  # it died while it deleted
        (root_of(lake) / name).unlink()
    assert contents(lake) == before


def test_old_days_are_dropped_whole(lake: Lake) -> None:
    for number in (7, 8):
        add_file(lake, NOON - 5 * DAY_S, number)
    add_file(lake, NOON - 9 * DAY_S, 9)
    compact(lake, now=NOON)
    report = expire(lake, 4, now=NOON)
    assert report.dropped_days == ["2026-11-06", "2026-11-10"]
    assert {path.name for path in (root_of(lake) / EVENTS).iterdir()} == {"dt=2026-11-15"}
    assert len(contents(lake)) == 18
    assert expire(lake, 4, now=NOON).dropped_days == []


def test_what_others_put_into_a_day_outlives_it(lake: Lake) -> None:
    add_file(lake, NOON - 9 * DAY_S, 9)
    compact(lake, now=NOON)
    foreign = root_of(lake) / EVENTS / "dt=2026-11-06" / "notes.txt"
    foreign.parent.mkdir(parents=True, exist_ok=True)
    foreign.write_text("why it was so slow that day")
    assert expire(lake, 4, now=NOON).dropped_days == ["2026-11-06"]
    assert foreign.exists()
    assert len(contents(lake)) == 18


def test_a_file_that_cannot_be_read_is_set_aside_and_named(lake: Lake) -> None:
    broken = lake.raw_files()[1]
    path = root_of(lake) / broken
    os.truncate(path, path.stat().st_size // 2)
    report = compact(lake, now=NOON)
    assert report.set_aside == [f"quarantine/{broken.replace('/', '__')}"]
    assert (root_of(lake) / report.set_aside[0]).exists()
    assert len(report.replaced) == 3
    assert len(contents(lake)) == 15


def test_a_file_of_something_else_is_set_aside_and_named(lake: Lake) -> None:
    """Its rows would be events of no type in the file that replaces it."""
    foreign = lake.raw_files()[1]
    path = root_of(lake) / foreign
    parquet().write_table(parquet().read_table(path).select(["name", "pid"]), path)
    report = compact(lake, now=NOON)
    assert report.set_aside == [f"quarantine/{foreign.replace('/', '__')}"]
    assert len(report.replaced) == 3


def test_a_file_of_a_newer_version_is_left_as_it_is(lake: Lake) -> None:
    newer = lake.raw_files()[1]
    path = root_of(lake) / newer
    table = parquet().read_table(path)
    parquet().write_table(table.append_column("since_later", table["digest"]), path)
    report = compact(lake, now=NOON)
    assert newer not in report.replaced
    assert newer in lake.event_files()


def test_an_empty_lake_is_no_trouble(tmp_path: Path) -> None:
    lake = Lake(tmp_path / "lake")
    assert compact(lake).written == []
    assert expire(lake, 1).dropped_days == []
    assert (lake.event_files(), lake.size().files) == ([], 0)


def test_a_manifest_that_cannot_be_read_is_named(lake: Lake) -> None:
    compact(lake, now=NOON)
    (root_of(lake) / COMPACTED / MANIFESTS / "000002.json").write_text("{")
    with pytest.raises(LakeError, match=r"000002\.json"):
        lake.event_files()


def test_two_at_once_are_refused(lake: Lake) -> None:
    with lake.locked("_housekeeping", "housekeeping"), pytest.raises(LakeError, match="already using"):
        compact(lake, now=NOON)
