"""Events are shown in the cluster's order, as far as the window reaches."""

import random

from hypothesis import given
from hypothesis import strategies as st

from umbel.events.reorder import ReorderWindow
from umbel.events.stamp import ReceivedEvent


def heard(clock: int, node: str = "a", at: float = 0.0) -> ReceivedEvent:
    return ReceivedEvent({"type": "task-started", "hostname": node, "timestamp": at}, clock)


def of_task(kind: str, clock: int, task: str = "t", attempt: int | None = 0) -> ReceivedEvent:
    said = {} if attempt is None else {"retries": attempt}
    return ReceivedEvent({"type": kind, "hostname": "a", "timestamp": 0.0, "uuid": task, **said}, clock)


def kinds(events: list[ReceivedEvent]) -> list[str]:
    return [one.event["type"] for one in events]


def clocks(events: list[ReceivedEvent]) -> list[int]:
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


def test_too_many_bytes_are_not_held() -> None:
    window = ReorderWindow(60.0, bytes_max=100)
    given = [one for clock in (4, 2, 5, 1, 3) for one in window.put(heard(clock), now=0.0, size_bytes=30)]
    assert clocks(given) == [1, 2]
    assert clocks(window.put(heard(9), now=0.0, size_bytes=1000)) == [3, 4, 5, 9]
    assert window.rest() == []


@given(
    st.lists(st.tuples(st.integers(0, 50), st.floats(0, 10)), max_size=40),
    st.floats(0, 3),
    st.integers(1, 10),
)
def test_nothing_is_lost_and_what_is_out_of_order_is_counted(
    told: list[tuple[int, float]], window_s: float, held_max: int
) -> None:
    window, given, now = ReorderWindow(window_s, held_max=held_max), list[ReceivedEvent](), 0.0
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


@given(
    st.permutations([("task-sent", 9), ("task-received", 4), ("task-started", 6), ("worker-heartbeat", 4)])
)
def test_a_task_sent_goes_before_what_workers_tell_of_the_task_whenever_it_is_heard(
    told: list[tuple[str, int]],
) -> None:
    """L3. A monitor's clock is that of the quickest node: here past all that this worker tells."""
    window = ReorderWindow(1.0)
    for number, (kind, clock) in enumerate(told):
        window.put(of_task(kind, clock) if kind.startswith("task") else heard(clock, "z"), now=number / 100)
    given = window.rest()
    of_the_task = kinds([one for one in given if "uuid" in one.event])
    assert of_the_task == ["task-sent", "task-received", "task-started"]
    assert clocks(given) == sorted(clocks(given))
    assert (len(given), window.late, window.deadline) == (4, 0, None)


def test_a_task_sent_goes_before_its_own_attempt_and_before_no_other() -> None:
    """Celery sends a retry before it tells of it, and says the attempt on receipt only."""
    window = ReorderWindow(1.0)
    story = [
        of_task("task-received", 2),
        of_task("task-sent", 8, attempt=1),
        of_task("task-sent", 9),
        of_task("task-retried", 3, attempt=None),
        of_task("task-received", 4, attempt=1),
        of_task("task-received", 1, task="other"),
        of_task("task-succeeded", 5, attempt=None),
    ]
    for one in story:
        window.put(one, now=0.0)
    given = [one for one in window.rest() if one.event["uuid"] == "t"]
    assert [one.event for one in given] == [story[number].event for number in (2, 0, 1, 3, 4, 6)]


def test_a_task_sent_after_a_quiet_time_is_not_late() -> None:
    """It has the time just before the monitor's own, which is that of the last event."""
    window = ReorderWindow(1.0)
    window.put(heard(7, at=5.0), now=0.0)
    assert clocks(window.due(1.0)) == [7]
    window.put(of_task("task-sent", 6), now=2.0)
    assert clocks(window.due(3.0)) == [7]
    assert window.late == 0


def test_many_task_sent_make_nothing_late_that_nodes_tell_later() -> None:
    """The receiver's clock ticks with each of them, that of the nodes does not."""
    window = ReorderWindow(1.0)
    window.put(heard(5), now=0.0)
    for number in range(20):
        window.put(of_task("task-sent", 6 + number, task=str(number)), now=0.0)
    given = window.due(1.0)
    window.put(heard(6), now=2.0)
    given += window.due(3.0)
    assert clocks(given) == sorted(clocks(given))
    assert (len(given), window.late) == (22, 0)


def test_a_task_sent_that_left_early_leaves_room() -> None:
    window = ReorderWindow(60.0, held_max=2)
    assert window.put(of_task("task-received", 1), now=0.0) == []
    assert window.put(of_task("task-sent", 9), now=0.0) == []
    assert kinds(window.put(heard(5), now=0.0)) == ["task-sent", "task-received"]
    assert window.put(heard(6), now=0.0) == []
    assert clocks(window.rest()) == [5, 6]
    assert window.rest() == []
