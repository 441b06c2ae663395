"""Small files put together, old days dropped, and nobody who reads notices (D1)."""

import os
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from tests.history.recording import Teller, rows_of
from umbel.brokers.interface import LoggedEvent
from umbel.errors import LakeError
from umbel.history.arrow import parquet
from umbel.history.housekeeping import GRACE_S, compact, expire
from umbel.history.lake import Lake, write_file
from umbel.history.rows import Rows

HOUR_S, DAY_S = 3600.0, 86_400.0
NOON = datetime(2026, 11, 15, 12, tzinfo=UTC).timestamp()


def add_file(lake: Lake, at: float, number: int, *, count: int = 3) -> Path:
    rows = Rows("sqlite")
    rows.add(LoggedEvent(place, at, key, body) for place, (key, body) in enumerate(Teller().tell(count)))
    path = lake.hour_folder(at) / f"ev-r-1-{number:06}.parquet"
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
    return Counter(row["digest"] for row in rows_of(lake.root, "digest"))


def test_the_files_of_a_past_hour_become_one_and_every_row_is_there(lake: Lake) -> None:
    before = contents(lake)
    report = compact(lake, now=NOON)
    assert (len(report.written), len(report.replaced), report.removed) == (1, 3, [])
    assert len(lake.event_files()) == 4
    assert contents(lake) == before
    assert len(lake.raw_files()) == 6  # a reader may still be at them
    assert compact(lake, now=NOON + 60).written == []


def test_what_was_replaced_goes_later(lake: Lake) -> None:
    before = contents(lake)
    replaced = compact(lake, now=NOON).replaced
    assert compact(lake, now=NOON + GRACE_S + 1).removed == replaced
    assert contents(lake) == before
    assert not any((lake.root / name).exists() for name in replaced)


def test_what_the_stream_has_not_taken_stays(lake: Lake) -> None:
    replaced = compact(lake, now=NOON).replaced
    lake.stream.mkdir()
    later = NOON + GRACE_S + 1
    assert compact(lake, now=later).removed == []
    write_file(lake.stream / "_passed.json", msgspec.json.encode({"files": replaced[:1]}))
    assert compact(lake, now=later + 1).removed == replaced[:1]


def test_a_crash_at_any_moment_of_it_shows_every_event_once(lake: Lake) -> None:
    before = contents(lake)
    report = compact(lake, now=NOON)
    lake.manifests.joinpath("000001.json").unlink()  # it died before it published
    assert contents(lake) == before
    assert compact(lake, now=NOON).written != report.written
    for name in report.replaced[:1]:  # it died while it deleted
        (lake.root / name).unlink()
    assert contents(lake) == before


def test_old_days_are_dropped_whole(lake: Lake) -> None:
    for number in (7, 8):
        add_file(lake, NOON - 5 * DAY_S, number)
    add_file(lake, NOON - 9 * DAY_S, 9)
    compact(lake, now=NOON)
    report = expire(lake, 4, now=NOON)
    assert report.dropped_days == ["2026-11-06", "2026-11-10"]
    assert {path.name for path in lake.events.iterdir()} == {"dt=2026-11-15"}
    assert len(contents(lake)) == 18
    assert expire(lake, 4, now=NOON).dropped_days == []


def test_a_day_that_the_stream_has_not_taken_stays(lake: Lake) -> None:
    old = add_file(lake, NOON - 9 * DAY_S, 9)
    lake.stream.mkdir()
    assert expire(lake, 4, now=NOON).kept_days == ["2026-11-06"]
    write_file(lake.stream / "_passed.json", msgspec.json.encode({"files": [lake.name_of(old)]}))
    assert expire(lake, 4, now=NOON).dropped_days == ["2026-11-06"]


def test_a_file_that_cannot_be_read_is_set_aside_and_named(lake: Lake) -> None:
    broken = lake.raw_files()[1]
    os.truncate(broken, broken.stat().st_size // 2)
    report = compact(lake, now=NOON)
    assert report.set_aside == [f"quarantine/{lake.name_of(broken).replace('/', '__')}"]
    assert (lake.root / report.set_aside[0]).exists()
    assert len(report.replaced) == 2
    assert len(contents(lake)) == 15


def test_a_file_of_something_else_is_set_aside_and_named(lake: Lake) -> None:
    """Its rows would be events of no type in the file that replaces it."""
    foreign = lake.raw_files()[1]
    parquet().write_table(parquet().read_table(foreign).select(["name", "pid"]), foreign)
    report = compact(lake, now=NOON)
    assert report.set_aside == [f"quarantine/{lake.name_of(foreign).replace('/', '__')}"]
    assert len(report.replaced) == 2


def test_a_file_of_a_newer_version_is_left_as_it_is(lake: Lake) -> None:
    newer = lake.raw_files()[1]
    table = parquet().read_table(newer)
    parquet().write_table(table.append_column("since_later", table["digest"]), newer)
    report = compact(lake, now=NOON)
    assert lake.name_of(newer) not in report.replaced
    assert newer in lake.event_files()


def test_an_empty_lake_is_no_trouble(tmp_path: Path) -> None:
    lake = Lake(tmp_path / "lake")
    assert compact(lake).written == []
    assert expire(lake, 1).dropped_days == []
    assert (lake.event_files(), lake.size().files) == ([], 0)


def test_a_manifest_that_cannot_be_read_is_named(lake: Lake) -> None:
    compact(lake, now=NOON)
    (lake.manifests / "000001.json").write_text("{")
    with pytest.raises(LakeError, match=r"000001\.json"):
        lake.event_files()


def test_two_at_once_are_refused(lake: Lake) -> None:
    with lake.locked("_housekeeping", "housekeeping"), pytest.raises(LakeError, match="already using"):
        compact(lake, now=NOON)
