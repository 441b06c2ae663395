"""D2: what a build has to do, from names of files and counts alone."""

import msgspec

from umbel.fold import bucket_file, others_file
from umbel.fold.buckets import BUCKET_EVENTS
from umbel.pipeline import plan as plans
from umbel.pipeline.plan import (
    Chunk,
    Counted,
    Measure,
    Plan,
    Samples,
    Segment,
    chunked,
    measures,
    merges,
    planned,
    shared,
)

A, B = "/lake/co-1-000000", "/lake/co-2-000000"
PLAN = Plan("/t", "/t/b", ["tasks"])
ROWS = {
    bucket_file(A, 0, 2): 10,
    bucket_file(A, 1, 2): 20,
    others_file(A): 5,
    bucket_file(B, 3, 4): 7,
    "/lake/ev-r-1-000001.parquet": 3,
}


def test_groups_that_are_whole_are_read_by_bucket_and_the_rest_is_dealt_out() -> None:
    found = planned(PLAN, ROWS, {A: 35, B: 7})
    assert (found.count, found.loose) == (4, [["/lake/ev-r-1-000001.parquet"]])
    assert found.sources(0) == [(bucket_file(A, 0, 2), 2)]
    assert found.sources(3) == [(bucket_file(A, 1, 2), 2), (bucket_file(B, 3, 4), 4)]
    assert found.others() == [others_file(A)]


def test_a_group_that_lacks_rows_or_marks_is_dealt_out() -> None:
    found = planned(PLAN, ROWS, {A: 36})
    assert (found.count, found.groups, len(found.loose[0])) == (1, [], 5)


def test_files_are_shared_out_with_their_neighbours() -> None:
    assert shared({"a": 5, "b": 5, "c": 1, "d": 20, "e": 0}, 10) == [["a", "b"], ["c"], ["d"], ["e"]]
    assert shared({"a": 50}, 10) == [["a"]]
    assert shared({}, 10) == []


def test_metrics_are_made_of_whole_minutes_and_only_those_that_changed() -> None:
    most = plans.CHUNK_SAMPLES
    chunks = chunked([], {60: most - 1, 120: 1, 300: 1})
    assert chunks == [Chunk(60, 120, most), Chunk(300, 300, 1)]
    samples = [Samples("x", 60, 300), Samples("y", 120, 120)]
    assert measures(chunks, samples) == [Measure(["x", "y"], 60, 120), Measure(["x"], 300, 300)]
    there = Counted("m", 4)
    kept = [msgspec.structs.replace(one, file=there) for one in chunks]
    later = chunked(kept, {0: 2, 180: 0, 360: 5, 420: 1})
    assert later == [Chunk(0, 180, most + 2), Chunk(300, 420, 7)]
    assert chunked(kept, {360: 5}) == [kept[0], Chunk(300, 360, 6)]
    assert measures(kept, samples) == []


def segment(rows: int, last_us: int) -> Segment:
    return Segment([Counted("e", rows)], f"{rows}-{last_us}", last_us)


def test_small_old_segments_are_put_together_the_oldest_first() -> None:
    (_, small, many), (_, middle, some) = plans.TIERS
    old = [segment(small - 1, at) for at in range(many + 1)]
    recent = [segment(small - 1, 1000 + at) for at in range(many)]
    large = [segment(middle, at) for at in range(20)]
    found = list(merges([*reversed(old), *recent, *large], horizon_us=1100, recent_us=200, events_max=10**9))
    assert found == [old[:many]]
    assert list(merges([segment(small, at) for at in range(some)], 1100, 200, 10**9)) != []
    assert list(merges(recent * 20, 1100, 200, 10**9)) != [], "too many that are recent"


def test_no_more_is_put_together_at_once_than_pays_for_what_is_new() -> None:
    (_, small, many), _ = plans.TIERS
    old = [segment(small - 1, at) for at in range(5 * many)]
    of_each = (small - 1) * many
    for events_max, groups in ((1, 1), (of_each, 1), (of_each + 1, 2), (10 * of_each, 5)):
        assert len(list(merges(old, 1100, 200, events_max))) == groups


def test_what_is_put_together_is_no_larger_than_a_bucket_and_buckets_stay() -> None:
    """Else the first increment folds all of a lake again."""
    assert all(below * count <= BUCKET_EVENTS for _, below, count in plans.TIERS)
    buckets = [segment(BUCKET_EVENTS // 2, at) for at in range(64)]
    assert list(merges(buckets, 1100, 200, 10**9)) == []
