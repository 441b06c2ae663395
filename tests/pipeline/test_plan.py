"""D2: what a build has to do, from names of files and counts alone."""

from umbel.fold.names import bucket_file, others_file
from umbel.pipeline import plan as plans
from umbel.pipeline.plan import Counted, Folded, Judge, Measure, Samples, joins_of, planned, shared

A, B = "/lake/co-1-000000", "/lake/co-2-000000"
ROWS = {
    bucket_file(A, 0, 2): 10,
    bucket_file(A, 1, 2): 20,
    others_file(A): 5,
    bucket_file(B, 3, 4): 7,
    "/lake/ev-r-1-000001.parquet": 3,
}


def test_groups_that_are_whole_are_read_by_bucket_and_the_rest_is_dealt_out() -> None:
    found = planned("/t", ["tasks"], ROWS, {A: 35, B: 7})
    assert (found.count, found.loose) == (4, [["/lake/ev-r-1-000001.parquet"]])
    assert found.sources(0) == [(bucket_file(A, 0, 2), 2)]
    assert found.sources(3) == [(bucket_file(A, 1, 2), 2), (bucket_file(B, 3, 4), 4)]
    assert found.others() == [others_file(A)]


def test_a_group_that_lacks_rows_or_marks_is_dealt_out() -> None:
    found = planned("/t", ["tasks"], ROWS, {A: 36})
    assert (found.count, found.groups, len(found.loose[0])) == (1, [], 5)


def test_files_are_shared_out_with_their_neighbours() -> None:
    assert shared({"a": 5, "b": 5, "c": 1, "d": 20, "e": 0}, 10) == [["a", "b"], ["c"], ["d"], ["e"]]
    assert shared({"a": 50}, 10) == [["a"]]
    assert shared({}, 10) == []


def test_metrics_are_made_of_whole_minutes() -> None:
    most = plans.MEASURE_SAMPLES
    many = Samples("x", [60, 120, 300], [most - 1, 1, 1])
    few = Samples("y", [120], [1])
    folded = [Folded(samples=[many], suspects=[Counted("s", 4)]), Folded(samples=[few])]
    assert joins_of(folded, ["metrics", "anomalies"]) == [
        Measure(["x"], 60, 60),
        Measure(["x", "y"], 120, 300),
        Judge(["s"]),
    ]
    assert joins_of(folded, ["tasks"]) == []
