"""What is known of one child, its starts and its recycling, each by itself."""

import pytest

from tests.protocol.test_slots import QUICK_S, Job, Outcome, jobs, make
from umbel.protocol.machine import Tick
from umbel.protocol.pool.events import Dismiss, Finished, Kill, Retire, SignalSoftLimit, SlotSettings, Submit
from umbel.protocol.pool.fleet import Child, ChildState, Recycling, Starts, holder_of, least_useful, takers_of
from umbel.protocol.pool.slots import Paces

NOTE = Paces(batch_target_s=0.1, batch_max=100).note


def child_with(*numbers: int) -> Child[Job]:
    child: Child[Job] = Child(0, ChildState.READY)
    if numbers:
        child.add(list(jobs(*numbers)))
    return child


def test_what_ended_is_not_outstanding_any_more() -> None:
    child = child_with(1, 2, 3)
    child.add(list(jobs(4)))
    assert child.outstanding() == 4
    assert child.finish([Outcome(1), Outcome(2)], NOTE, recall_at=9.0) == 2
    assert (child.outstanding(), child.ended, child.recall_at) == (2, 2, None)
    assert child.finish([Outcome(3)], NOTE, recall_at=9.0) == 1
    assert (child.outstanding(), child.recall_at) == (1, 9.0)  # the next batch begins


def test_a_child_is_at_its_next_job_and_at_the_last_it_started_once_the_rest_is_recalled() -> None:
    child = child_with()
    assert child.running() is None
    child.add(list(jobs(1, 2)))
    child.add(list(jobs(3)))
    child.finish([Outcome(1)], NOTE, recall_at=9.0)
    assert child.running() == Job(2)
    child.recalled = True
    assert child.running() == Job(3)  # the answer for job 2 is on its way


def test_a_job_is_held_by_who_was_sent_it_until_it_ends() -> None:
    first, second = child_with(1, 2), Child[Job](1, ChildState.READY)
    second.add(list(jobs(3)))
    second.add(list(jobs(4)))
    assert [holder_of([first, second], job) for job in (1, 2, 3, 4, 5)] == [0, 0, 1, 1, None]
    first.finish([Outcome(1)], NOTE, recall_at=9.0)
    assert [holder_of([first, second], job) for job in (1, 2)] == [None, 0]


def test_the_pace_of_a_task_is_noted_with_all_its_runs_in_a_row() -> None:
    noted: list[tuple[str, list[float]]] = []
    child: Child[Job] = Child(0, ChildState.READY)
    child.add([Job(1, "a"), Job(2, "a"), Job(3, "b")])
    child.finish([Outcome(1), Outcome(2), Outcome(3)], lambda *one: noted.append(one), recall_at=9.0)
    assert [one for one in noted if one[1]] == [("a", [QUICK_S, QUICK_S]), ("b", [QUICK_S])]


def test_a_soft_limit_of_the_tasks_own_does_not_say_that_the_worker_stops() -> None:
    slots = make()
    slots.step(Submit([Job(1, soft_limit_s=1.0)]), now=0.0)
    assert slots.step(Tick(), now=1.0) == [SignalSoftLimit(0, 1, stopping=False)]
    assert child_with().stopping is False


def test_an_idle_child_that_is_retired_and_does_not_leave_is_killed() -> None:
    slots = make(stop_grace_s=3.0)
    assert any(isinstance(effect, Dismiss) for effect in slots.step(Retire(0, "worn"), now=1.0))
    assert slots.deadline == 4.0
    assert any(isinstance(effect, Kill) for effect in slots.step(Tick(), now=4.0))
    assert slots.step(Tick(), now=5.0) == []  # once


def test_a_child_that_is_killed_is_not_killed_again() -> None:
    slots = make()
    slots.step(Submit(jobs(1)), now=1.0)
    stray = Finished(0, [Outcome(99)])
    kills = [sum(isinstance(one, Kill) for one in slots.step(stray, now=1.0)) for _ in range(2)]
    assert kills == [1, 0]


def test_nobody_gets_a_batch_behind_one_that_is_late() -> None:
    idle, busy, late = child_with(), child_with(1), child_with(2)
    busy.recall_at, late.recall_at = 5.1, 5.0
    assert takers_of([late, busy, idle], now=4.9) == [idle, late, busy]
    assert takers_of([late, busy, idle], now=5.0) == [idle, busy]
    busy.recall_at = None
    assert takers_of([busy], now=5.0) == [busy]


def test_a_pool_shrinks_by_those_that_do_not_work_yet_then_the_idle_then_the_busy() -> None:
    states = (ChildState.ABSENT, ChildState.LEAVING, ChildState.STARTING, ChildState.READY, ChildState.READY)
    children = [Child[Job](number, state) for number, state in enumerate(states)]
    busy: Child[Job] = Child(9, ChildState.READY)
    busy.add(list(jobs(1)))
    ranked = [child.number for child in least_useful([busy, *children], 6)]
    assert ranked == [0, 1, 2, 4, 3, 9]  # of equals the new one goes
    assert [child.number for child in least_useful([busy, *children], 1)] == [0]
    assert least_useful(children, 0) == least_useful(children, -1) == []


def fail(starts: Starts, begun_at: float, now: float) -> float:
    """A child is gone before it was ready; when the next one starts."""
    next_at = starts.ended(begun_at=begun_at, ready_at=None, did_something=False, now=now)
    assert next_at is not None and next_at > now
    return next_at


@pytest.mark.parametrize(
    ("lived_s", "did_something", "starts_at_once"),
    [(0.9, False, False), (1.0, False, True), (0.0, True, True)],
)
def test_a_child_that_dies_soon_and_without_a_job_has_not_started(
    lived_s: float, did_something: bool, starts_at_once: bool
) -> None:
    starts = Starts(SlotSettings(children=1))
    next_at = starts.ended(begun_at=1.0, ready_at=2.0, did_something=did_something, now=2.0 + lived_s)
    assert (next_at is None) is starts_at_once


def test_a_pool_waits_for_a_start_as_long_as_it_is_patient_since_it_had_a_child() -> None:
    starts = Starts(SlotSettings(children=1, start_timeout_s=10.0, start_attempts=100))
    starts.seen_alive(50.0)
    fail(starts, 51.0, 52.0)
    assert starts.given_up(59.9) == ""
    assert starts.given_up(60.0) != ""
    assert starts.given_up(61.0) == ""  # said once


def test_a_child_that_did_something_ends_the_row_of_failed_starts() -> None:
    starts = Starts(SlotSettings(children=1, start_timeout_s=1000.0, start_attempts=2))
    starts.seen_alive(0.0)
    _, second_s = (fail(starts, began, began + 0.5) - began - 0.5 for began in (1.0, 2.0))
    assert starts.given_up(3.0) and not starts.given_up(3.0)
    assert starts.ended(begun_at=3.0, ready_at=3.1, did_something=True, now=3.2) is None
    assert fail(starts, 4.0, 4.5) - 4.5 < second_s  # as the first of a row
    assert not starts.given_up(5.0)
    fail(starts, 6.0, 6.5)
    assert starts.given_up(7.0)  # said once more


def test_a_child_is_weighed_when_its_job_ends_unless_that_was_done_a_moment_ago() -> None:
    recycling = Recycling(SlotSettings(children=1, memory_max_bytes=1))
    child = child_with()
    looks: list[tuple[bool, float | None]] = []
    for now in (1.0, 1.01, 2.0):
        looks.append((recycling.is_to_be_weighed(child, now), child.weigh_at))
        if looks[-1][0]:
            recycling.weighed(child, now)
    assert looks == [(True, None), (False, pytest.approx(1.05)), (True, None)]
    child.weighed_at = 0.0
    assert recycling.is_to_be_weighed(child, 0.05)  # the pause is over


def test_a_child_is_too_heavy_above_its_limits_not_at_them() -> None:
    recycling = Recycling(SlotSettings(children=1, memory_max_bytes=100, memory_hard_bytes=200))
    judged = [
        (bool(recycling.over_memory_limit(size)), bool(recycling.over_hard_limit(size)))
        for size in (100, 101, 200, 201)
    ]
    assert judged == [(False, False), (True, False), (True, False), (True, True)]
    strict = Recycling(SlotSettings(children=1, memory_hard_bytes=200))
    assert [bool(strict.over_memory_limit(size)) for size in (200, 201)] == [False, True]


def test_a_child_within_its_limits_stays() -> None:
    recycling, child = Recycling(SlotSettings(children=1)), child_with()
    assert (
        recycling.job_limit_reached(child),
        recycling.over_memory_limit(1),
        recycling.over_hard_limit(1),
    ) == ("", "", "")
    assert recycling.is_to_be_weighed(child, 1.0) is False
