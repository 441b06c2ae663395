from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.protocol.clock import CLOCK_MAX, JUMP_MAX, LamportClock

honest = st.integers(0, JUMP_MAX)
hostile = (
    st.integers(max_value=-1)
    | st.integers(min_value=CLOCK_MAX)
    | st.floats()
    | st.text()
    | st.booleans()
    | st.none()
    | st.binary()
)


def test_events_of_our_own_step_by_one() -> None:
    clock = LamportClock()
    assert [clock.forward() for _ in range(3)] == [1, 2, 3]


def test_what_is_heard_is_stepped_past() -> None:  # L2
    clock = LamportClock()
    assert clock.adjust(10) == 11
    assert clock.adjust(5) == 12
    assert clock.adjust(12) == 13
    assert clock.rejected == 0


@pytest.mark.parametrize(
    "heard", [-1, 1.5, "7", None, True, [], 2**63, CLOCK_MAX, JUMP_MAX + 1, float("inf"), float("nan")]
)
def test_an_impossible_clock_is_counted_and_only_steps(heard: Any) -> None:
    clock = LamportClock()
    assert clock.adjust(heard) == 1
    assert clock.rejected == 1


def test_the_furthest_an_honest_clock_may_be_is_believed() -> None:
    clock = LamportClock(5)
    assert clock.adjust(5 + JUMP_MAX) == 6 + JUMP_MAX
    assert clock.rejected == 0


def test_at_the_end_of_the_range_it_stays_there() -> None:
    clock = LamportClock(CLOCK_MAX - 1)
    assert [clock.forward(), clock.forward(), clock.adjust(3)] == [CLOCK_MAX] * 3


@given(st.lists(st.none() | honest | hostile, max_size=50))
def test_it_strictly_increases_whatever_is_heard(heard: list[Any]) -> None:  # L1
    clock = LamportClock()
    values = [clock.forward() if one is None else clock.adjust(one) for one in heard]
    assert all(before < after for before, after in zip([0, *values], values, strict=False))
    assert all(type(value) is int and 0 <= value <= CLOCK_MAX for value in values)


@given(st.lists(honest, min_size=1, max_size=50))
def test_it_passes_every_honest_clock_it_hears(heard: list[int]) -> None:  # L2
    clock = LamportClock()
    for one in heard:
        before = clock.value
        assert clock.adjust(one) == max(before, one) + 1
    assert clock.rejected == 0


@given(st.lists(hostile, max_size=50))
def test_hostile_clocks_move_it_no_further_than_steps_and_are_all_counted(heard: list[Any]) -> None:
    clock = LamportClock()
    for one in heard:
        clock.adjust(one)
    assert (clock.value, clock.rejected) == (len(heard), len(heard))


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=60))
def test_a_message_is_always_later_where_it_is_heard_than_where_it_was_sent(
    messages: list[tuple[int, int]],
) -> None:
    nodes = [LamportClock() for _ in range(3)]
    for sender, receiver in messages:
        sent = nodes[sender].forward()
        assert nodes[receiver].adjust(sent) > sent
