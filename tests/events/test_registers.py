"""L6, by hand: what one register keeps, what is counted beside it, and that a join takes both."""

from itertools import permutations, product
from typing import Any

import pytest

from tests.events.histories import event
from umbel.events.merge import (
    COUNTED,
    DIGESTS_MAX,
    Registers,
    absorb,
    count,
    eid,
    first_us,
    is_later,
    join,
    order_key,
    put,
    winner,
)
from umbel.events.types import TaskEvent
from umbel.events.view import EventReader


def told(kind: str, **fields: Any) -> TaskEvent:
    found = EventReader().read(event(kind, **fields))
    assert isinstance(found, TaskEvent)
    return found


def knowing(*events: TaskEvent) -> Registers:
    registers = Registers("t1")
    for one in events:
        put(registers, one)
    return registers


# Each is later than the one before it, by one part of the order.
IN_ORDER = [
    told("received", clock=1, timestamp=9.0, hostname="z", pid=9),
    told("received", clock=2, timestamp=1.0, hostname="z", pid=9),
    told("received", clock=2, timestamp=2.0, hostname="a", pid=9),
    told("received", clock=2, timestamp=2.0, hostname="b", pid=1),
    told("received", clock=2, timestamp=2.0, hostname="b", pid=2),
    told("received", clock=1, timestamp=1.0, hostname="a", pid=1, retries=1),
]


def test_events_are_in_order_by_attempt_clock_time_sender_and_process() -> None:
    for (place, one), (other_place, other) in product(enumerate(IN_ORDER), repeat=2):
        assert is_later(one, other) is (place > other_place)
        assert (order_key(one) > order_key(other)) is (place > other_place)


def test_what_is_equal_in_all_of_it_is_in_the_order_of_its_digests() -> None:
    one, other = sorted((told("received", name="a"), told("received", name="b")), key=eid)
    assert (is_later(other, one), is_later(one, other), is_later(one, one)) == (True, False, False)
    for order in permutations([one, other]):
        assert knowing(*order).received == other


def test_a_register_keeps_the_latest_and_says_whether_it_changed() -> None:
    registers = Registers("t1")
    early, late = told("started", clock=1), told("started", clock=2)
    assert put(registers, early) is True and registers.started == early and registers.repeats is None
    assert put(registers, early) is False  # delivered twice
    assert registers.repeats is None
    assert put(registers, late) is True and registers.started == late
    assert put(registers, early) is False and registers.started == late


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_the_first_time_and_the_number_of_different_events_are_kept(order: tuple[int, ...]) -> None:
    events = [told("received", clock=clock, timestamp=at) for clock, at in ((1, 5.0), (2, 3.0), (3, 4.0))]
    registers = knowing(*(events[place] for place in order), *events)
    assert (first_us(registers, "received"), count(registers, "received")) == (3_000_000, 3)
    assert registers.repeats is not None
    assert registers.repeats.digests == {"received": {eid(one) for one in events}}


def test_of_one_event_its_register_says_when_and_how_often() -> None:
    registers = knowing(told("received", timestamp=5.0))
    assert (first_us(registers, "received"), count(registers, "received")) == (5_000_000, 1)
    assert (first_us(registers, "failed"), count(registers, "failed")) == (None, 0)


def test_a_second_type_is_not_mixed_up_with_the_first() -> None:
    received = [told("received", clock=clock, timestamp=float(clock)) for clock in (7, 8)]
    registers = knowing(*received, told("failed", clock=9, timestamp=9.0))
    assert (first_us(registers, "failed"), count(registers, "failed")) == (9_000_000, 1)
    assert first_us(registers, "received") == 7_000_000


def test_only_deliveries_and_endings_are_counted() -> None:
    assert {"received", "succeeded", "failed", "revoked"} == COUNTED
    registers = knowing(told("started", clock=1), told("started", clock=2))
    assert registers.repeats is not None and registers.repeats.digests == {}


def test_events_are_counted_up_to_the_limit() -> None:
    registers = knowing(*(told("received", clock=clock) for clock in range(1, DIGESTS_MAX + 3)))
    assert count(registers, "received") == DIGESTS_MAX


def test_a_join_knows_what_either_knew_and_changes_neither() -> None:
    one = knowing(*(told("received", clock=clock, timestamp=float(clock)) for clock in (5, 6)))
    other = knowing(
        *(told("received", clock=clock, timestamp=float(clock)) for clock in (4, 9)), told("started", clock=7)
    )
    for both in (join(one, other), join(other, one)):
        assert both.received == other.received and both.started == other.started
        assert (first_us(both, "received"), count(both, "received")) == (4_000_000, 4)
    assert (count(one, "received"), one.started) == (2, None)
    assert join(one, one) == one


def test_whoever_absorbs_is_told_whether_a_register_changed() -> None:
    known = knowing(told("received", clock=1), told("started", clock=2))
    registers = knowing(told("received", clock=5))
    assert absorb(registers, known)  # the start
    assert not absorb(registers, known)
    assert not absorb(registers, Registers("t1"))


def test_only_one_tasks_registers_can_be_joined() -> None:
    with pytest.raises(AssertionError):
        join(Registers("t1"), Registers("t2"))


def test_the_winner_is_of_the_highest_rank_and_of_nothing_nobody() -> None:
    assert winner(Registers("t1")) is None
    ended, started = told("failed", clock=1), told("started", clock=5)
    assert winner(knowing(started, ended)) == ended
    receipt = told("received", retries=1, clock=9)
    assert winner(knowing(told("started", clock=2), receipt)) == receipt  # it started the attempt before


def test_what_is_held_is_listed_by_type() -> None:
    received, started = told("received"), told("started", clock=2)
    registers = knowing(started, received)
    assert (registers.held("started"), registers.held("failed")) == (started, None)
    assert registers.events() == [received, started]
