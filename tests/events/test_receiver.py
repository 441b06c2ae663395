"""What hearing an event does to the clock, and which time the event gets (L2, L3, S4)."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from umbel.events.stamp import EventReceiver
from umbel.protocol.clock import CLOCK_MAX, JUMP_MAX, LamportClock
from umbel.wire.event import decode_events, encode_event, encode_events


def receiver(value: int = 50, node: str = "me@here") -> EventReceiver:
    return EventReceiver(LamportClock(value), decode_events, node=node)


def heard(listening: EventReceiver, **fields: Any) -> tuple[int, int]:
    """The event's time here, and the clock after it."""
    told = {"type": "worker-heartbeat", "hostname": "other@there", **fields}
    (one,) = listening.receive(encode_event(told))
    assert one.event == told  # handed on as it was on the wire
    return one.clock, listening.clock.value


def test_the_clock_goes_past_what_it_hears() -> None:
    assert heard(receiver(50), clock=70) == (70, 71)
    assert heard(receiver(50), clock=20) == (20, 51)


def test_an_event_without_a_clock_gets_the_time_it_was_heard_at() -> None:
    assert heard(receiver(50)) == (51, 51)


def test_task_sent_comes_before_what_workers_tell_of_it() -> None:
    assert heard(receiver(50), type="task-sent", clock=9000) == (49, 51)
    assert heard(receiver(0), type="task-sent", clock=9000) == (0, 1)


def test_an_event_of_our_own_moves_the_clock_one_step() -> None:
    assert heard(receiver(50), hostname="me@here", clock=70) == (70, 51)


def test_a_clock_that_cannot_be_is_not_believed() -> None:
    for clock in (51 + JUMP_MAX, CLOCK_MAX, -1, "7", 7.5, True):
        listening = receiver(50)
        assert heard(listening, clock=clock) == (51, 51)
        assert listening.clock.rejected == 1


def test_single_events_and_lists_are_heard_and_rubbish_is_counted() -> None:
    listening = receiver(0)
    events = [{"type": "task-started", "uuid": str(number), "clock": number} for number in (4, 9, 2)]
    assert [one.clock for one in listening.receive(encode_events(events))] == [4, 9, 2]
    assert listening.clock.value == 11
    for rubbish in (b"", b"{", b"[1]", b'{"no": "type"}', b'[{"type": 4}]'):
        assert listening.receive(rubbish) == []
    assert (listening.heard, listening.undecodable) == (3, 5)
    assert listening.clock.value == 11
    assert "type" in listening.last_error


@given(st.lists(st.integers(0, 1000) | st.none(), max_size=20))
def test_whatever_is_heard_the_clock_grows(clocks: list[int | None]) -> None:
    listening = receiver(0)
    for clock in clocks:
        before = listening.clock.value
        given_time, after = heard(listening, clock=clock) if clock is not None else heard(listening)
        assert after > before
        assert after >= given_time
