"""L1: each dispatcher's clock strictly increases from event to event, and no event is missing."""

from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from umbel.events.stamp import EventStamper
from umbel.protocol.clock import LamportClock


def stamper(clock: LamportClock | None = None) -> EventStamper:
    return EventStamper(
        hostname="w@host", pid=7, incarnation=1_700_000_000_000_000, clock=clock or LamportClock()
    )


def test_an_event_carries_who_when_and_in_which_order() -> None:
    assert stamper().stamp("worker-online", {"freq": 2.0}, at=12.5) == {
        "type": "worker-online",
        "hostname": "w@host",
        "pid": 7,
        "clock": 1,
        "timestamp": 12.5,
        "utcoffset": 0.0,
        "inc": 1_700_000_000_000_000,
        "seq": 1,
        "freq": 2.0,
    }


def test_a_dispatcher_that_starts_late_goes_on_from_the_clusters_clock() -> None:
    assert stamper(LamportClock(41)).stamp("worker-online", {}, at=0.0)["clock"] == 42


@given(st.lists(st.none() | st.integers(0, 2**40) | st.integers(min_value=2**53) | st.text(), max_size=60))
def test_whatever_is_heard_between_events_clocks_increase_and_numbers_have_no_gap(heard: list[Any]) -> None:
    clock = LamportClock()
    dispatcher = stamper(clock)
    events = []
    for one in heard:
        if one is None:
            events.append(dispatcher.stamp("worker-heartbeat", {}, at=1.0))
        else:
            clock.adjust(one)
    events.append(dispatcher.stamp("worker-offline", {}, at=1.0))
    clocks = [event["clock"] for event in events]
    assert all(before < after for before, after in pairwise(clocks))
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    assert len({(event["hostname"], event["inc"]) for event in events}) == 1


def test_a_clock_set_back_on_the_wall_changes_nothing_of_the_order() -> None:
    dispatcher = stamper()
    later, earlier = (dispatcher.stamp("worker-heartbeat", {}, at=at) for at in (100.0, 50.0))
    assert (later["clock"], later["seq"]) < (earlier["clock"], earlier["seq"])


def test_an_event_that_cannot_be_told_leaves_a_gap_in_the_numbers() -> None:
    """D1: whoever records sees that something is missing."""
    dispatcher = stamper()
    first = dispatcher.stamp("worker-heartbeat", {}, at=1.0)
    dispatcher.skip()
    assert dispatcher.stamp("worker-heartbeat", {}, at=1.0)["seq"] == first["seq"] + 2


def test_a_blind_event_has_no_clock_value_and_does_not_move_the_clock() -> None:
    ours = stamper()
    first = ours.stamp("task-paid", {}, at=1.0)
    blind = ours.stamp("task-moved", {}, at=2.0, blind=True)
    after = ours.stamp("task-paid", {}, at=3.0)
    assert "clock" not in blind and (first["clock"], after["clock"]) == (1, 2)
    assert [one["seq"] for one in (first, blind, after)] == [1, 2, 3]  # none is missing
