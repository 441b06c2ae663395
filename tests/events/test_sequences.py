"""Which numbers of whose events are missing (D1)."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from umbel.events.reorder import HOLES_MAX, SETTLED_AFTER_S, YOUNGER_BY_US, Gap, KnownSender, Sequences

LATER = SETTLED_AFTER_S + 1.0


def saw(sequences: Sequences, *numbers: int, inc: int = 7, now: float = 0.0) -> None:
    """One by one, in this order."""
    sequences.saw(("w@x", 1, inc), [(number, number, number * 10) for number in numbers], now)


def gaps(sequences: Sequences, now: float = LATER) -> list[tuple[int, int]]:
    return [(gap.first, gap.last) for gap in sequences.settled(now)]


def test_a_number_that_does_not_come_is_a_gap_once_it_had_its_time() -> None:
    sequences = Sequences()
    saw(sequences, 3, 4, 8, 9)
    assert sequences.settled(SETTLED_AFTER_S - 1.0) == []
    assert sequences.settled(LATER) == [Gap("w@x", 1, 7, 5, 7, 80)]
    assert sequences.settled(LATER) == []


def test_what_comes_late_or_twice_leaves_no_gap() -> None:
    sequences = Sequences()
    saw(sequences, 1, 2, 6, 2, 4, 6, 3, 5)
    assert gaps(sequences) == []
    assert sequences.holes_open == 0


def test_a_sender_younger_than_the_recording_counts_from_one() -> None:
    sequences = Sequences(began_us=1000)
    saw(sequences, 3, inc=900)
    saw(sequences, 3, inc=1001 + YOUNGER_BY_US)
    assert sequences.settled(LATER) == [Gap("w@x", 1, 1001 + YOUNGER_BY_US, 1, 2, 30)]


def test_a_gap_across_a_restart_is_seen() -> None:
    before = Sequences()
    saw(before, 1, 2, 5)
    kept = msgspec.json.decode(msgspec.json.encode(before.known()), type=list[KnownSender])
    after = Sequences(known=kept)
    saw(after, 5, 6, 9, now=1.0)
    assert gaps(after) == [(3, 4), (7, 8)]


def test_what_is_remembered_is_bounded_and_no_gap_is_forgotten() -> None:
    sequences = Sequences(senders_max=2)
    saw(sequences, 1, 3, inc=1)
    saw(sequences, 1, inc=2)
    saw(sequences, 1, inc=3)
    assert [one.inc for one in sequences.known()] == [2, 3]
    assert gaps(sequences, 0.0) == [(2, 2)]  # its sender is forgotten, so nothing can fill it
    saw(sequences, *range(1, 2 * HOLES_MAX + 6, 2), inc=3)
    assert gaps(sequences, 0.0) == [(2, 2), (4, 4)]


@given(st.permutations(range(1, 30)), st.sets(st.integers(2, 29)))
def test_in_any_order_exactly_the_missing_are_gaps(order: list[int], missing: set[int]) -> None:
    sequences = Sequences()
    saw(sequences, 1)
    come = [number for number in order if number not in missing]
    saw(sequences, *come)
    found = {number for first, last in gaps(sequences) for number in range(first, last + 1)}
    assert found == {number for number in missing if number < max(come, default=1)}


_runs = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 15)), max_size=20)


@given(_runs)
def test_a_run_is_its_numbers_one_after_the_other(runs: list[tuple[int, int]]) -> None:
    at_once, one_by_one = Sequences(), Sequences()
    for first, more in runs:
        at_once.saw(("w@x", 1, 7), [(first, first + more, first * 10)], 0.0)
        saw(one_by_one, *range(first, first + more + 1))
    assert at_once.known() == one_by_one.known()
    assert at_once.holes_open == one_by_one.holes_open
    assert at_once.settled(LATER) == one_by_one.settled(LATER)
