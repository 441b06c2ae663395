"""Events are shown in the cluster's order, as far as the window reaches."""

import random

from hypothesis import given
from hypothesis import strategies as st

from umbel.events.receiver import Heard
from umbel.events.reorder import ReorderWindow


def heard(clock: int, node: str = "a", at: float = 0.0) -> Heard:
    return Heard({"type": "task-started", "hostname": node, "timestamp": at}, clock)


def clocks(events: list[Heard]) -> list[int]:
    return [one.clock for one in events]


def test_an_event_waits_for_the_window_and_for_no_longer() -> None:
    window = ReorderWindow(0.5)
    assert window.put(heard(7), now=10.0) == []
    assert window.deadline == 10.5
    assert window.due(10.4) == []
    assert clocks(window.due(10.5)) == [7]
    assert window.deadline is None


def test_what_comes_before_a_due_event_goes_with_it_and_what_comes_after_waits() -> None:
    window = ReorderWindow(1.0)
    for number, clock in enumerate([5, 9, 3, 6]):
        window.put(heard(clock), now=float(number) / 10)
    assert clocks(window.due(1.0)) == [3, 5]
    assert clocks(window.due(1.1)) == [6, 9]
    assert window.late == 0


def test_equal_clocks_are_ordered_by_time_then_node_then_arrival() -> None:
    window = ReorderWindow(0.0)
    events = [heard(1, "b", 2.0), heard(1, "a", 2.0), heard(1, "z", 1.0), heard(1, "a", 2.0)]
    for one in events:
        window.put(one, now=0.0)
    assert window.due(0.0) == [events[2], events[1], events[3], events[0]]


def test_an_event_that_comes_too_late_is_given_out_and_counted() -> None:
    window = ReorderWindow(1.0)
    window.put(heard(9), now=0.0)
    assert clocks(window.due(1.0)) == [9]
    window.put(heard(2), now=1.5)
    assert clocks(window.rest()) == [2]
    assert window.late == 1


def test_too_many_are_not_held() -> None:
    window = ReorderWindow(60.0, held_max=3)
    given = [one for clock in (4, 2, 5, 1, 3) for one in window.put(heard(clock), now=0.0)]
    assert clocks(given) == [1, 2]
    assert clocks(window.rest()) == [3, 4, 5]


@given(
    st.lists(st.tuples(st.integers(0, 50), st.floats(0, 10)), max_size=40),
    st.floats(0, 3),
    st.integers(1, 10),
)
def test_nothing_is_lost_and_what_is_out_of_order_is_counted(
    told: list[tuple[int, float]], window_s: float, held_max: int
) -> None:
    window, given, now = ReorderWindow(window_s, held_max=held_max), list[Heard](), 0.0
    for clock, pause_s in told:
        now += pause_s
        given += window.due(now)
        given += window.put(heard(clock), now)
    given += window.rest()
    assert sorted(clocks(given)) == sorted(clock for clock, _ in told)
    highest, late = -1, 0
    for clock in clocks(given):
        late += clock < highest
        highest = max(highest, clock)
    assert window.late == late


@given(st.lists(st.integers(0, 50), max_size=40), st.randoms(use_true_random=False))
def test_within_the_window_any_order_of_arrival_is_put_right(told: list[int], chance: random.Random) -> None:
    window = ReorderWindow(5.0)
    for number, clock in enumerate(chance.sample(told, len(told))):
        window.put(heard(clock), now=number / 100)
    assert clocks(window.due(99.0)) == sorted(told)
