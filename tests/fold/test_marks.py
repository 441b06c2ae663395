"""D1: which numbers are missing, however the lake is cut into parts."""

from itertools import pairwise

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fold.reading import EXAMPLES, rows_of
from umbel.fold.columns import EVENTS
from umbel.fold.senders import RANGE, SEQ_MAX, Marks, gaps, marks_of, merged

SEQS = st.one_of(
    st.none(),
    st.integers(-1, 12),
    st.sampled_from([RANGE - 1, RANGE, RANGE + 1, 3 * RANGE, SEQ_MAX, SEQ_MAX + 1]),
)
TOLD = st.lists(
    st.fixed_dictionaries(
        {
            "hostname": st.sampled_from([None, "a@h", "b@h"]),
            "pid": st.sampled_from([1, 2]),
            "inc": st.sampled_from([None, 5, 6]),
            "seq": SEQS,
            "timestamp": st.integers(0, 4),
            "recorded_at": st.integers(2, 3),
        }
    ),
    max_size=25,
)
Told = dict[str, int | str | None]


def marked(told: list[Told]) -> Marks:
    return marks_of(pa.Table.from_pylist(told, schema=EVENTS))


def plain(marks: Marks) -> list[list[tuple[object, ...]]]:
    tables = (marks.senders, marks.runs, marks.nodes(), gaps(marks))
    return [sorted((tuple(row.values()) for row in rows_of(table)), key=repr) for table in tables]


def expected_gaps(told: list[Told]) -> list[tuple[object, ...]]:
    """Number by number; a gap's time is the first of the range of numbers in which it ends."""
    seen: dict[tuple[object, ...], set[int]] = {}
    times: dict[tuple[object, ...], list[int]] = {}
    for one in told:
        seq, sender = one["seq"], (one["hostname"], one["pid"], one["inc"])
        if one["inc"] is not None and isinstance(seq, int) and 0 <= seq <= SEQ_MAX:
            seen.setdefault(sender, set()).add(seq)
            at = one["timestamp"]
            times.setdefault((*sender, seq // RANGE), []).extend([at] if isinstance(at, int) and at else [])
    return [
        (*sender, min(times[*sender, after // RANGE], default=None), before + 1, after - before - 1)
        for sender, numbers in seen.items()
        for before, after in pairwise(sorted(numbers))
        if after > before + 1
    ]


@settings(max_examples=EXAMPLES, deadline=None)
@given(TOLD, st.integers(0, 25), st.integers(0, 25))
def test_any_parts_join_to_the_same_and_gaps_are_what_is_missing(
    told: list[Told], one: int, other: int
) -> None:
    whole = marked(told)
    parts = [told[:one], told[min(one, other) : max(one, other)], told[other:], told[one:], told[:other]]
    assert plain(merged(marked(part) for part in parts)) == plain(whole)
    assert plain(whole)[3] == sorted(expected_gaps(told), key=repr)


def test_numbers_in_a_row_are_one_run() -> None:
    told: list[Told] = [
        {"hostname": "a@h", "pid": 1, "inc": 5, "seq": seq, "timestamp": 1, "recorded_at": 1}
        for seq in range(3 * RANGE)
    ]
    assert marked(told[::-1]).runs.num_rows == 1


@settings(max_examples=EXAMPLES, deadline=None)
@given(TOLD)
def test_a_file_holds_marks_as_they_are(told: list[Told]) -> None:
    marks = marked(told)
    assert plain(Marks.of_table(marks.as_table())) == plain(marks)
    assert Marks.of_table(marks.as_table()).runs.schema == marks.runs.schema
