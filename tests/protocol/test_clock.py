from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.protocol import clock as clock_module
from umbel.protocol.clock import BLOCK, CLOCK_MAX, JUMP_MAX, ClockReservation, LamportClock

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


class Fleet:
    """Nodes that reserve from one mark, a step at a time, so that each may die between any two."""

    def __init__(self) -> None:
        self.mark = 0
        self.left: list[int] = []  # every stamp that ever left a node
        self.nodes = [Reserving() for _ in range(2)]

    def step(self, place: int, verb: str) -> None:
        node = self.nodes[place]
        if verb == "start":  # after a kill, wherever it was
            self.nodes[place] = node = Reserving()
            node.reservation.begin(self.mark)
            node.began_above = max(self.left, default=0)
        else:
            getattr(self, verb)(node)

    def stamp(self, node: "Reserving") -> None:
        node.waiting.append(node.clock.forward())

    def ask(self, node: "Reserving") -> None:
        """The store raises the mark; its answer is on the way."""
        if (wanted := node.reservation.wanted) is not None:
            self.mark = max(self.mark, wanted)
            node.answer = self.mark

    def answered(self, node: "Reserving") -> None:
        if node.answer is not None:
            node.reservation.raised(node.answer)

    def send(self, node: "Reserving") -> None:
        if node.reservation.wanted is None:
            assert all(stamp > node.began_above for stamp in node.waiting)
            self.left += node.waiting
            node.waiting.clear()

    def hear(self, node: "Reserving") -> None:
        if self.left:
            node.clock.adjust(self.left[-1])

    def catch_up(self, node: "Reserving") -> None:
        node.reservation.catch_up(self.mark)


class Reserving:
    def __init__(self) -> None:
        self.clock = LamportClock()
        self.reservation = ClockReservation(self.clock)
        self.waiting: list[int] = []
        self.answer: int | None = None
        self.began_above = 0


often, seldom = ("stamp", "stamp", "ask", "answered", "send"), ("start", "hear", "catch_up")
verbs = st.sampled_from([*often, *often, *seldom])


@given(st.lists(st.tuples(st.integers(0, 1), verbs), min_size=20, max_size=300), st.integers(1, 3))
def test_a_node_that_starts_is_above_all_that_left_any_node_whoever_dies_and_when(
    steps: list[tuple[int, str]], block: int
) -> None:
    """L1, S2. Its own stamps of before it died are among them."""
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(clock_module, "BLOCK", block)
        fleet = Fleet()
        for place, verb in steps:
            fleet.step(place, verb)
            assert max(fleet.left, default=0) <= fleet.mark
            for node in fleet.nodes:
                assert sorted(set(node.waiting)) == node.waiting


def test_reserving_costs_one_call_for_a_block_of_steps() -> None:
    clock = LamportClock()
    reservation = ClockReservation(clock)
    reservation.begin(1000)
    calls = 0
    for _ in range(10 * BLOCK):
        clock.forward()
        if (wanted := reservation.wanted) is not None:
            calls += 1
            reservation.raised(wanted)
    assert calls == 10


def test_following_the_mark_moves_no_clock_past_the_highest() -> None:
    """Or idle nodes would push one another on."""
    highest, idle = LamportClock(50_000), LamportClock(7)
    ahead, behind = ClockReservation(highest), ClockReservation(idle)
    wanted = ahead.wanted
    assert wanted is not None
    ahead.raised(wanted)
    for _ in range(10):
        behind.catch_up(wanted)
        ahead.catch_up(wanted)
    assert (idle.value, highest.value) == (50_000, 50_000)
    behind.catch_up(0)
    assert idle.value == 50_000


def test_the_mark_of_the_store_is_believed_however_high_it_is() -> None:
    """A cluster's clock may be further on than a message may push it."""
    clock = LamportClock()
    reservation = ClockReservation(clock)
    reservation.begin(JUMP_MAX * 1000)
    assert clock.forward() == JUMP_MAX * 1000 + 1
    reservation.begin(2**60)
    assert (clock.value, reservation.wanted) == (CLOCK_MAX, None)


def test_what_was_reserved_in_data_that_is_lost_is_reserved_again() -> None:
    clock = LamportClock(5)
    reservation = ClockReservation(clock)
    reservation.raised(100)
    assert reservation.wanted is None
    reservation.lost()
    assert reservation.wanted == 5 + BLOCK
