"""D2: a task that does not fit into memory has the rows that it would have."""

from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.events.histories import Wire, event, histories
from tests.fold.reading import EXAMPLES, of_tasks, rows_of, shaken
from tests.pipeline.lakes import read
from umbel.fold import registers
from umbel.fold.kernel import fold_bucket
from umbel.fold.registers import BINS, Keys, bin_sizes, large_tasks, reduced, shared_out, within


@settings(max_examples=EXAMPLES, deadline=None)
@given(histories(), st.integers(0, 2**16))
def test_tasks_and_attempts_rest_on_what_is_kept(history: list[Wire], seed: int) -> None:
    """D2: also where parts are reduced first, in any order."""
    events = shaken(read(history), seed)
    cut = seed % (len(events) + 1)
    table = of_tasks(events)
    kept = reduced(pa.concat_tables([reduced(of_tasks(events[:cut])), of_tasks(events[cut:])]))
    assert kept.num_rows <= table.num_rows
    whole, less = fold_bucket(table), fold_bucket(kept)
    for name in ("tasks", "attempts"):
        assert sorted(map(repr, rows_of(getattr(less, name)))) == sorted(
            map(repr, rows_of(getattr(whole, name)))
        )


def test_few_are_kept_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each type and attempt, the earliest, and what is counted, up to a limit."""
    monkeypatch.setattr(registers, "ENDINGS_MAX", 5)
    started = [event("started", retries=0, clock=clock, timestamp=100.0 - clock) for clock in range(1, 50)]
    received = [event("received", retries=0, clock=clock, timestamp=float(clock)) for clock in range(1, 50)]
    kept = reduced(of_tasks(read([*started, *received, *received[:9]])))
    told = [(row["slot"], row["clock"]) for row in rows_of(kept)]
    assert [one for one in told if one[0] == "started"] == [("started", 49)]
    clocks = {clock for slot, clock in told if slot == "received"}
    assert {1, 49} <= clocks
    assert 5 <= len(clocks) <= 7
    assert len(told) == 1 + len(clocks)


KEYS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=40)


@given(KEYS, st.integers(1, 6))
def test_stretches_of_the_order_have_every_event_once(told: list[tuple[int, int, int]], most: int) -> None:
    keys = Keys(*(np.array(column) for column in zip(*told, strict=True)))
    cuts = [None, *keys.cuts(most), None]
    stretches = [np.flatnonzero(keys.between(start, end)).tolist() for start, end in pairwise(cuts)]
    assert sorted(row for rows in stretches for row in rows) == list(range(len(told)))
    in_order = [sorted(told[row] for row in rows) for rows in stretches]
    assert [key for keys in in_order for key in keys] == sorted(told)
    for rows in in_order:
        assert len(rows) < 2 * most + max(map(told.count, told)), "equal keys alone make a stretch longer"


def test_keys_of_parts_are_joined() -> None:
    table = of_tasks(read([event("started", retries=1, clock=3, timestamp=2.0), event("received", clock=1)]))
    joined = Keys.joined([Keys.of(table.slice(0, 1)), Keys.of(table.slice(1))])
    assert (joined.attempt.tolist(), joined.clock.tolist()) == ([1, 0], [3, 1])
    assert joined.at.tolist()[0] == 2_000_000


@given(st.lists(st.integers(0, 9), max_size=20), st.integers(1, 12))
def test_bins_are_shared_out_whole(sizes: list[int], most: int) -> None:
    found = shared_out(np.array(sizes, dtype=np.int64), most)
    covered = [place for bins in found for place in bins]
    assert covered == list(range(len(covered)))
    assert sum(sizes[len(covered) :]) == 0
    for bins in found:
        total = sum(sizes[place] for place in bins)
        assert 0 < total <= most or sum(sizes[place] > 0 for place in bins) == 1
    for one, other in pairwise(found):
        assert sum(sizes[place] for place in one) + sizes[other.start] > most


def test_every_id_lies_in_one_bin() -> None:
    ids = pa.chunked_array([[f"task-{number}" for number in range(500)], ["task-1"]])
    sizes = bin_sizes([ids, ids], 4)
    assert (sizes.sum(), len(sizes)) == (1002, BINS)
    halves = [within(ids, bins, 4).to_pylist() for bins in (range(BINS // 2), range(BINS // 2, BINS))]
    assert [one != other for one, other in zip(*halves, strict=True)] == [True] * 501
    assert 150 < sum(halves[0]) < 350
    assert sizes[: BINS // 2].sum() == 2 * sum(halves[0])
    # Those of one bucket do not all lie in one part of the bins.
    assert np.count_nonzero(bin_sizes([ids], 1)) > 200


def test_large_tasks_are_those_with_more_events_than_that() -> None:
    parts = [pa.chunked_array([["a", "b", "a"]]), pa.chunked_array([["a", "c", "b"]])]
    assert large_tasks(parts, 2) == ["a"]
    assert sorted(large_tasks(parts, 1)) == ["a", "b"]
