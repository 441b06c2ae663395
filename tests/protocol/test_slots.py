from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from umbel.protocol.machine import Tick
from umbel.protocol.pool.events import (
    ChildDied,
    ChildReady,
    Close,
    Dismiss,
    Effect,
    Finished,
    JobBegan,
    JobLoss,
    JobsLost,
    Kill,
    Open,
    Overweight,
    PoolClosed,
    PoolFailed,
    Recall,
    Recalled,
    Replace,
    Reported,
    Resize,
    Retire,
    Send,
    SignalSoftLimit,
    SlotSettings,
    Start,
    Submit,
    Unsettled,
    Weigh,
    Weighed,
    Withdraw,
    Withdrawn,
)
from umbel.protocol.pool.slots import Slots

QUICK_S, SLOW_S = 0.001, 5.0
STOPS, SHRINKS = "pool shutdown", "pool shrinking"


@dataclass(frozen=True)
class Job:
    number: int
    task: str = "quick"
    soft_limit_s: float | None = None
    hard_limit_s: float | None = None
    alone: bool = False
    redelivered: bool = False


@dataclass(frozen=True)
class Outcome:
    number: int
    runtime_s: float = QUICK_S


Machine = Slots[Job, Outcome]
Effects = Sequence[Effect[Job, Outcome]]


def jobs(*numbers: int, task: str = "quick") -> tuple[Job, ...]:
    return tuple(Job(number, task) for number in numbers)


def ended(*numbers: int, runtime_s: float = QUICK_S) -> list[Outcome]:
    return [Outcome(number, runtime_s) for number in numbers]


def make(children: int = 1, **settings: float) -> Machine:
    """A machine whose children are ready and that knows quick and slow tasks."""
    slots: Machine = Slots(SlotSettings(children=children, **settings))  # type: ignore[arg-type]
    assert slots.step(Open(), now=0.0) == [Start(child) for child in range(children)]
    for child in range(children):
        assert slots.step(ChildReady(child), now=0.0) == []
    for number, task, runtime_s in ((-1, "slow", SLOW_S), (-2, "quick", QUICK_S)):
        slots.step(Submit([Job(number, task)]), now=0.0)
        slots.step(Finished(0, [Outcome(number, runtime_s)]), now=0.0)
    slots.step(Unsettled(0), now=0.0)
    return slots


def sent(effects: Effects) -> dict[int, list[int]]:
    return {
        effect.child: [job.number for job in effect.jobs] for effect in effects if isinstance(effect, Send)
    }


# ---- who gets what -----------------------------------------------------------------------------------


def test_a_task_never_seen_before_goes_singly_and_is_reported_as_begun() -> None:
    slots = make()
    new = Job(1, "new")
    effects = slots.step(Submit([new, *jobs(2)]), now=0.0)
    assert effects == [Send(0, 2, (new,)), JobBegan(0, 1)]
    assert slots.step(Finished(0, ended(1)), now=0.0)[0] == Send(0, 3, jobs(2))


def test_quick_jobs_are_shared_among_the_idle_children() -> None:
    slots = make(children=2)
    assert sent(slots.step(Submit(jobs(*range(10))), now=0.0)) == {0: [0, 1, 2, 3, 4], 1: [5, 6, 7, 8, 9]}


def test_a_batch_takes_about_the_target_time() -> None:
    slots = make(batch_target_s=0.0105)
    assert sent(slots.step(Submit(jobs(*range(100))), now=0.0)) == {0: list(range(10))}


def test_a_batch_has_a_largest_size() -> None:
    slots = make(batch_target_s=1.0, batch_max=7)
    assert sent(slots.step(Submit(jobs(*range(100))), now=0.0)) == {0: list(range(7))}


def test_a_child_gets_a_second_batch_behind_the_first_but_no_third() -> None:
    slots = make(batch_max=2, batch_target_s=1.0)
    assert sent(slots.step(Submit(jobs(1, 2, 3, 4, 5, 6)), now=0.0)) == {0: [1, 2]}
    assert sent(slots.step(Finished(0, ended(1)), now=0.0)) == {0: [3, 4]}
    slots.step(Unsettled(0), now=0.0)
    assert sent(slots.step(Finished(0, ended(2)), now=0.0)) == {0: [5, 6]}
    slots.step(Unsettled(0), now=0.0)
    assert sent(slots.step(Submit(jobs(7)), now=0.0)) == {}


def test_a_child_gets_no_more_jobs_until_what_has_ended_is_settled() -> None:
    slots = make(batch_max=2, batch_target_s=1.0)  # 6 jobs at most, in hand and unsettled
    assert sent(slots.step(Submit(jobs(*range(20))), now=0.0)) == {0: [0, 1]}
    assert sent(slots.step(Finished(0, ended(0)), now=0.0)) == {0: [2, 3]}
    assert sent(slots.step(Finished(0, ended(1)), now=0.0)) == {0: [4, 5]}
    assert sent(slots.step(Finished(0, ended(2, 3, 4)), now=0.0)) == {}
    assert sent(slots.step(Finished(0, ended(5)), now=0.0)) == {}
    assert sent(slots.step(Unsettled(6), now=0.0)) == {}
    assert sent(slots.step(Unsettled(5), now=0.0)) == {0: [6]}
    assert sent(slots.step(Unsettled(0), now=0.0)) == {0: [7, 8]}


def test_a_job_that_goes_singly_waits_until_what_has_ended_is_settled() -> None:
    slots = make(batch_max=1)
    slots.step(Unsettled(3), now=0.0)
    assert sent(slots.step(Submit(jobs(1)), now=0.0)) == {}
    assert sent(slots.step(Unsettled(2), now=0.0)) == {0: [1]}


@pytest.mark.parametrize(
    "special",
    [
        Job(1, "slow"),
        Job(1, alone=True),
        Job(1, redelivered=True),
        Job(1, soft_limit_s=1.0),
        Job(1, hard_limit_s=1.0),
    ],
)
def test_a_job_that_must_go_singly_waits_for_an_idle_child_and_has_nothing_behind_it(special: Job) -> None:
    slots = make()
    assert sent(slots.step(Submit(jobs(0)), now=0.0)) == {0: [0]}
    assert sent(slots.step(Submit([special, *jobs(2)]), now=0.0)) == {}
    assert sent(slots.step(Finished(0, ended(0)), now=0.0)) == {0: [1]}
    assert sent(slots.step(Finished(0, ended(1)), now=0.0)) == {0: [2]}


def test_a_task_that_turns_slow_is_no_longer_batched() -> None:
    slots = make()
    slots.step(Submit(jobs(1)), now=0.0)
    slots.step(Finished(0, ended(1, runtime_s=SLOW_S)), now=0.0)
    assert sent(slots.step(Submit(jobs(2, 3)), now=0.0)) == {0: [2]}


# ---- a slow job in a batch ---------------------------------------------------------------------------


def test_what_waits_behind_a_slow_job_is_recalled_and_given_to_others() -> None:
    slots = make(children=2, batch_patience_s=0.05)
    slots.step(Submit(jobs(1, 2, 3, 4, 5, 6)), now=0.0)
    slots.step(Finished(1, ended(4, 5, 6)), now=0.01)
    assert slots.deadline is not None and slots.deadline <= 0.05
    assert slots.step(Tick(), now=0.05) == [Recall(0)]
    # Job 1 ended but its outcome is on the way, job 2 runs, job 3 has not started.
    assert slots.step(Recalled(0, bytes([2])), now=0.05) == [JobBegan(0, 2), Send(1, 1, jobs(3))]
    assert slots.step(Finished(0, ended(1)), now=0.06) == [Reported(0, ended(1))]


def test_a_child_with_a_slow_job_gets_nothing_until_it_is_done() -> None:
    slots = make()
    slots.step(Submit(jobs(1, 2)), now=0.0)
    slots.step(Tick(), now=0.05)
    assert sent(slots.step(Recalled(0, bytes([2])), now=0.05)) == {}
    assert slots.room() == 0
    assert sent(slots.step(Finished(0, ended(1)), now=9.0)) == {0: [2]}


def test_a_recall_of_two_batches_puts_the_jobs_back_in_order() -> None:
    slots = make(batch_max=2, batch_target_s=1.0)
    slots.step(Submit(jobs(1, 2, 3, 4, 5)), now=0.0)
    slots.step(Finished(0, ended(1)), now=0.0)
    slots.step(Tick(), now=0.05)
    slots.step(Recalled(0, bytes([3, 3])), now=0.05)  # job 2 runs; of the second batch both are left
    assert slots.step(Withdraw(), now=0.05) == [Recall(0)]
    assert slots.step(Recalled(0, b""), now=0.05) == [JobBegan(0, 2), Withdrawn(jobs(3, 4, 5))]


# ---- deaths ------------------------------------------------------------------------------------------


def test_only_the_running_job_is_charged_with_the_death_of_its_child() -> None:
    slots = make()
    slots.step(Submit(jobs(1, 2, 3, 4)), now=0.0)
    slots.step(Finished(0, ended(1)), now=0.0)
    effects = slots.step(ChildDied(0, bytes([2]), "it fell"), now=0.0)
    finished = JobLoss(2, charged=False, ran=True, reason="it fell")
    running = JobLoss(3, charged=True, ran=True, reason="it fell")
    assert effects == [JobsLost([finished, running]), Start(0)]
    assert slots.step(ChildReady(0), now=0.1) == [Send(0, 0, jobs(4))]  # it never started


def test_a_dead_child_gets_nothing_until_another_has_its_slot() -> None:
    slots = make(children=2)
    slots.step(ChildDied(0, b"", "it fell"), now=5.0)
    assert sent(slots.step(Submit(jobs(1, 2)), now=5.0)) == {1: [1, 2]}


def test_a_death_of_an_idle_child_after_some_time_costs_nothing() -> None:
    slots = make()
    assert slots.step(ChildDied(0, b"", "killed"), now=60.0) == [Start(0)]


def test_children_that_die_at_once_are_replaced_ever_more_slowly_and_reported() -> None:
    slots: Machine = Slots(SlotSettings(children=1))
    slots.step(Open(), now=0.0)
    assert slots.step(ChildDied(0, b"", "no disk"), now=0.0) == []
    assert slots.deadline == pytest.approx(0.1)
    assert slots.step(Tick(), now=0.1) == [Start(0)]
    assert slots.step(ChildDied(0, b"", "no disk"), now=0.1) == []
    assert slots.step(Tick(), now=0.31) == [Start(0)]
    assert slots.step(ChildDied(0, b"", "no disk"), now=0.31) == [
        PoolFailed("3 attempts failed; last error: no disk")
    ]
    assert slots.step(Tick(), now=0.72) == [Start(0)]
    assert slots.step(ChildReady(0), now=0.8) == []


def test_a_child_that_does_not_get_ready_is_killed() -> None:
    slots: Machine = Slots(SlotSettings(children=1, start_timeout_s=10.0))
    slots.step(Open(), now=0.0)
    assert slots.step(Tick(), now=10.0) == [Kill(0, "not ready after 10 s")]
    assert slots.step(ChildReady(0), now=10.1) == []
    assert slots.step(ChildDied(0, b"", "SIGKILL"), now=10.2) == []
    assert slots.step(Tick(), now=10.4) == [Start(0)]


def test_an_answer_for_a_job_it_was_not_given_ends_the_child() -> None:
    slots = make()
    slots.step(Submit(jobs(1, 2)), now=0.0)
    effects = slots.step(Finished(0, ended(1, 99)), now=0.0)
    reason = "it reported job 99, which was not sent to it"
    assert effects == [Reported(0, ended(1)), Kill(0, reason)]
    effects = slots.step(ChildDied(0, b"", "SIGKILL"), now=0.0)
    assert effects == [JobsLost([JobLoss(2, charged=True, ran=True, reason=reason)]), Start(0)]


# ---- time limits -------------------------------------------------------------------------------------


def test_the_hard_limit_ends_the_child_and_the_job_is_lost_as_timed_out() -> None:
    slots = make()
    slots.step(Submit([Job(1, hard_limit_s=3.0)]), now=10.0)
    assert slots.step(Tick(), now=12.9) == []
    reason = "hard time limit of 3 s exceeded"
    assert slots.step(Tick(), now=13.0) == [Kill(0, reason)]
    assert slots.step(Tick(), now=14.0) == []
    effects = slots.step(ChildDied(0, b"", "SIGKILL"), now=14.0)
    assert effects == [
        JobsLost([JobLoss(1, charged=True, ran=True, reason=reason, timed_out=True)]),
        Start(0),
    ]


def test_a_job_that_had_not_begun_at_its_hard_limit_is_lost_too() -> None:
    """The limit counts from dispatch; or a limit too short to begin would cost one child after another."""
    slots = make()
    effects = slots.step(Submit([Job(1, hard_limit_s=0.001)]), now=10.0)
    (sent,) = [effect for effect in effects if isinstance(effect, Send)]
    slots.step(Tick(), now=10.1)
    lost, started = slots.step(ChildDied(0, bytes([sent.batch]), "SIGKILL"), now=10.2)
    assert isinstance(lost, JobsLost)
    assert [(loss.timed_out, loss.ran, loss.charged) for loss in lost.losses] == [(True, False, False)]
    assert started == Start(0)


def test_an_outcome_that_was_on_its_way_at_the_hard_limit_counts() -> None:
    slots = make()
    slots.step(Submit([Job(1, hard_limit_s=3.0)]), now=0.0)
    slots.step(Tick(), now=3.0)
    assert slots.step(Finished(0, ended(1)), now=3.0) == [Reported(0, ended(1))]
    assert slots.step(ChildDied(0, b"", "SIGKILL"), now=3.1) == [Start(0)]


def test_the_soft_limit_is_signalled_again_while_the_job_goes_on_and_never_after() -> None:
    slots = make()
    slots.step(Submit([Job(1, soft_limit_s=1.0)]), now=0.0)
    assert slots.step(Tick(), now=1.0) == [SignalSoftLimit(0, 1)]
    assert slots.deadline == pytest.approx(1.25)
    assert slots.step(Tick(), now=1.25) == [SignalSoftLimit(0, 1)]
    slots.step(Finished(0, ended(1)), now=1.3)
    assert slots.step(Tick(), now=9.0) == []
    assert slots.deadline is None


# ---- taking back, retiring, closing ------------------------------------------------------------------


def test_withdraw_gives_back_what_has_not_started_wherever_it_waits() -> None:
    slots = make(children=2)
    slots.step(Submit([*jobs(1, 2, 3, 4), Job(5, "slow")]), now=0.0)
    assert slots.step(Withdraw(), now=0.0) == [Recall(0), Recall(1)]
    assert slots.step(Recalled(0, bytes([2, 2])), now=0.0) == [JobBegan(0, 1)]
    effects = slots.step(Recalled(1, bytes([0])), now=0.0)
    assert isinstance(effects[-1], Withdrawn)
    assert {job.number for job in effects[-1].jobs} == {2, 3, 4, 5}
    assert slots.waiting() == 0


def test_what_is_being_withdrawn_goes_to_nobody_who_gets_free_meanwhile() -> None:
    slots = make(3)
    slots.step(Submit([Job(9, "slow")]), now=0.0)
    batches = [one.batch for one in slots.step(Submit(jobs(1, 2, 3, 4)), now=0.0) if isinstance(one, Send)]
    assert slots.step(Withdraw(), now=0.1) == [Recall(1), Recall(2)]
    assert slots.step(Recalled(1, bytes(batches[:1])), now=0.2) == [JobBegan(1, 1)]
    assert slots.waiting() == 1  # job 2
    assert slots.step(Finished(0, ended(9)), now=0.3) == [Reported(0, ended(9))]
    began, withdrawn = slots.step(Recalled(2, bytes(batches[1:])), now=0.4)
    assert began == JobBegan(2, 3) and isinstance(withdrawn, Withdrawn)
    assert set(withdrawn.jobs) == set(jobs(2, 4))


def test_withdraw_from_an_idle_pool_is_answered_at_once() -> None:
    assert make().step(Withdraw(), now=0.0) == [Withdrawn(())]


def test_a_retired_child_ends_its_job_and_another_takes_its_slot() -> None:
    slots = make(stop_grace_s=5.0)
    slots.step(Submit(jobs(1, 2)), now=0.0)
    assert slots.step(Retire(0, "worn"), now=0.0) == [Recall(0), Dismiss(0, "worn")]
    assert slots.step(Recalled(0, bytes([2])), now=0.0) == [JobBegan(0, 1)]
    assert slots.step(Finished(0, ended(1)), now=7.0) == [Reported(0, ended(1))]
    assert slots.step(ChildDied(0, b"", "status 0"), now=7.1) == [Start(0)]
    assert slots.step(ChildReady(0), now=7.2) == [Send(0, 0, jobs(2))]


def test_closing_lets_running_jobs_finish_within_the_grace() -> None:
    slots = make(children=2)
    slots.step(Submit([Job(1, "slow"), *jobs(2, 3)]), now=0.0)
    never_ran = "the pool stopped before the task started"
    assert slots.step(Close(grace_s=10.0), now=0.0) == [Recall(1), Dismiss(0, STOPS), Dismiss(1, STOPS)]
    effects = slots.step(Recalled(1, bytes([0])), now=0.0)
    assert effects == [JobBegan(1, 2), JobsLost([JobLoss(3, charged=False, ran=False, reason=never_ran)])]
    slots.step(Finished(1, ended(2)), now=1.0)
    assert slots.step(ChildDied(1, b"", "status 0"), now=1.0) == []
    reason = "its task was still running at the end of the shutdown grace period"
    assert slots.step(Tick(), now=10.0) == [Kill(0, reason)]
    effects = slots.step(ChildDied(0, b"", "SIGKILL"), now=10.1)
    assert effects == [JobsLost([JobLoss(1, charged=False, ran=True, reason=reason)]), PoolClosed()]


def test_an_idle_child_that_does_not_leave_is_killed() -> None:
    slots = make(stop_grace_s=5.0)
    assert slots.step(Close(grace_s=600.0), now=0.0) == [Dismiss(0, STOPS)]
    assert slots.step(Tick(), now=5.0) == [Kill(0, "it did not exit at the end of the shutdown grace period")]


def test_what_is_submitted_after_closing_comes_straight_back() -> None:
    slots = make()
    slots.step(Close(grace_s=0.0), now=0.0)
    reason = "the pool stopped before the task started"
    assert slots.step(Submit(jobs(1)), now=0.0) == [
        JobsLost([JobLoss(1, charged=False, ran=False, reason=reason)])
    ]


# ---- room --------------------------------------------------------------------------------------------


def test_room_is_one_for_each_idle_child_until_a_task_has_been_measured() -> None:
    slots: Machine = Slots(SlotSettings(children=3))
    slots.step(Open(), now=0.0)
    assert slots.room() == 0
    slots.step(ChildReady(0), now=0.0)
    slots.step(ChildReady(1), now=0.0)
    assert slots.room() == 2
    slots.step(Submit(jobs(1)), now=0.0)
    assert slots.room() == 1


def test_room_is_a_few_batches_for_quick_tasks_and_none_behind_slow_ones() -> None:
    slots = make(batch_target_s=0.0105)
    assert slots.room() == 30
    slots.step(Submit(jobs(*range(25))), now=0.0)
    assert slots.room() == 5
    slots = make()
    slots.step(Submit(jobs(1)), now=0.0)
    slots.step(Finished(0, ended(1, runtime_s=SLOW_S)), now=0.0)
    slots.step(Submit(jobs(2)), now=0.0)
    assert slots.room() == 0


# ---- growing and shrinking (F4) ----------------------------------------------------------------------


def test_a_pool_grows_by_starting_children_in_free_slots() -> None:
    slots = make(children=1)
    assert slots.step(Resize(3), now=0.0) == [Start(1), Start(2)]
    slots.step(ChildReady(2), now=0.0)
    assert set(sent(slots.step(Submit(jobs(*range(4))), now=0.0))) == {0, 2}


def test_a_pool_shrinks_by_its_idle_children_and_nobody_takes_their_place() -> None:
    slots = make(children=3)
    slots.step(Submit([Job(1, "slow")]), now=0.0)  # child 0 has it
    assert slots.step(Resize(1), now=0.0) == [Dismiss(2, SHRINKS), Dismiss(1, SHRINKS)]
    assert slots.step(ChildDied(1, b"", "ended"), now=0.0) == []
    assert slots.step(ChildDied(2, b"", "ended"), now=0.0) == []
    assert slots.step(Resize(2), now=0.0) == [Start(1)]
    assert Reported(0, ended(1)) in slots.step(Finished(0, ended(1)), now=0.0)


def test_a_busy_child_that_must_go_finishes_its_job_first() -> None:
    slots = make(children=2)
    slots.step(Submit([Job(1, "slow"), Job(2, "slow")]), now=0.0)
    assert slots.step(Resize(1), now=0.0) == [Dismiss(1, SHRINKS)]
    assert slots.step(Finished(1, ended(2)), now=9.0) == [Reported(1, ended(2))]
    assert slots.step(ChildDied(1, b"", "ended"), now=9.0) == []


def test_a_child_that_is_being_started_goes_before_those_that_work() -> None:
    slots = make(children=1)
    slots.step(Resize(2), now=0.0)
    assert slots.step(Resize(1), now=0.0) == [Kill(1, "pool shrinking")]
    assert slots.step(ChildDied(1, b"", "killed"), now=0.0) == []
    assert slots.step(Resize(1), now=0.0) == []


# ---- recycling -------------------------------------------------------------------------------------


def test_a_child_gets_no_more_jobs_than_it_may_run_and_goes_after_the_last() -> None:
    """F5."""
    slots = make(children=1, jobs_max=6)  # two of them went into making it
    assert sent(slots.step(Submit(jobs(*range(10))), now=0.0)) == {0: [0, 1, 2, 3]}
    effects = slots.step(Finished(0, ended(0, 1, 2, 3)), now=0.01)
    assert Dismiss(0, "max_tasks_per_child reached after 6 tasks") in effects
    assert slots.step(ChildDied(0, b"", "ended"), now=0.02) == [Start(0)]
    assert sent(slots.step(ChildReady(0), now=0.03)) == {0: [4, 5, 6, 7, 8, 9]}


def test_memory_is_looked_at_while_a_job_runs_and_when_it_ends() -> None:
    slots = make(children=1, memory_max_bytes=100)
    slots.step(Tick(), now=0.0)
    slots.step(Weighed(0, 10), now=1.0)
    slots.step(Submit(jobs(1, task="slow")), now=2.0)
    assert slots.deadline == 2.5
    assert slots.step(Tick(), now=2.5) == [Weigh(0)]
    assert slots.step(Weighed(0, 99), now=2.5) == []
    assert slots.deadline == 3.0
    assert slots.step(Finished(0, ended(1)), now=2.9)[0] == Weigh(0)
    assert slots.step(Weighed(0, 99), now=2.9) == []
    assert slots.step(Tick(), now=1000.0) == []
    assert slots.deadline is None, "a child that idles is left alone"


def test_a_heavy_child_finishes_its_job_and_goes() -> None:
    slots = make(children=1, memory_max_bytes=100)
    slots.step(Submit(jobs(1, 2, task="slow")), now=2.0)
    assert slots.step(Weighed(0, 101), now=2.5) == [
        Overweight(0, 1, 101),
        Dismiss(0, "memory use of 0 MiB exceeds max_memory_per_child of 0 MiB"),
    ]
    assert slots.step(Weighed(0, 102), now=3.0) == []
    effects = slots.step(Finished(0, ended(1)), now=9.0)
    assert sent(effects) == {}


def test_a_child_far_too_heavy_is_killed_and_its_job_charged() -> None:
    slots = make(children=1, memory_hard_bytes=100)
    slots.step(Submit(jobs(1, task="slow")), now=2.0)
    (kill,) = slots.step(Weighed(0, 101), now=2.5)
    assert isinstance(kill, Kill)
    (lost, start) = slots.step(ChildDied(0, b"", "killed"), now=2.6)
    assert isinstance(lost, JobsLost)
    assert lost.losses == [JobLoss(1, charged=True, ran=True, reason=kill.reason)]
    assert start == Start(0)


def test_an_idle_child_that_is_far_too_heavy_makes_way_before_its_next_job() -> None:
    slots = make(children=1, memory_hard_bytes=100)
    assert [type(effect) for effect in slots.step(Weighed(0, 101), now=2.5)] == [Overweight, Dismiss]


# ---- all of them anew ------------------------------------------------------------------------------


def test_children_are_replaced_one_after_the_other_and_the_busy_when_they_are_through() -> None:
    slots = make(children=3)
    slots.step(Submit(jobs(1, task="slow")), now=0.0)
    anew = "pool restart"
    assert slots.step(Replace(), now=1.0) == [Dismiss(1, anew)]
    assert slots.step(ChildDied(1, b"", "ended"), now=1.1) == [Start(1)]
    assert slots.step(ChildReady(1), now=1.2) == [Dismiss(2, anew)]
    assert slots.step(ChildDied(2, b"", "ended"), now=1.3) == [Start(2)]
    assert slots.step(ChildReady(2), now=1.4) == [], "the busy one is left alone"
    assert slots.step(Finished(0, ended(1)), now=9.0)[0] == Dismiss(0, anew)


def test_new_children_that_do_not_start_leave_the_old_ones_in_place() -> None:
    slots = make(children=2)
    slots.step(Replace(), now=2.0)
    assert slots.step(ChildDied(0, b"", "ended"), now=2.1) == [Start(0)]
    assert slots.step(ChildDied(0, b"", "broken"), now=2.2) == []
    assert slots.step(Tick(), now=2.4) == [Start(0)]
    assert slots.step(Tick(), now=30.0) == []


# ---- starts that fail ------------------------------------------------------------------------------


def fail_starts(slots: Machine, children: int, rounds: int, now: float) -> tuple[list[PoolFailed], float]:
    failed: list[PoolFailed] = []
    for _ in range(rounds):
        for child in range(children):
            effects = slots.step(ChildDied(child, b"", "no disk"), now)
            failed += [effect for effect in effects if isinstance(effect, PoolFailed)]
        assert slots.deadline is not None
        now = max(now, slots.deadline)
        slots.step(Tick(), now)
    return failed, now


@pytest.mark.parametrize("children", [1, 8])
def test_a_pool_that_has_worked_is_patient_with_failing_starts(children: int) -> None:
    """Children that fail together fail once: a large pool is as patient as a small one."""
    slots = make(children=children)
    for child in range(children):
        assert PoolFailed not in map(type, slots.step(ChildDied(child, b"", "killed"), now=10.0))
    failed, now = fail_starts(slots, children, 9, now=10.0)
    assert failed == []
    assert now > 30.0, "it waits longer and longer"
    failed, _ = fail_starts(slots, children, 1, now)
    assert failed == [PoolFailed("10 attempts failed; last error: no disk")]


def test_a_pool_with_one_child_that_works_never_fails() -> None:
    slots = make(children=2)
    failed, _ = fail_starts(slots, 1, 50, now=0.0)
    assert failed == []


def test_a_pool_without_a_child_for_as_long_as_a_start_may_take_has_failed() -> None:
    slots = make(children=1, start_timeout_s=20.0)
    slots.step(ChildDied(0, b"", "killed"), now=10.0)  # it had run something
    (kill,) = slots.step(Tick(), now=30.0)
    assert isinstance(kill, Kill)
    (failed,) = slots.step(ChildDied(0, b"", "killed"), now=30.0)
    assert failed == PoolFailed("1 attempts failed; last error: not ready after 20 s")
